"""Weights in MXFP4 (gpt-oss): dequantized where they are read.

A tensor NAME [E, I, O] is stored as NAME_blocks [E, O, I / 32, 16] uint8, two 4-bit values per byte, the lower half
first, and NAME_scales [E, O, I / 32] uint8, a power of two per block of 32 values, 127 for 1.

Open Compute Project, "OCP Microscaling Formats (MX) Specification" 1.0, sections 5.2 and 5.3.

    E experts   I inputs   O outputs
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nanotrain.errors import HuggingFaceError

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
            raise HuggingFaceError(f"{name} is not stored in MXFP4", why=why, fix="fetch the folder again")

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
        values = torch.stack((table[(packed & 15).long()], table[(packed >> 4).long()]), dim=-1).flatten(-2)
        dequantized = torch.ldexp(values.float(), exponents[..., None]).bfloat16().flatten(-2)
        start = first * BLOCK
        return dequantized[..., inputs.start - start : inputs.stop - start].mT


def dequantized(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a folder, where each pair of blocks and scales is one tensor."""
    pairs = {name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)}
    pairs = {name for name in pairs if name + SCALES in tensors}
    used = {name + ending for name in pairs for ending in (BLOCKS, SCALES)}
    plain = {name: tensor for name, tensor in tensors.items() if name not in used}
    return plain | {
        name: Mxfp4Tensor(name, tensors[name + BLOCKS], scales=tensors[name + SCALES]) for name in sorted(pairs)
    }


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(tensor.shape if isinstance(tensor, Tensor) else tensor.get_shape())
