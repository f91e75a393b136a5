"""Write a Hugging Face folder from a stream of parameters.

assemble    tensors are assembled from their parameters (GPT-2's c_attn has three)
shard       and written in files of at most MAX_SHARD_BYTES, each as soon as it is full
finish      index, model card, config.json; the folder is whole, or not there

The tokenizer is written first, since it may be refused.
"""

import json
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from nanotrain.checkpoint.export_folder import export_folder
from nanotrain.config.model import ModelConfig
from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.companions import CONFIG_FILE, Companions
from nanotrain.interop.hf.families import FAMILIES, config_to_hf, family_of
from nanotrain.interop.hf.hub import CARD_FILE, model_card
from nanotrain.interop.hf.names import (
    TensorMapping,
    constants_of,
    map_parameters,
    mtp_copies,
    tensor_shapes,
)
from nanotrain.precision.dtypes import TORCH_DTYPES, torch_name
from nanotrain.runs.files import write_text
from nanotrain.spec.boxes import Box

MAX_SHARD_BYTES = 5 * 10**9


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
        tensors: (parameter name, full tensor with padding) in any order, each parameter once. A
            lazy stream is read one by one, so at most about one file is in memory.
        dtype: dtype of the written weights, "fp32", "bf16" or "fp16".
        family: a key of FAMILIES; None selects that of the model's origin, else the first that can
            represent the model.
        companions: sources of tokenizer, generation_config.json and config.json.

    Returns:
        The family written.

    Raises:
        HuggingFaceError: no family can represent the model.
        CheckpointError: the folder is not empty.
        EnvironmentFault: the folder cannot be written; nothing is left in it.
    """
    companions = companions or Companions()
    family = _choose_family(
        model_config, family, preferred=str(companions.origin_config.get("model_type"))
    )
    mappings = map_parameters(model_config, FAMILIES[family])
    copies, constants = (
        mtp_copies(model_config, FAMILIES[family]),
        constants_of(model_config, FAMILIES[family]),
    )
    numel = sum(
        prod(shape) * (1 + len(copies.get(name, ())))
        for name, shape in tensor_shapes(mappings).items()
    )
    numel += sum(prod(shape) for _, shape in constants.values())
    name, has_tokenizer = folder.resolve().name, companions.tokenizer is not None
    with export_folder(folder, nbytes=numel * TORCH_DTYPES[dtype].itemsize) as temporary:
        written = config_to_hf(model_config, family=family, dtype=torch_name(dtype))
        config, same_file = companions.config(model_config, written)
        write_text(temporary / CONFIG_FILE, json.dumps(config))  # AutoTokenizer reads it
        tokens = companions.write_tokenizer(temporary)
        shards = _ShardWriter(temporary)
        for stored, tensor in _assemble(tensors, mappings, dtype=TORCH_DTYPES[dtype]):
            shards.add(stored, tensor)
            for copy in copies.get(stored, ()):
                shards.add(copy, tensor.clone())  # a file refuses two names of one storage
        for constant, (value, shape) in constants.items():
            shards.add(constant, torch.full(shape, value, dtype=TORCH_DTYPES[dtype]))
        shards.finish()
        companions.write_generation_config(temporary, tokens)
        card = model_card(
            model_config, name=name, family=family, dtype=dtype, has_tokenizer=has_tokenizer
        )
        write_text(temporary / CARD_FILE, card)
        if same_file is not None and not tokens:
            shutil.copyfile(same_file, temporary / CONFIG_FILE)
        else:
            write_text(
                temporary / CONFIG_FILE,
                json.dumps(config | tokens, indent=2, sort_keys=True) + "\n",
            )
    return family


def _choose_family(model_config: ModelConfig, name: str | None, *, preferred: str) -> str:
    """The family of that name, else the preferred one if it can represent the model, else the first
    that can.
    """
    if name is None and preferred in FAMILIES:
        with suppress(HuggingFaceError):  # the model has changed since it was imported
            return family_of(model_config, name=preferred)
    return family_of(model_config, name=name)


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
        self._folder = folder
        self._open: dict[str, Tensor] = {}
        self._written: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor; a full file is written first."""
        if (
            self._open
            and sum(each.nbytes for each in self._open.values()) + tensor.nbytes > MAX_SHARD_BYTES
        ):
            self._flush()
        self._open[name] = tensor
        self._total_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write the last file and give all files their final names, which contain the number of
        files.
        """
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
        (self._folder / "model.safetensors.index.json").write_text(
            json.dumps(table, indent=2) + "\n"
        )

    def _flush(self) -> None:
        part = self._part(len(self._written))
        part.touch()
        mode = part.stat().st_mode
        try:
            # transformers refuses files without this mark
            save_file(self._open, part, metadata={"format": "pt"})
        except SafetensorError as error:
            if number := re.search(r"os error (\d+)", str(error)):
                raise OSError(int(number[1]), os.strerror(int(number[1]))) from None
            raise
        part.chmod(mode)  # save_file ignores the umask and makes files private
        self._written.append(list(self._open))
        self._open = {}

    def _part(self, index: int) -> Path:
        return self._folder / f"part-{index:05d}.safetensors"
