"""Weights in MXFP4 (gpt-oss), read by box in bf16.

NAME [E, I, O] is stored as two tensors, both uint8:

    NAME_blocks [E, O, I / 32, 16]   two 4-bit values per byte, the lower half first
    NAME_scales [E, O, I / 32]       a power of two per block of 32 values, 127 for 1

    E experts   I inputs   O outputs

Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification" 1.0, sections 5.2 and
5.3.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nanotrain.errors import HuggingFaceError

BLOCKS, SCALES = "_blocks", "_scales"  # endings of the names
BLOCK = 32  # values per scale
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the three bits below the sign


class Mxfp4Tensor:
    """One tensor, read by slices of [E, I, O].

    Raises:
        HuggingFaceError: blocks and scales that do not fit.
    """

    def __init__(self, name: str, blocks: Any, *, scales: Any) -> None:
        self._blocks = blocks
        self._scales = scales
        packed = stored_shape(blocks)
        scaled = stored_shape(scales)
        if len(packed) != 4 or packed[:3] != scaled or packed[3] * 2 != BLOCK:
            why = f"{name}{BLOCKS} is {list(packed)} and {name}{SCALES} is {list(scaled)}"
            what = f"{name} is not stored in MXFP4"
            raise HuggingFaceError(what, why=why, fix="fetch the folder again")

    def get_shape(self) -> list[int]:
        """[E, I, O]."""
        experts, outputs, blocks, _ = stored_shape(self._blocks)
        return [experts, blocks * BLOCK, outputs]

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        """A box of [E, I, O], in bf16, which holds every value exactly."""
        experts, inputs, outputs = box
        first = inputs.start // BLOCK
        last = -(-inputs.stop // BLOCK)
        packed = self._blocks[experts, outputs, first:last]
        exponents = self._scales[experts, outputs, first:last].int() - 127
        table = torch.tensor([*VALUES, *(-value for value in VALUES)], dtype=torch.bfloat16)
        low = table[(packed & 15).long()]
        high = table[(packed >> 4).long()]
        values = torch.stack((low, high), dim=-1).flatten(-2)
        scaled = torch.ldexp(values.float(), exponents[..., None]).bfloat16().flatten(-2)
        start = first * BLOCK
        return scaled[..., inputs.start - start : inputs.stop - start].mT


def dequantized(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a folder, where each pair of blocks and scales is one tensor."""
    joined = dict(tensors)
    for blocks in sorted(tensors):
        name = blocks.removesuffix(BLOCKS)
        scales = name + SCALES
        if blocks.endswith(BLOCKS) and scales in tensors:
            joined[name] = Mxfp4Tensor(name, joined.pop(blocks), scales=joined.pop(scales))
    return joined


def stored_shape(tensor: Any) -> tuple[int, ...]:
    """The shape of a tensor, or of a lazy reader of a tensor in a file."""
    return tuple(tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape())
