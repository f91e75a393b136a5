"""The weight files of a Hugging Face folder, opened lazily and read by box.

`WeightFiles` is one view of one or many safetensors files. Names have the family's prefix, whether
the file has it or not. pytorch_model.bin is a pickle, whose reader can be made to run code: it is
refused, with the command that converts it. Quantized weights are dequantized where they are read:

fp8     (DeepSeek-V3) one factor per block of 128 x 128 in a second tensor, NAME_scale_inv
MXFP4   (gpt-oss) NAME [E, I, O] is stored as NAME_blocks [E, O, I / 32, 16] uint8, two 4-bit values per byte, the lower
        half first, and NAME_scales [E, O, I / 32] uint8, a power of two per block of 32 values, 127 for 1. Open Compute
        Project, "OCP Microscaling Formats (MX) Specification" 1.0, sections 5.2 and 5.3.

    E experts   I inputs   O outputs
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from nanotrain.errors import HuggingFaceError
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

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"  # in order of preference
MAX_INDEX_BYTES = 1 << 26  # that of DeepSeek-V3, with 91,991 tensors, has 9 MB
PICKLES = ("pytorch_model.bin.index.json", "pytorch_model.bin")


TEXT_MODEL = "language_model."  # in the names of a model that sees images too
SCALE = "_scale_inv"  # ending of the names of block factors


def fp8_block_size(raw: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block of fp8 weights, from a parsed config.json; None without
    quantization.

    Raises:
        HuggingFaceError: another quantization.
    """
    quantization = raw.get("quantization_config") or {}
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if not quantization or method == "mxfp4":  # whose tensors show it
        return None
    try:
        rows, columns = list_of(
            object_of(quantization, "it").get("weight_block_size"), "weight_block_size", length=2
        )
        if method == "fp8":
            return whole_number(rows, "weight_block_size", low=1), whole_number(
                columns, "weight_block_size", low=1
            )
    except ValueError:
        pass
    fix = "choose a checkpoint without quantization"
    why = "weights are read in fp32, bf16, fp16, or fp8 with a factor per block (weight_block_size: two whole numbers)"
    raise HuggingFaceError(
        f"config.json has quantization_config: {shown(method)}", why=why, fix=fix
    )


def has_mtp_weights(folder: Path) -> bool:
    """Whether the files of a folder have layers of multi-token prediction; False where it has no
    weights.
    """
    try:
        files = _weight_files(folder)
    except HuggingFaceError:
        return False
    return any(
        name.endswith((".eh_proj.weight", "mtp.fc.weight"))
        for path in files
        for name in _open(path)
    )


class WeightFiles:
    """All weights of a Hugging Face folder; the prefix is added to names without it, except that of
    the head.

    Args:
        folder: the folder with the files.
        prefix: prefix of the names of the family.
        block_size: rows and columns of a block of fp8 weights, from `fp8_block_size`.

    Raises:
        HuggingFaceError: no weights, or a missing or damaged file.
    """

    def __init__(
        self, folder: Path, *, prefix: str, block_size: tuple[int, int] | None = None
    ) -> None:
        self.folder, self.block_size = folder, block_size
        self._tensors: dict[str, Any] = {}
        for path in _weight_files(folder):
            for stored, tensor in _open(path).items():
                stored = stored.replace(TEXT_MODEL, "", 1)
                name = (
                    stored if stored.startswith((prefix, "lm_head.", "mtp.")) else prefix + stored
                )
                self._tensors[name] = tensor
        self._tensors = dequantized(self._tensors)
        weights = [name for name in self._tensors if block_size is None or not name.endswith(SCALE)]
        self.shapes = {name: _shape(self._tensors[name]) for name in weights}

    def read(self, name: str, box: Box) -> Tensor:
        """One box of a tensor, on the CPU, in the file's dtype; fp8 weights are dequantized to
        fp32.

        Raises:
            HuggingFaceError: integers, fp8 without factors, or values that are not finite.
        """
        values: Tensor = self._tensors[name][box.slices()]
        if not values.is_floating_point():
            fix = "give a folder with weights in fp32, bf16 or fp16"
            raise HuggingFaceError(
                f"{name} is stored as {values.dtype}", why="weights are floating-point", fix=fix
            )
        if values.itemsize > 1:
            return self._finite(name, values)
        if self.block_size is None or name + SCALE not in self._tensors:
            why = "fp8 weights need quantization_config in config.json and a factor per block"
            fix = f"use a folder that has {name}{SCALE}"
            raise HuggingFaceError(f"{name} is stored as {values.dtype}", why=why, fix=fix)
        blocks = [
            torch.arange(start, stop) // size
            for start, stop, size in zip(box.start, box.stop, self.block_size, strict=True)
        ]
        factors: Tensor = self._tensors[name + SCALE][:]
        return self._finite(name, values.float() * factors[blocks[0]][:, blocks[1]])

    def _finite(self, name: str, values: Tensor) -> Tensor:
        if not bool(torch.isfinite(values).all()):
            why = "a model with them computes nothing but NaN"
            fix = "fetch the folder again, or choose another checkpoint"
            raise HuggingFaceError(
                f"{name} in {self.folder} has values that are not finite", why=why, fix=fix
            )
        return values


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        return [folder / name for name in _indexed(folder / INDEX)]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    for name in PICKLES:
        if (folder / name).exists():
            raise HuggingFaceError(
                f"{folder / name} is not read",
                why=f"it is a pickle, which can hold code, and the folder has no {SINGLE}",
                fix=f"if you trust it, convert it and copy its tokenizer files into OUT: {_conversion(folder)}",
            )
    raise HuggingFaceError(
        f"{folder} contains no weights",
        why=f"neither {INDEX} nor {SINGLE} exists",
        fix="give a folder as `save_pretrained` writes it",
    )


def _conversion(folder: Path) -> str:
    """A command of transformers, which reads a pickle with torch's `weights_only`."""
    load = f"AutoModelForCausalLM.from_pretrained({str(folder)!r}, dtype='auto')"
    program = f"from transformers import AutoModelForCausalLM; {load}.save_pretrained('OUT')"
    return "python -c " + (shlex.quote(program) if set('"$`\\!') & set(program) else f'"{program}"')


def _indexed(index: Path) -> list[str]:
    try:
        content = read_file(own_file(index), most=MAX_INDEX_BYTES)
        table = object_of(parse_json(content, allow_nan=True), "it")
        weight_map = object_of(table.get("weight_map"), "weight_map")
        return sorted(
            {
                plain_file_name(file, f"weight_map[{shown(name)}]")
                for name, file in weight_map.items()
            }
        )
    except (OSError, ValueError) as error:
        why = str(error)
        raise HuggingFaceError(
            f"{index} is no index of weights", why=why, fix="fetch the folder again"
        ) from None


def _open(path: Path) -> Mapping[str, Any]:
    """Name -> what a box can be read from by indexing."""
    try:
        file: Any = safe_open(own_file(path), framework="pt", device="cpu")
        return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # SafetensorError, KeyError, OSError: depends on the damage
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        fix = "fetch the folder again; every file of its index has to be there and complete"
        raise HuggingFaceError(f"cannot read {path}", why=reason, fix=fix) from None


BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32  # values of one scale
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the bits below the sign


class Mxfp4Tensor:
    """One tensor, read by slices of [E, I, O].

    Raises:
        HuggingFaceError: blocks and scales that do not fit.
    """

    def __init__(self, name: str, blocks: Any, *, scales: Any) -> None:
        self._blocks, self._scales = blocks, scales
        stored, expected = _shape(blocks), _shape(scales)
        if len(stored) != 4 or stored[:3] != expected or stored[3] * 2 != BLOCK:
            why = f"{name}{BLOCKS} is {list(stored)} and {name}{SCALES} is {list(expected)}"
            raise HuggingFaceError(
                f"{name} is not stored in MXFP4", why=why, fix="fetch the folder again"
            )

    def get_shape(self) -> list[int]:
        """[E, I, O]."""
        experts, outputs, blocks, _ = _shape(self._blocks)
        return [experts, blocks * BLOCK, outputs]

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        """A box of [E, I, O], in bf16, which holds every value exactly."""
        experts, inputs, outputs = box
        first, last = inputs.start // BLOCK, -(-inputs.stop // BLOCK)
        packed = self._blocks[experts, outputs, first:last]
        exponents = self._scales[experts, outputs, first:last].int() - 127
        table = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.bfloat16)
        values = torch.stack(
            (table[(packed & 15).long()], table[(packed >> 4).long()]), dim=-1
        ).flatten(-2)
        dequantized = torch.ldexp(values.float(), exponents[..., None]).bfloat16().flatten(-2)
        start = first * BLOCK
        return dequantized[..., inputs.start - start : inputs.stop - start].mT


def dequantized(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a folder, where each pair of blocks and scales is one tensor."""
    pairs = {name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)}
    pairs = {name for name in pairs if name + SCALES in tensors}
    used = {name + ending for name in pairs for ending in (BLOCKS, SCALES)}
    found = {name: tensor for name, tensor in tensors.items() if name not in used}
    for name in sorted(pairs):
        found[name] = Mxfp4Tensor(name, tensors[name + BLOCKS], scales=tensors[name + SCALES])
    return found


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape())
