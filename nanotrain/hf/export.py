"""A Hugging Face folder from a stream of parameters.

assemble    tensors are put together from the parameters that lie in them (GPT-2's c_attn has three)
shard       and written in files of at most MAX_SHARD_BYTES, as soon as one is full
finish      index, config.json, tokenizer files; config.json last: a folder without it is not finished
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nanotrain.config.config import ModelConfig
from nanotrain.errors import HuggingFaceError
from nanotrain.hf.families import FAMILIES, config_to_hf, family_of
from nanotrain.hf.place import Place
from nanotrain.precision.dtypes import TORCH_DTYPES, torch_name
from nanotrain.topology.boxes import Box

MAX_SHARD_BYTES = 5 * 10**9
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def export_weights(
    folder: Path,
    model_config: ModelConfig,
    *,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: str = "fp32",
    family: str | None = None,
    tokenizer: Path | None = None,
) -> str:
    """Write a model as a Hugging Face folder.

    Args:
        folder: created where it is not there; must hold no weights yet.
        model_config: the model, its vocabulary size set.
        tensors: (parameter name, whole tensor with padding) in any order, each parameter once. Read one by one,
            so the stream may be lazy: what is held at once is one file's worth.
        dtype: fp32, bf16 or fp16, of the weights written.
        family: a key of FAMILIES; None takes the first that can hold the model.
        tokenizer: a tokenizer.json or a folder with tokenizer files, copied beside the weights.

    Returns:
        The family written.

    Raises:
        HuggingFaceError: no family can hold the model, the folder cannot be written or holds weights already.
    """
    family = family_of(model_config, name=family)
    _prepare(folder)
    places = FAMILIES[family].places(model_config)
    shards = _Shards(folder)
    for name, tensor in _assemble(tensors, places, dtype=TORCH_DTYPES[dtype]):
        shards.add(name, tensor)
    shards.finish()
    config = config_to_hf(model_config, family=family, dtype=torch_name(dtype))
    if tokenizer is not None:
        config |= _copy_tokenizer(tokenizer, folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return family


def _prepare(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        present = sorted(path.name for path in folder.iterdir() if path.name.startswith(("model", "pytorch_model")))
    except OSError as error:
        fix = "choose a folder you may write to"
        raise HuggingFaceError(f"cannot write to {folder}", why=error.strerror or str(error), fix=fix) from None
    if present:
        why = f"{present[0]} would be mixed with the new weights"
        raise HuggingFaceError(f"{folder} holds weights already", why=why, fix="choose a new folder")


def _assemble(
    tensors: Iterable[tuple[str, Tensor]], places: dict[str, Place], *, dtype: torch.dtype
) -> Iterable[tuple[str, Tensor]]:
    """Whole Hugging Face tensors, each as soon as the last parameter in it has come."""
    waiting: dict[str, set[str]] = {}
    for name, place in places.items():
        for stored in place.tensor_shapes:
            waiting.setdefault(stored, set()).add(name)
    begun: dict[str, Tensor] = {}
    for name, tensor in tensors:
        assert name in places, f"{name} has no place in this family: the exported model would lack it"
        place = places[name]
        shapes = place.tensor_shapes
        for piece in place.pieces(Box.full(place.shape)):
            if piece.tensor not in begun:
                begun[piece.tensor] = torch.empty(shapes[piece.tensor], dtype=dtype)
            begun[piece.tensor][piece.stored.slices()].copy_(piece.as_stored(tensor.detach()[piece.box.slices()]))
            waiting[piece.tensor].remove(name)
            if not waiting[piece.tensor]:
                del waiting[piece.tensor]
                yield piece.tensor, begun.pop(piece.tensor)
    missing = sorted(name for names in waiting.values() for name in names)
    assert not missing, f"{missing} never came: the exported model would lack them"


class _Shards:
    """Writes tensors into numbered files and remembers which lies where."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Tensor] = {}
        self._written: list[list[str]] = []
        self._open_bytes = 0
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor; writes the file before it once that is full."""
        if self._open and self._open_bytes + tensor.nbytes > MAX_SHARD_BYTES:
            self._flush()
        self._open[name] = tensor
        self._open_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write what is left and give the files their final names: only now is their number known."""
        self._flush()
        count = len(self._written)
        if count == 1:
            self._part(0).rename(self._folder / "model.safetensors")
            return
        places: dict[str, str] = {}
        for index, names in enumerate(self._written):
            final = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            self._part(index).rename(self._folder / final)
            places |= dict.fromkeys(names, final)
        table = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(places.items()))}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(table, indent=2) + "\n")

    def _flush(self) -> None:
        part = self._part(len(self._written))
        part.touch()
        mode = part.stat().st_mode
        save_file(self._open, part, metadata={"format": "pt"})  # transformers refuses files without this mark
        part.chmod(mode)  # save_file leaves a file for its owner only, whatever the umask
        self._written.append(list(self._open))
        self._open, self._open_bytes = {}, 0

    def _part(self, index: int) -> Path:
        return self._folder / f"part-{index:05d}.safetensors"


def _copy_tokenizer(source: Path, folder: Path) -> dict[str, Any]:
    """Copy tokenizer files and say what config.json learns from them: the ids of the first and last token."""
    files = [source] if source.is_file() else [source / name for name in TOKENIZER_FILES if (source / name).exists()]
    if not files:
        why = f"none of {', '.join(TOKENIZER_FILES)} is there"
        raise HuggingFaceError(f"{source} holds no tokenizer", why=why, fix="give a tokenizer.json or its folder")
    for file in files:
        shutil.copyfile(file, folder / ("tokenizer.json" if source.is_file() else file.name))
    return _special_tokens(folder)


def _special_tokens(folder: Path) -> dict[str, Any]:
    settings, vocabulary = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not (settings.exists() and vocabulary.exists()):
        return {}
    ids = {token["content"]: token["id"] for token in json.loads(vocabulary.read_text()).get("added_tokens", ())}
    names = json.loads(settings.read_text())
    found: dict[str, Any] = {}
    for role in ("bos", "eos"):
        token = names.get(f"{role}_token")
        content = token.get("content") if isinstance(token, dict) else token
        if content in ids:
            found[f"{role}_token_id"] = ids[content]
    return found
