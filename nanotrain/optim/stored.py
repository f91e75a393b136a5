"""`StoredTensor`: main params or a state tensor in fp32, bf16 or fp16, computed in fp32.

    fp32   the elements
    bf16   rounded to nearest; the exponent range of fp32
    fp16   rounded to nearest, with one power of two as scale per block of SCALE_BLOCK elements

fp16 has 11 bits of precision against 8 of bf16, but its range is too small for second moments:
gradients of 1e-5 would be squared to 0. A block is scaled so that its largest element is near 2^15,
which leaves 2^39 below it. A power of two changes no bit of the significand, so reading and writing
again is exact.

Options: `--main-params-dtype`, `--exp-avg-dtype`, `--exp-avg-sq-dtype`.

Source: the scaled fp16 moments of Transformer Engine's FusedAdam; blocks as in Dettmers et al.
2022, section 2.1.
"""

from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from nanotrain.comm.device import host_zeros

SCALE_BLOCK = 2048  # elements per scale: 4 bytes of scale per 4096 bytes of fp16
_LARGEST_EXPONENT = 15  # a scaled element is below the largest fp16 number, 65504
_SMALLEST_FP16 = 2.0**-24
_SMALLEST_EXPONENT = -100  # least exponent of a block: keeps scales in the range of fp32
_ROUNDS_UP = 1.0 - 2.0**-12  # an fp16 significand from here on rounds up to the next power of two


class StoredTensor:
    """A flat tensor that is read and written in fp32.

    Args:
        values: [n] in its dtype.
        scales: [ceil(n / SCALE_BLOCK)] fp32, or None.
        is_square: the elements are not negative, and only 0 is rounded to 0: with a second moment
            of 0 the step of an element would be as large as Adam's epsilon permits.
    """

    def __init__(
        self, values: Tensor, scales: Tensor | None = None, *, is_square: bool = False
    ) -> None:
        self.values = values
        self.scales = scales
        self._is_square = is_square

    @classmethod
    def zeros(
        cls,
        numel: int,
        dtype: torch.dtype,
        *,
        device: torch.device,
        is_square: bool = False,
        on_host: bool = False,
    ) -> Self:
        """A tensor of zeros, scaled where the dtype is fp16; optionally in host memory."""
        allocate = host_zeros if on_host else torch.zeros
        values = allocate(numel, dtype=dtype, device=device)
        scales = None
        if dtype is torch.float16:
            scales = torch.ones(num_scales(numel, dtype), device=values.device)
        return cls(values, scales, is_square=is_square)

    @property
    def is_fp32(self) -> bool:
        """Whether `read` returns a view."""
        return self.values.dtype is torch.float32

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The stored tensors: values, and scales of quantized states."""
        if self.scales is None:
            return (self.values,)
        return (self.values, self.scales)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements [start, stop) in fp32, a view of fp32 values.

        `start` is a multiple of SCALE_BLOCK.
        """
        values = self.values[start:stop].float()
        if self.scales is None:
            return values
        numel = len(values)
        scaled = _in_blocks(values) * self._scales(start, numel)[:, None]
        return scaled.flatten()[:numel]

    def write(self, values: Tensor, start: int = 0) -> None:
        """Store fp32 elements from `start` on, a multiple of SCALE_BLOCK."""
        stored = self.values[start : start + len(values)]
        if self.scales is None:
            if not self.is_fp32 or stored.data_ptr() != values.data_ptr():
                stored.copy_(values)
            return
        blocks = _in_blocks(values)
        scales = _block_scales(blocks)
        self._scales(start, len(values)).copy_(scales)
        blocks = blocks / scales[:, None]
        if self._is_square:
            blocks = torch.where(blocks > 0, blocks.clamp(min=_SMALLEST_FP16), blocks)
        stored.copy_(blocks.flatten()[: len(values)])

    def _scales(self, start: int, numel: int) -> Tensor:
        """The scales of the blocks of elements [start, start + numel)."""
        assert start % SCALE_BLOCK == 0, "a block has one scale"
        assert self.scales is not None, "only scaled tensors have scales"
        first = start // SCALE_BLOCK
        count = -(-numel // SCALE_BLOCK)
        return self.scales[first : first + count]


def num_scales(numel: int, dtype: torch.dtype) -> int:
    """The number of scales of a tensor: one per block in fp16, else 0.

    >>> num_scales(5000, torch.float16), num_scales(5000, torch.bfloat16)
    (3, 0)
    """
    return -(-numel // SCALE_BLOCK) if dtype is torch.float16 else 0


def stored_bytes(numel: int, dtype: torch.dtype) -> int:
    """Bytes of elements and scales.

    >>> stored_bytes(5000, torch.float16)
    10012
    """
    return numel * dtype.itemsize + 4 * num_scales(numel, dtype)


def _in_blocks(values: Tensor) -> Tensor:
    """[n] -> [blocks, SCALE_BLOCK], padded with zeros."""
    return pad(values, (0, -len(values) % SCALE_BLOCK)).view(-1, SCALE_BLOCK)


def _block_scales(blocks: Tensor) -> Tensor:
    """The power of two per block by which its largest element, in fp16, becomes 2^14 or more."""
    significand, exponent = torch.frexp(blocks.abs().amax(dim=1))
    rounds_up = significand >= _ROUNDS_UP
    exponent = (exponent + rounds_up).clamp(min=_SMALLEST_EXPONENT)
    return torch.ldexp(torch.ones_like(significand), exponent - _LARGEST_EXPONENT)
