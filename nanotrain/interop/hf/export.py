"""Write a Hugging Face folder from a stream of parameters.

assemble    tensors are assembled from their parameters (GPT-2's c_attn has three)
shard       and written in files of at most MAX_SHARD_BYTES, each as soon as it is full
finish      index, tokenizer files, model card, config.json; config.json last: a folder without it is incomplete
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nanotrain.config.config import ModelConfig
from nanotrain.errors import EnvironmentFault, HuggingFaceError
from nanotrain.interop.hf.companions import CONFIG_FILE, GENERATION_FILE, TOKENIZER_FILES, Companions
from nanotrain.interop.hf.families import FAMILIES, config_to_hf, family_of
from nanotrain.interop.hf.hub import CARD_FILE, model_card
from nanotrain.interop.hf.names import TensorMapping, map_parameters, mtp_copies
from nanotrain.precision.dtypes import TORCH_DTYPES, torch_name
from nanotrain.runs.files import disk_errors, free_space, write_text
from nanotrain.spec.boxes import Box

MAX_SHARD_BYTES = 5 * 10**9
_OTHER_FILES = ("model.safetensors.index.json", GENERATION_FILE, CARD_FILE, CONFIG_FILE)


def export_weights(
    folder: Path,
    model_config: ModelConfig,
    *,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: str = "fp32",
    family: str | None = None,
    companions: Companions | None = None,
) -> str:
    """Write a model as a Hugging Face folder.

    Args:
        folder: created if absent; must be empty.
        model_config: of the model, its vocabulary size set.
        tensors: (parameter name, full tensor with padding) in any order, each parameter once. A lazy stream is read
            one by one, so at most about one file is in memory.
        dtype: of the written weights, "fp32", "bf16" or "fp16".
        family: a key of FAMILIES; None selects that of the model's origin, else the first that can represent the model.
        companions: where tokenizer, generation_config.json and config.json come from.

    Returns:
        The family written.

    Raises:
        HuggingFaceError: no family can represent the model; the folder is not empty.
        EnvironmentFault: the folder cannot be written; nothing is left in it.
    """
    companions = companions or Companions()
    family = _choose_family(model_config, family, preferred=companions.family())
    _prepare(folder)
    mappings = map_parameters(model_config, FAMILIES[family].naming)
    copies = mtp_copies(model_config, FAMILIES[family].naming)
    _require_space(folder, mappings, copies=copies, dtype=TORCH_DTYPES[dtype])
    shards = _ShardWriter(folder)
    with _emptied_after_an_error(folder, shards):
        for name, tensor in _assemble(tensors, mappings, dtype=TORCH_DTYPES[dtype]):
            shards.add(name, tensor)
            for copy in copies.get(name, ()):
                shards.add(copy, tensor.clone())  # a file refuses two names of one storage
        shards.finish()
        written = config_to_hf(model_config, family=family, dtype=torch_name(dtype))
        tokens = companions.copy_tokenizer(folder)
        config, same_file = companions.config(model_config, written)
        companions.write_generation_config(folder, tokens)
        name, has_tokenizer = folder.resolve().name, companions.tokenizer_source is not None
        card = model_card(model_config, name=name, family=family, dtype=dtype, has_tokenizer=has_tokenizer)
        write_text(folder / CARD_FILE, card)
        if same_file is not None and not tokens:
            shutil.copyfile(same_file, folder / CONFIG_FILE)
        else:
            write_text(folder / CONFIG_FILE, json.dumps(config | tokens, indent=2, sort_keys=True) + "\n")
    return family


def _choose_family(model_config: ModelConfig, name: str | None, *, preferred: str | None) -> str:
    """The family of that name, else the preferred one if it can represent the model, else the first that can."""
    if name is None and preferred in FAMILIES:
        try:
            return family_of(model_config, name=preferred)
        except HuggingFaceError:  # the model has changed since it was imported
            return family_of(model_config)
    return family_of(model_config, name=name)


@contextmanager
def _emptied_after_an_error(folder: Path, shards: "_ShardWriter") -> Iterator[None]:
    """If the block fails, remove the files that an export writes; those of others stay."""
    try:
        with disk_errors(folder / CONFIG_FILE, fix="choose another folder"):
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


def _require_space(
    folder: Path, mappings: Mapping[str, TensorMapping], *, copies: Mapping[str, Sequence[str]], dtype: torch.dtype
) -> None:
    """Check that a disk has space for the weights, before a tensor is read."""
    shapes = {name: shape for mapping in mappings.values() for name, shape in mapping.tensor_shapes.items()}
    numel = sum(prod(shape) * (1 + len(copies.get(name, ()))) for name, shape in shapes.items())
    needed = numel * dtype.itemsize
    if shutil.disk_usage(folder).free < needed:
        what, why = f"the weights cannot be written to {folder}", f"{needed:,} bytes needed, {free_space(folder)}"
        raise EnvironmentFault(what, why=why, fix="free space, or choose another folder")


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
