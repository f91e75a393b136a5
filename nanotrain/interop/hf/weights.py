"""The weight files of a Hugging Face folder, opened lazily and read by box.

    WeightFiles       all safetensors files of a folder as one table of tensors
    fp8_block_size    the size of the blocks of fp8 weights, from config.json
    has_other_head    whether the files have a head that is not the embedding
    has_mtp_weights   whether the files have layers of multi-token prediction

Names have the family's prefix, whether the file has it or not. pytorch_model.bin is a pickle, whose
reader can be made to run code: it is refused, with the command that converts it. Quantized weights
are dequantized where they are read: MXFP4 by mxfp4.py, fp8 (DeepSeek-V3) here, with one factor per
block of 128 x 128 in a second tensor, NAME_scale_inv.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors import safe_open
from torch import Tensor

from nanotrain.errors import HuggingFaceError
from nanotrain.interop.hf.mxfp4 import Mxfp4Tensor, dequantized, stored_shape
from nanotrain.log import log_once
from nanotrain.spec.boxes import Box
from nanotrain.untrusted import (
    list_of,
    object_of,
    own_file,
    parse_json,
    plain_file_name,
    read_file,
    shown,
    whole_number,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"  # in order of preference
MAX_INDEX_BYTES = 1 << 26  # the index of DeepSeek-V3, with 91,991 tensors, has 9 MB
PICKLES = ("pytorch_model.bin.index.json", "pytorch_model.bin")
TEXT_MODEL = "language_model."  # in the names of a model that also sees images
ROWS_COMPARED = 4096  # rows of embedding and head that are compared
FLOATS = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}  # names in files and configurations
SCALE = "_scale_inv"  # ending of the names of block factors

HEADS = ("lm_head.", "embed_out.")  # names of output layers, which have no prefix


class BlockSize(NamedTuple):
    """The size of a block of weights with one factor."""

    rows: int
    columns: int


def fp8_block_size(raw: Mapping[str, Any]) -> BlockSize | None:
    """The block size of fp8 weights, from a parsed config.json; None without quantization.

    Raises:
        HuggingFaceError: another quantization.
    """
    quantization = raw.get("quantization_config") or {}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if not quantization or method == "mxfp4":  # the names of the tensors show MXFP4
        return None
    block_size = _read_block_size(quantization)
    if method == "fp8" and block_size is not None:
        return block_size
    raise HuggingFaceError(
        f"config.json has quantization_config: {shown(method)}",
        why=(
            "weights are read in fp32, bf16, fp16, or fp8 with a factor per block "
            "(weight_block_size: two whole numbers)"
        ),
        fix="choose a checkpoint without quantization",
    )


def _read_block_size(quantization: Any) -> BlockSize | None:
    """The two numbers of weight_block_size; None for anything else."""
    name = "weight_block_size"
    try:
        numbers = list_of(object_of(quantization, "it").get(name), name, length=2)
        return BlockSize(*(whole_number(number, name, low=1) for number in numbers))
    except ValueError:
        return None


def has_other_head(folder: Path, *, prefix: str, embedding: str, head: str) -> bool:
    """Whether the files have a head that differs from the embedding; False without weights.

    Rows are compared in fp32, where they are read, up to the first that differ.

    Args:
        folder: the folder with the files.
        prefix: prefix of the names of the family.
        embedding: name of the tensor of word embeddings.
        head: name of the tensor of the head.
    """
    try:
        files = WeightFiles(folder, prefix=prefix)
    except HuggingFaceError:
        return False  # whoever reads the weights says why
    if not {embedding, head} <= files.shapes.keys():
        return False
    shape = files.shapes[head]
    if files.shapes[embedding] != shape:
        return True
    for first in range(0, shape[0], ROWS_COMPARED):
        rows = Box((first, 0), (min(first + ROWS_COMPARED, shape[0]), shape[1]))
        if not torch.equal(files.read(embedding, rows).float(), files.read(head, rows).float()):
            return True
    return False


def has_mtp_weights(folder: Path) -> bool:
    """Whether the files have layers of multi-token prediction; False without weights."""
    try:
        files = _weight_files(folder)
    except HuggingFaceError:
        return False
    for path in files:
        if any(name.endswith((".eh_proj.weight", "mtp.fc.weight")) for name in _open(path)):
            return True
    return False


class WeightFiles:
    """All weights of a Hugging Face folder, by names with the family's prefix.

    Args:
        folder: the folder with the files.
        prefix: prefix of the names of the family; added to names without it, but not to the head's.
        block_size: size of the blocks of fp8 weights, from `fp8_block_size`.

    Raises:
        HuggingFaceError: no weights, or a missing or damaged file.
    """

    def __init__(self, folder: Path, *, prefix: str, block_size: BlockSize | None = None) -> None:
        self.folder = folder
        self.block_size = block_size
        stored: dict[str, Any] = {}
        for path in _weight_files(folder):
            for stored_name, tensor in _open(path).items():
                name = stored_name.replace(TEXT_MODEL, "", 1)
                if not name.startswith((prefix, *HEADS, "mtp.")):
                    name = prefix + name
                if name in stored:
                    _reject_second(name, path)
                stored[name] = tensor
        self._tensors = dequantized(stored)
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name, tensor in self._tensors.items():
            is_factor = block_size is not None and name.endswith(SCALE)
            if not is_factor:
                self.shapes[name] = stored_shape(tensor)

    @property
    def dtypes(self) -> dict[str, str]:
        """The data types of the tensors, as configurations name them; not of quantized ones."""
        dtypes = {}
        for name in self.shapes:
            tensor = self._tensors[name]
            stored = None if isinstance(tensor, Mxfp4Tensor) else tensor.get_dtype()
            if stored in FLOATS:
                dtypes[name] = FLOATS[stored]
        return dtypes

    def read(self, name: str, box: Box, *, is_whole: bool = False) -> Tensor:
        """One box of a tensor, on the CPU, in the file's dtype; fp8 weights in fp32.

        Args:
            name: name of the tensor.
            box: the box.
            is_whole: whether the tensor has whole numbers.

        Raises:
            HuggingFaceError: integers, fp8 without factors, or values that are not finite.
        """
        values: Tensor = self._tensors[name][box.slices()]
        if is_whole and values.dtype in (torch.int32, torch.int64):
            return values
        if not values.is_floating_point():
            fix = "give a folder with weights in fp32, bf16 or fp16"
            what = f"{name} is stored as {values.dtype}"
            raise HuggingFaceError(what, why="weights are floating-point", fix=fix)
        if values.itemsize == 1:
            values = self._dequantize(name, values, box=box)
        if not bool(torch.isfinite(values).all()):
            raise HuggingFaceError(
                f"{name} in {self.folder} has values that are not finite",
                why="a model with them computes nothing but NaN",
                fix="fetch the folder again, or choose another checkpoint",
            )
        return values

    def _dequantize(self, name: str, values: Tensor, *, box: Box) -> Tensor:
        """fp8 values times the factors of their blocks."""
        if self.block_size is None or name + SCALE not in self._tensors:
            raise HuggingFaceError(
                f"{name} is stored as {values.dtype}",
                why="fp8 weights need quantization_config in config.json and a factor per block",
                fix=f"use a folder that has {name}{SCALE}",
            )
        blocks = []
        for start, stop, size in zip(box.start, box.stop, self.block_size, strict=True):
            blocks.append(torch.arange(start, stop) // size)
        row_blocks, column_blocks = blocks
        factors: Tensor = self._tensors[name + SCALE][:]
        return values.float() * factors[row_blocks][:, column_blocks]


def _reject_second(name: str, path: Path) -> NoReturn:
    """Raise for a tensor that two files of a folder have, or one file under two names."""
    raise HuggingFaceError(
        f"{name} is stored twice, the second time in {path}",
        why="the two may differ, and nothing says which one the model has",
        fix="fetch the folder again, or remove the file that does not belong to it",
    )


def refuse_adapter(folder: Path) -> None:
    """Refuse a folder with an adapter of PEFT, which transformers adds to the weights.

    It does so if PEFT is installed, also where the folder has all weights of the model.

    Raises:
        HuggingFaceError: there is an adapter.
    """
    adapter = folder / "adapter_config.json"
    if not adapter.is_file():
        return
    raise HuggingFaceError(
        f"{adapter} is there: the model of {folder} has an adapter (LoRA)",
        why="transformers adds it to the weights, and nanotrain reads no adapters",
        fix=(
            "merge it: AutoPeftModelForCausalLM.from_pretrained(...).merge_and_unload()"
            ".save_pretrained(OUT); if the weights are merged already, remove adapter_config.json"
        ),
    )


def _weight_files(folder: Path) -> list[Path]:
    """The files with the weights of a folder, by the rule of transformers.

    A folder may have several sets of weights: model.safetensors comes first, then the files of
    model.safetensors.index.json. Others, such as consolidated.safetensors, are not read.
    """
    if (folder / SINGLE).exists():
        if (folder / INDEX).exists():
            log_once(
                f"{folder}: {SINGLE} is read, and not the files of {INDEX}, as transformers does"
            )
        return [folder / SINGLE]
    if (folder / INDEX).exists():
        return [folder / name for name in _indexed_files(folder / INDEX)]
    for name in PICKLES:
        if (folder / name).exists():
            command = _conversion_command(folder)
            raise HuggingFaceError(
                f"{folder / name} is not read",
                why=f"it is a pickle, which can hold code, and the folder has no {SINGLE}",
                fix=(
                    f"if you trust it, convert it and copy its tokenizer files into OUT: {command}"
                ),
            )
    raise HuggingFaceError(
        f"{folder} contains no weights",
        why=f"neither {SINGLE} nor {INDEX} exists",
        fix="give a folder as `save_pretrained` writes it",
    )


def _conversion_command(folder: Path) -> str:
    """A command of transformers, which reads a pickle with torch's `weights_only`."""
    load = f"AutoModelForCausalLM.from_pretrained({str(folder)!r}, dtype='auto')"
    program = f"from transformers import AutoModelForCausalLM; {load}.save_pretrained('OUT')"
    needs_quoting = set('"$`\\!') & set(program)
    quoted = shlex.quote(program) if needs_quoting else f'"{program}"'
    return f"python -c {quoted}"


def _indexed_files(index: Path) -> list[str]:
    """The names of the files in an index of weights."""
    try:
        content = read_file(own_file(index), most=MAX_INDEX_BYTES)
        table = object_of(parse_json(content, allow_nan=True), "it")
        weight_map = object_of(table.get("weight_map"), "weight_map")
        files = set()
        for name, file in weight_map.items():
            files.add(plain_file_name(file, f"weight_map[{shown(name)}]"))
        return sorted(files)
    except (OSError, ValueError) as error:
        what = f"{index} is no index of weights"
        raise HuggingFaceError(what, why=str(error), fix="fetch the folder again") from None


def _open(path: Path) -> Mapping[str, Any]:
    """The tensors of a file by name; indexing one reads a box."""
    try:
        file: Any = safe_open(own_file(path), framework="pt", device="cpu")
        return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # SafetensorError, KeyError, OSError: depends on the damage
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        fix = "fetch the folder again; every file of its index has to be there and complete"
        raise HuggingFaceError(f"cannot read {path}", why=reason, fix=fix) from None
