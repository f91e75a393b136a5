"""Scales of the fp8 casts' Triton kernels: from amaxes, stored, and as factors of values.

    Target                an fp8 matrix that programs write, with its scales; `build_target`
    raise_amax            the largest amax that programs of an expert measure
    inverse_scale         the scale of an amax
    given_factors         from given scales or amaxes, of experts or lines
    tile_factor           of a block of a tile's size
    short_block_factors   of blocks of 32 values of a line
    store_scales          one scale per line
    store_words           four scales per line, as the exponents in one word

A line is a row of a target. `where` has what programs know of a tile: the expert, whether it has
rows, which lines it has, where values start in lines, their number, and the last number that the
layout of scales needs: the row of blocks, or words per line.
"""

from typing import NamedTuple

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


class Target(NamedTuple):
    """A matrix in fp8 that programs write.

    Strides are fields, not tuples: in branches and loops Triton 3.6 cannot read a stride of 1 from
    a tuple in a tuple.
    """

    data: Tensor
    scales: Tensor | None
    given: Tensor | None  # inverse scales, or amaxes
    expert_stride: int
    row_stride: int
    scale_expert_stride: int
    scale_row_stride: int
    scale_block_stride: int
    given_expert_stride: int
    given_row_stride: int


if triton is not None:

    @triton.jit
    def raise_amax(amax: tl.tensor, magnitude: tl.tensor, where: tl.tuple) -> None:
        """Raise the amax of the expert, where amaxes are measured."""
        if amax is not None:
            expert, is_read, _, _, _, _ = where
            tl.atomic_max(amax + expert, tl.max(tl.max(magnitude, 1), 0), mask=is_read)

    @triton.jit
    def inverse_scale(amax: tl.tensor, how: tl.tuple) -> tl.tensor:
        """`inverse_scales` of one amax."""
        factor = tl.div_rn(tl.maximum(amax, 2.0**-100), how.largest)
        if how.power_of_two:
            bits = factor.to(tl.int32, bitcast=True) + 0x7FFFFF  # up to the next exponent
            factor = (bits & 0x7F800000).to(tl.float32, bitcast=True)
        return tl.where(amax < float("inf"), factor, float("nan"))

    @triton.jit
    def given_factors(
        target: tl.tuple, lines: tl.tensor, where: tl.tuple, how: tl.tuple
    ) -> tl.tensor:
        """The factor of an expert's scale, or factors [tile] from amaxes of lines."""
        expert, is_read, is_line, _, _, _ = where
        given = target.given + expert * target.given_expert_stride
        if how.block_rows == 0:
            factors = tl.div_rn(1.0, tl.load(given, mask=is_read, other=1))
        else:
            amax = tl.load(given + lines * target.given_row_stride, mask=is_line, other=1)
            inverse = inverse_scale(amax, how)
            store_scales(target, lines, 0, inverse, where)
            factors = tl.div_rn(1.0, inverse)
        return factors

    @triton.jit
    def store_scales(
        target: tl.tuple, lines: tl.tensor, block: tl.tensor, inverse: tl.tensor, where: tl.tuple
    ) -> None:
        """Store the scale of one block of each line."""
        expert, _, is_line, _, _, _ = where
        line_offsets = expert * target.scale_expert_stride + lines * target.scale_row_stride
        offsets = line_offsets + block * target.scale_block_stride
        tl.store(target.scales + offsets, inverse, mask=is_line)

    @triton.jit
    def store_words(
        target: tl.tuple, lines: tl.tensor, words: tl.tensor, where: tl.tuple, how: tl.tuple
    ) -> None:
        """Store the scales of four blocks of each line, bytes of one word."""
        expert, _, is_line, start, _, groups = where
        group = start // how.tile
        if how.swizzles:  # see `swizzle_32_4_4`
            offsets = (lines // 128 * groups + group) * 128 + lines % 32 * 4 + lines % 128 // 32
        else:
            line_offsets = expert * target.scale_expert_stride + lines * target.scale_row_stride
            offsets = line_offsets // 4 + group
        pointers = target.scales.to(tl.pointer_type(tl.int32), bitcast=True) + offsets
        tl.store(pointers, words, mask=is_line)

    @triton.jit
    def exponent(inverse: tl.tensor) -> tl.tensor:
        """The exponent of a power of two; 255 is NaN."""
        return (inverse.to(tl.int32, bitcast=True) >> 23) & 255

    @triton.jit
    def short_block_factors(
        target: tl.tuple, lines: tl.tensor, magnitude: tl.tensor, where: tl.tuple, how: tl.tuple
    ) -> tl.tensor:
        """Factors [tile, tile] of blocks of 32 values of lines."""
        _, _, _, _, length, _ = where
        size: tl.constexpr = how.tile
        num_blocks: tl.constexpr = size // how.block
        blocks = tl.reshape(magnitude, [size, num_blocks, how.block])
        inverse = inverse_scale(tl.max(blocks, 2), how)
        index = tl.arange(0, num_blocks)[None, :]
        is_block = index * how.block < length
        exponents = tl.where(is_block, exponent(inverse), 0)
        store_words(target, lines, tl.sum(exponents << (8 * index), 1), where, how)
        factors = tl.div_rn(1.0, inverse)[:, :, None]
        factors = tl.broadcast_to(factors, [size, num_blocks, how.block])
        return tl.reshape(factors, [size, size])

    @triton.jit
    def tile_factor(
        target: tl.tuple, tile_amax: tl.tensor, where: tl.tuple, how: tl.tuple
    ) -> tl.tensor:
        """The factor of a block of a tile's size; stores its scale."""
        expert, is_read, _, start, _, tile_line = where
        inverse = inverse_scale(tile_amax, how)
        line_offset = expert * target.scale_expert_stride + tile_line * target.scale_row_stride
        offset = line_offset + start // how.tile * target.scale_block_stride
        tl.store(target.scales + offset, inverse, mask=is_read)
        return tl.div_rn(1.0, inverse)


def build_target(values: Tensor, scales: Tensor, *, given: Tensor | None) -> Target:
    """A target with its strides.

    Offsets are relative to the first expert, so its elements are not part of the stride.
    """
    expert_stride = 0
    if len(values) > 1:
        expert_stride = values.stride(0) - values.shape[2]
    scale_expert, scale_row, scale_block = _scale_strides(scales, is_relative=given is None)
    given_expert, given_row = _given_strides(given)
    return Target(
        data=values,
        scales=scales,
        given=given,
        expert_stride=expert_stride,
        row_stride=values.stride(1),
        scale_expert_stride=scale_expert,
        scale_row_stride=scale_row,
        scale_block_stride=scale_block,
        given_expert_stride=given_expert,
        given_row_stride=given_row,
    )


def _scale_strides(scales: Tensor, *, is_relative: bool) -> tuple[int, int, int]:
    """Strides of an expert, a row and a block; zeros where scales have another layout."""
    if scales.dim() != 3:
        return 0, 0, 0
    expert, row, block = scales.stride()
    if is_relative:
        expert -= scales.shape[2] * block
    if len(scales) == 1:
        expert = 0
    return expert, row, block


def _given_strides(given: Tensor | None) -> tuple[int, int]:
    """Strides of an expert and a row; zeros in dims of size 1."""
    if given is None:
        return 0, 0
    experts, rows = given.shape
    expert_stride = given.stride(0) if experts > 1 else 0
    row_stride = given.stride(1) if rows > 1 else 0
    return expert_stride, row_stride
