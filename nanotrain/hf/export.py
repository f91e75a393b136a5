"""Write a Hugging Face folder from a stream of parameters.

assemble    tensors are assembled from their parameters (GPT-2's c_attn has three)
shard       and written in files of at most MAX_SHARD_BYTES, each as soon as it is full
finish      index, tokenizer files, model card, config.json; config.json last: a folder without it is incomplete
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nanotrain.config.config import ModelConfig
from nanotrain.errors import EnvironmentFault, HuggingFaceError
from nanotrain.hf.card import CARD_FILE, GENERATION_FILE, model_card, write_generation_config
from nanotrain.hf.families import FAMILIES, config_to_hf, family_of
from nanotrain.hf.naming import map_parameters, mtp_copies
from nanotrain.hf.tensor_mapping import TensorMapping
from nanotrain.precision.dtypes import TORCH_DTYPES, torch_name
from nanotrain.runs.files import disk_errors, free_space, write_text
from nanotrain.topology.boxes import Box
from nanotrain.untrusted import object_of, parse_json

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
_OTHER_FILES = ("model.safetensors.index.json", GENERATION_FILE, CARD_FILE, "config.json")


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
        folder: created if absent; must be empty.
        model_config: of the model, its vocabulary size set.
        tensors: (parameter name, full tensor with padding) in any order, each parameter once. A lazy stream is read
            one by one, so at most about one file is in memory.
        dtype: of the written weights, "fp32", "bf16" or "fp16".
        family: a key of FAMILIES; None selects the first that can represent the model.
        tokenizer: a tokenizer.json or a folder with tokenizer files, copied beside the weights.

    Returns:
        The family written.

    Raises:
        HuggingFaceError: no family can represent the model; the folder is not empty.
        EnvironmentFault: the folder cannot be written; nothing is left in it.
    """
    family = family_of(model_config, name=family)
    _prepare(folder)
    mappings = map_parameters(model_config, FAMILIES[family].naming)
    shards = _ShardWriter(folder)
    with _emptied_after_an_error(folder, shards):
        copies = mtp_copies(model_config, FAMILIES[family].naming)
        for name, tensor in _assemble(tensors, mappings, dtype=TORCH_DTYPES[dtype]):
            shards.add(name, tensor)
            for copy in copies.get(name, ()):
                shards.add(copy, tensor.clone())  # a file refuses two names of one storage
        shards.finish()
        config = config_to_hf(model_config, family=family, dtype=torch_name(dtype))
        special_tokens = {} if tokenizer is None else _copy_tokenizer(tokenizer, folder)
        config |= special_tokens
        write_generation_config(folder, special_tokens, source=tokenizer)
        name, has_tokenizer = folder.resolve().name, tokenizer is not None
        card = model_card(model_config, name=name, family=family, dtype=dtype, has_tokenizer=has_tokenizer)
        write_text(folder / CARD_FILE, card)
        write_text(folder / "config.json", json.dumps(config, indent=2, sort_keys=True) + "\n")
    return family


@contextmanager
def _emptied_after_an_error(folder: Path, shards: "_ShardWriter") -> Iterator[None]:
    """If the block fails, remove the files that an export writes; those of others stay."""
    try:
        with disk_errors(folder / "config.json", fix="choose another folder"):
            yield
    except BaseException as error:
        if shards.is_first:  # else another export writes into the folder
            for name in (*shards.file_names, *TOKENIZER_FILES, *_OTHER_FILES):
                (folder / name).unlink(missing_ok=True)
        if isinstance(error, SafetensorError) and "os error" in str(error):
            what, why = f"the weights cannot be written to {folder}", f"{error}; {free_space(folder)}"
            raise EnvironmentFault(what, why=why, fix="free space, or choose another folder") from None
        raise


def _prepare(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        present = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        fix = "choose a writable folder"
        raise HuggingFaceError(f"cannot write to {folder}", why=error.strerror or str(error), fix=fix) from None
    if present:
        why = f"it contains {present[0]}, which would be mixed with the new files or replaced"
        raise HuggingFaceError(f"{folder} is not empty", why=why, fix="choose a new folder")


def _assemble(
    tensors: Iterable[tuple[str, Tensor]], mappings: dict[str, TensorMapping], *, dtype: torch.dtype
) -> Iterable[tuple[str, Tensor]]:
    """Full Hugging Face tensors, each as soon as its last parameter was read."""
    missing: dict[str, set[str]] = {}
    for name, mapping in mappings.items():
        for stored in mapping.tensor_shapes:
            missing.setdefault(stored, set()).add(name)
    incomplete: dict[str, Tensor] = {}
    for name, tensor in tensors:
        assert name in mappings, f"{name} is not in this family: the exported model would lack it"
        mapping = mappings[name]
        shapes = mapping.tensor_shapes
        kept = tensor.dtype if name.endswith(".expert_bias") else dtype  # fp32 in every checkpoint
        for part in mapping.slices(Box.full(mapping.shape)):
            if part.tensor not in incomplete:
                incomplete[part.tensor] = torch.empty(shapes[part.tensor], dtype=kept)
            target = part.picked(incomplete[part.tensor][part.stored.slices()])
            target.copy_(part.as_stored(tensor.detach()[part.box.slices()]))
        for stored in shapes:
            missing[stored].remove(name)
            if not missing[stored]:
                del missing[stored]
                yield stored, incomplete.pop(stored)
    absent = sorted(name for names in missing.values() for name in names)
    assert not absent, f"{absent} were not in the stream: the exported model would lack them"


class _ShardWriter:
    """Writes tensors into numbered files, and the index of which file has which tensor."""

    def __init__(self, folder: Path) -> None:
        self.is_first = False  # whether the first file is this writer's
        self.file_names: list[str] = []
        self._folder = folder
        self._open: dict[str, Tensor] = {}
        self._written: list[list[str]] = []
        self._open_bytes = 0
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor; a full file is written first."""
        if self._open and self._open_bytes + tensor.nbytes > MAX_SHARD_BYTES:
            self._flush()
        self._open[name] = tensor
        self._open_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the last file and give all files their final names, which contain the number of files."""
        self._flush()
        count = len(self._written)
        if count == 1:
            self._rename(0, "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._written):
            final = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            self._rename(index, final)
            weight_map |= dict.fromkeys(names, final)
        table = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self._folder / "model.safetensors.index.json").write_text(json.dumps(table, indent=2) + "\n")

    def _flush(self) -> None:
        part = self._part(len(self._written))
        part.touch(exist_ok=False)
        self.is_first = True
        self.file_names.append(part.name)
        mode = part.stat().st_mode
        save_file(self._open, part, metadata={"format": "pt"})  # transformers refuses files without this mark
        part.chmod(mode)  # save_file ignores the umask and makes files private
        self._written.append(list(self._open))
        self._open, self._open_bytes = {}, 0

    def _rename(self, index: int, name: str) -> None:
        self._part(index).rename(self._folder / name)
        self.file_names.append(name)

    def _part(self, index: int) -> Path:
        return self._folder / f"part-{index:05d}.safetensors"


def _copy_tokenizer(source: Path, folder: Path) -> dict[str, Any]:
    """Copy tokenizer files; returns the entries of config.json with the ids of the special tokens."""
    files = [source] if source.is_file() else [source / name for name in TOKENIZER_FILES if (source / name).exists()]
    if not files:
        why = f"none of {', '.join(TOKENIZER_FILES)} exists"
        raise HuggingFaceError(f"{source} contains no tokenizer", why=why, fix="give a tokenizer.json or its folder")
    for file in files:
        shutil.copyfile(file, folder / ("tokenizer.json" if source.is_file() else file.name))
    settings, vocabulary = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not (settings.exists() and vocabulary.exists()):
        return {}
    try:
        added = parse_json(vocabulary.read_bytes(), allow_nan=True).get("added_tokens", ())
        ids = {token["content"]: token["id"] for token in added}
        names = object_of(parse_json(settings.read_bytes(), allow_nan=True), settings.name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise HuggingFaceError(f"{source} contains no tokenizer", why=why, fix="give another --tokenizer") from None
    entries: dict[str, Any] = {}
    for role in ("bos", "eos"):
        token = names.get(f"{role}_token")
        content = token.get("content") if isinstance(token, dict) else token
        if content in ids:
            entries[f"{role}_token_id"] = ids[content]
    return entries
