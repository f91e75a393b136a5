"""Write a Hugging Face folder from a stream of parameters.

1. the tokenizer first, since it may be refused
2. tensors, assembled from their parameters (GPT-2's c_attn has three)
3. files of at most MAX_SHARD_BYTES, each written as soon as it is full
4. index, model card and config.json; the folder is complete, or not there
"""

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nanotrain.checkpoint.export_folder import export_folder
from nanotrain.config.model import ModelConfig
from nanotrain.config.mup import without_mup
from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.companions import CONFIG_FILE, Companions
from nanotrain.interop.hf.families import (
    FAMILIES,
    FOLDER_ROWS,
    Family,
    config_to_hf,
    family_of,
)
from nanotrain.interop.hf.folder_row import ROW_FILE
from nanotrain.interop.hf.hub import CARD_FILE, model_card
from nanotrain.interop.hf.names import (
    TOKEN_EXPERTS,
    Constant,
    constant_tensors,
    map_parameters,
    mtp_copies,
    tensor_shapes,
)
from nanotrain.interop.hf.tensor_mapping import TensorMapping
from nanotrain.log import get_logger
from nanotrain.precision.dtypes import TORCH_DTYPES, torch_name
from nanotrain.quantities import count_of
from nanotrain.runs.files import write_text
from nanotrain.spec.boxes import Box

MAX_SHARD_BYTES = 5 * 10**9
log = get_logger(__name__)


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
        folder: the folder to write, created if absent; must be empty.
        model_config: configuration of the model, its vocabulary size set.
        tensors: (parameter name, full tensor with padding) in any order, every parameter once. A
            lazy stream is read one by one, so at most about one file is in memory.
        dtype: dtype of the written weights, "fp32", "bf16" or "fp16". With "auto" a tensor has its
            dtype in the origin; a tensor that the origin lacks has the most frequent dtype there.
            One line says which tensors change.
        family: a key of FAMILIES; None selects the family of the model's origin, else the first
            that can represent the model.
        companions: sources of tokenizer, generation_config.json and config.json.

    Returns:
        The family written.

    Raises:
        HuggingFaceError: no family can represent the model.
        CheckpointError: the folder is not empty.
        EnvironmentFault: the folder cannot be written; nothing is left in it.
    """
    companions = companions or Companions()
    model_config = without_mup(model_config)
    preferred = str(companions.origin_config.get("model_type"))
    family = _choose_family(model_config, family, preferred=preferred)
    contents = _Contents.plan(model_config, FAMILIES[family])
    dtypes = _TensorTypes.choose(dtype, companions.dtypes())
    dtypes.log_changes(contents)
    dtype = dtypes.most
    torch_dtype = TORCH_DTYPES[dtype]
    with export_folder(folder, nbytes=contents.numel * torch_dtype.itemsize) as temporary:
        written = config_to_hf(model_config, family=family, dtype=torch_name(dtype))
        config, same_file = companions.config(model_config, written)
        write_text(temporary / CONFIG_FILE, json.dumps(config))  # AutoTokenizer reads it
        tokens = companions.write_tokenizer(temporary)
        _write_shards(temporary, contents, tensors=tensors, dtypes=dtypes)
        companions.write_generation_config(temporary, tokens)
        card = model_card(
            model_config,
            name=folder.resolve().name,
            family=family,
            dtype=dtype,
            has_tokenizer=companions.tokenizer is not None,
        )
        write_text(temporary / CARD_FILE, card)
        if family in FOLDER_ROWS:
            write_text(temporary / ROW_FILE, FOLDER_ROWS[family])
        if same_file is not None and not tokens:
            shutil.copyfile(same_file, temporary / CONFIG_FILE)
        else:
            text = json.dumps(config | tokens, indent=2, sort_keys=True)
            write_text(temporary / CONFIG_FILE, text + "\n")
    return family


def _choose_family(model_config: ModelConfig, name: str | None, *, preferred: str) -> str:
    """The family of that name, else the preferred one if it can represent the model, else any."""
    if name is None and preferred in FAMILIES:
        try:
            return family_of(model_config, name=preferred)
        except HuggingFaceError:
            pass  # the model has changed since it was imported
    return family_of(model_config, name=name)


@dataclass(frozen=True)
class _Contents:
    """The tensors of an exported folder."""

    mappings: Mapping[str, TensorMapping]  # tensors of every parameter
    copies: Mapping[str, Sequence[str]]  # names of copies, by the name of the original
    constants: Mapping[str, Constant]  # tensors without parameters
    numel: int  # number of elements of all tensors

    @classmethod
    def plan(cls, model_config: ModelConfig, family: Family) -> "_Contents":
        """The tensors of a model in the names of a family."""
        mappings = map_parameters(model_config, family)
        copies = mtp_copies(model_config, family)
        constants = constant_tensors(model_config, family)
        numel = sum(prod(constant.shape) for constant in constants.values())
        for name, shape in tensor_shapes(mappings).items():
            numel += prod(shape) * (1 + len(copies.get(name, ())))
        return cls(mappings, copies, constants, numel=numel)


@dataclass(frozen=True)
class _TensorTypes:
    """The data types of the tensors of a folder."""

    most: str  # of tensors that have none of their own
    own: Mapping[str, str]  # by name
    before: Mapping[str, str]  # in the origin, by name

    @classmethod
    def choose(cls, dtype: str, before: Mapping[str, str]) -> "_TensorTypes":
        """One data type for all tensors; with "auto" the data types that the origin has."""
        if dtype != "auto":
            return cls(dtype, {}, before)
        counts = Counter(before.values()).most_common(1)
        return cls(counts[0][0] if counts else "fp32", before, before)

    def of(self, name: str) -> torch.dtype:
        """The data type of a tensor."""
        return TORCH_DTYPES[self.own.get(name, self.most)]

    def log_changes(self, contents: _Contents) -> None:
        """Say which tensors have another data type than in the origin."""
        counts: Counter[str] = Counter()
        changed: set[str] = set()
        for parameter, mapping in contents.mappings.items():
            if not parameter.endswith((".expert_bias", TOKEN_EXPERTS)):
                changed.update(mapping.tensor_shapes)
        for name in changed - self.own.keys():
            before = self.before.get(name, self.most)
            if before != self.most:
                counts[before] += 1
        for before, count in sorted(counts.items()):
            log.info(
                "%s that the pretrained checkpoint has in %s: written in %s; --dtype auto keeps "
                "the data type of each tensor",
                count_of(count, "tensor"),
                before,
                self.most,
            )


def _write_shards(
    folder: Path,
    contents: _Contents,
    *,
    tensors: Iterable[tuple[str, Tensor]],
    dtypes: "_TensorTypes",
) -> None:
    """Write all tensors into files, and the index of the files."""
    shards = _ShardWriter(folder)
    for name, tensor in _assemble(tensors, contents.mappings, dtypes=dtypes):
        shards.add(name, tensor)
        for copy in contents.copies.get(name, ()):
            # a file refuses two names of one storage
            shards.add(copy, tensor.to(dtypes.of(copy), copy=True))
    for name, constant in contents.constants.items():
        shards.add(name, torch.full(constant.shape, constant.value, dtype=dtypes.of(name)))
    shards.finish()


def _assemble(
    tensors: Iterable[tuple[str, Tensor]],
    mappings: Mapping[str, TensorMapping],
    *,
    dtypes: "_TensorTypes",
) -> Iterable[tuple[str, Tensor]]:
    """Full Hugging Face tensors, each as soon as its last parameter was read."""
    missing = _parameters_by_tensor(mappings)
    incomplete: dict[str, Tensor] = {}
    for name, tensor in tensors:
        assert name in mappings, f"{name} is not in this family: the exported model would lack it"
        shapes = mappings[name].tensor_shapes
        for stored, shape in shapes.items():
            if stored not in incomplete:
                stored_dtype = dtypes.of(stored)
                if name.endswith(".expert_bias") and stored not in dtypes.own:
                    stored_dtype = tensor.dtype  # fp32 in every checkpoint
                if name.endswith(TOKEN_EXPERTS):
                    stored_dtype = torch.int64
                incomplete[stored] = torch.empty(shape, dtype=stored_dtype)
        _copy_parameter(tensor.detach(), mappings[name], targets=incomplete)
        for stored in shapes:
            missing[stored].remove(name)
            if not missing[stored]:
                del missing[stored]
                yield stored, incomplete.pop(stored)
    absent = sorted(chain(*missing.values()))
    assert not absent, f"{absent} were not in the stream: the exported model would lack them"


def _parameters_by_tensor(mappings: Mapping[str, TensorMapping]) -> dict[str, set[str]]:
    """The names of the parameters that a tensor is assembled from, for every tensor."""
    parameters: dict[str, set[str]] = {}
    for name, mapping in mappings.items():
        for stored in mapping.tensor_shapes:
            parameters.setdefault(stored, set()).add(name)
    return parameters


def _copy_parameter(
    parameter: Tensor, mapping: TensorMapping, *, targets: Mapping[str, Tensor]
) -> None:
    """Copy a parameter into its tensors."""
    for part in mapping.slices(Box.full(mapping.shape)):
        target = part.picked(targets[part.tensor][part.stored.slices()])
        target.copy_(part.as_stored(parameter[part.box.slices()]))


class _ShardWriter:
    """Writes tensors into numbered files, and the index of which file has which tensor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Tensor] = {}
        self._open_bytes = 0
        self._written: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor; a full file is written first."""
        if self._open and self._open_bytes + tensor.nbytes > MAX_SHARD_BYTES:
            self._flush()
        self._open[name] = tensor
        self._open_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the last file and the index; the final names contain the number of files."""
        self._flush()
        count = len(self._written)
        if count == 1:
            self._part(0).rename(self._folder / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._written):
            final = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            self._part(index).rename(self._folder / final)
            weight_map |= dict.fromkeys(names, final)
        table = {
            "metadata": {"total_size": self._total_bytes},
            "weight_map": dict(sorted(weight_map.items())),
        }
        index_file = self._folder / "model.safetensors.index.json"
        index_file.write_text(json.dumps(table, indent=2) + "\n")

    def _flush(self) -> None:
        """Write the collected tensors to the next safetensors file."""
        part = self._part(len(self._written))
        part.touch()
        mode = part.stat().st_mode
        try:
            # transformers refuses files without this mark
            save_file(self._open, part, metadata={"format": "pt"})
        except SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            code = int(number[1])
            raise OSError(code, os.strerror(code)) from None
        part.chmod(mode)  # save_file ignores the umask and makes files private
        self._written.append(list(self._open))
        self._open = {}
        self._open_bytes = 0

    def _part(self, index: int) -> Path:
        return self._folder / f"part-{index:05d}.safetensors"
