"""Triton kernels that cast operands to fp8: one read, and two writes: plain and transposed.

    fp8_amax   x [R, K] -> amaxes of rows, of columns, or of the whole matrix
    fp8_cast   x [R, K] -> [R, K] for products that sum over K, [K, R] for sums over R

The rows may belong to several experts (triton_tiles.py). For products that sum over rows each
expert begins at a multiple of a unit, with zeros between.

    block        scales                       layout
    (None, None) given, one per expert        as given
    (1, None)    from amaxes of rows          one per row
    (1, 128)     from the values read         column-major, as cuBLAS takes them
    (128, 128)   from the values read         row-major
    (1, 32)      from the values read         bytes (e8m0), for dense layers in the order of cuBLAS

As operators of torch they are nodes of compiled graphs, and run on the meta device. Parameters of
kernels are annotated as in kernels/triton_softmax.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanotrain.kernels.fp8.quantize import Cast, Forms, Quantized
from nanotrain.kernels.fp8.triton_tiles import TILE, WARPS, How, num_lanes, plan_source

try:
    import triton
    import triton.language as tl

    from nanotrain.kernels.fp8.triton_tiles import locate
except ImportError:
    triton = None

ALIGNMENT = 16  # rows of the results have a multiple of this number of values, and whole blocks


class Target(NamedTuple):
    """A matrix in fp8 that programs write."""

    data: Tensor
    scales: Tensor | None
    given: Tensor | None  # inverse scales, or amaxes
    strides: tuple[int, int]  # per expert and row
    scale_strides: tuple[int, int, int]  # per expert, row and block
    given_strides: tuple[int, int]  # per expert and row


if triton is not None:

    @triton.jit
    def _read_tile(
        source: tl.tuple, rows: tl.tensor, columns: tl.tensor, end: tl.tensor
    ) -> tl.tuple:
        """A tile of the source in fp32 and its magnitudes, where NaN counts as infinity."""
        column_offsets = columns[None, :].to(tl.int64) * source.strides[1]
        offsets = rows[:, None] * source.strides[0] + column_offsets
        mask = (rows < end)[:, None] & (columns < source.num_columns)[None, :]
        values = tl.load(source.data + offsets, mask=mask, other=0).to(tl.float32)
        is_number = values == values  # false for NaN
        return values, tl.where(is_number, tl.abs(values), float("inf"))

    @triton.jit
    def _amax(source: tl.tuple, unless: tl.tensor, targets: tl.tuple, how: tl.tuple) -> None:
        """One tile of `fp8_amax`: raise the amaxes of its rows, columns or expert in `targets`."""
        row_amaxes, column_amaxes, expert_amaxes = targets
        expert, first, end, _ = locate(source, how)
        is_read = expert < source.num_experts
        if unless is not None:
            known = tl.load(unless + expert, mask=is_read, other=1)
            is_read = is_read & (known <= 0)
        end = tl.where(is_read, end, 0)
        rows = first + tl.arange(0, how.tile)
        columns = tl.program_id(1) * how.tile + tl.arange(0, how.tile)
        _, magnitude = _read_tile(source, rows, columns, end)
        if row_amaxes is not None:
            tl.atomic_max(row_amaxes + rows, tl.max(magnitude, 1), mask=rows < end)
        if column_amaxes is not None:
            offsets = expert * source.num_columns + columns
            mask = is_read & (columns < source.num_columns)
            tl.atomic_max(column_amaxes + offsets, tl.max(magnitude, 0), mask=mask)
        if expert_amaxes is not None:
            amax = tl.max(tl.max(magnitude, 1), 0)
            tl.atomic_max(expert_amaxes + expert, amax, mask=is_read)

    @triton.jit
    def _inverse_scale(amax: tl.tensor, how: tl.tuple) -> tl.tensor:
        """`inverse_scales` of one amax."""
        factor = tl.div_rn(tl.maximum(amax, 2.0**-100), how.largest)
        if how.power_of_two:
            bits = factor.to(tl.int32, bitcast=True) + 0x7FFFFF  # up to the next exponent
            factor = (bits & 0x7F800000).to(tl.float32, bitcast=True)
        return tl.where(amax < float("inf"), factor, float("nan"))

    @triton.jit
    def _store_scales(
        target: tl.tuple, offsets: tl.tensor, inverse: tl.tensor, mask: tl.tensor
    ) -> None:
        if target.scales.dtype.element_ty == tl.uint8:  # the exponent; 255 is NaN
            inverse = (inverse.to(tl.int32, bitcast=True) >> 23) & 255
        tl.store(target.scales + offsets, inverse.to(target.scales.dtype.element_ty), mask=mask)

    @triton.jit
    def _row_factors(
        target: tl.tuple, expert: tl.tensor, rows: tl.tensor, is_row: tl.tensor, how: tl.tuple
    ) -> tl.tensor:
        """Factors from given scales, or from given amaxes of rows."""
        given = target.given + expert * target.given_strides[0]
        inverse = tl.load(given + rows * target.given_strides[1], mask=is_row, other=1)
        if how.block_rows == 1:
            inverse = _inverse_scale(inverse, how)
            offsets = expert * target.scale_strides[0] + rows * target.scale_strides[1]
            _store_scales(target, offsets, inverse, is_row)
        return tl.div_rn(1.0, inverse)[:, None]

    @triton.jit
    def _block_factors(
        target: tl.tuple, magnitude: tl.tensor, where: tl.tuple, how: tl.tuple
    ) -> tl.tensor:
        """Factors of blocks of each row."""
        expert, rows, is_row, _, start, length, blocks = where
        size: tl.constexpr = how.tile
        num_blocks: tl.constexpr = size // how.block
        inner = tl.arange(0, num_blocks)
        amax = tl.max(tl.reshape(magnitude, [size, num_blocks, how.block]), 2)
        inverse = _inverse_scale(amax, how)
        row = rows[:, None]
        column = (start // how.block + inner)[None, :]
        if how.swizzles:  # see `swizzle_32_4_4`
            tile = row // 128 * ((blocks + 3) // 4) + column // 4
            offsets = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
        else:
            row_offsets = expert * target.scale_strides[0] + row * target.scale_strides[1]
            offsets = row_offsets + column * target.scale_strides[2]
        is_scale = is_row[:, None] & (inner * how.block < length)[None, :]
        _store_scales(target, offsets, inverse, is_scale)
        factors = tl.div_rn(1.0, inverse)[:, :, None]
        wide = tl.broadcast_to(factors, [size, num_blocks, how.block])
        return tl.reshape(wide, [size, size])

    @triton.jit
    def _write_tile(target: tl.tuple, read: tl.tuple, where: tl.tuple, how: tl.tuple) -> None:
        """A tile: `length` values from `start` of `rows`; a full row has `blocks` blocks."""
        values, magnitude, whole = read
        expert, rows, is_row, row_block, start, length, blocks = where
        if how.block == 0:
            factors = _row_factors(target, expert, rows, is_row, how)
        elif how.block_rows == 1:
            factors = _block_factors(target, magnitude, where, how)
        else:
            factors = tl.div_rn(1.0, whole)
            is_block = (length > 0) & (tl.max(is_row.to(tl.int32), 0) > 0)
            offset = expert * target.scale_strides[0] + row_block * target.scale_strides[1]
            offset += start // how.block * target.scale_strides[2]
            _store_scales(target, offset, whole, is_block)
        scaled = tl.minimum(tl.maximum(values * factors, -how.largest), how.largest)
        inner = tl.arange(0, how.tile)
        row_offsets = expert * target.strides[0] + rows[:, None] * target.strides[1]
        offsets = row_offsets + (start + inner)[None, :]
        mask = is_row[:, None] & (inner < length)[None, :]
        tl.store(target.data + offsets, scaled.to(target.data.dtype.element_ty), mask=mask)

    @triton.jit
    def _cast(
        source: tl.tuple, target: tl.tuple, target_t: tl.tuple, amax: tl.tensor, how: tl.tuple
    ) -> None:
        """One tile of `fp8_cast`: write it to `target` and, transposed, to `target_t`."""
        expert, first, end, padded = locate(source, how)
        start = tl.program_id(1).to(tl.int64) * how.tile
        rows = first + tl.arange(0, how.tile)
        columns = start + tl.arange(0, how.tile)
        values, magnitude = _read_tile(source, rows, columns, end)
        whole = 0.0
        blocks = 0
        blocks_t = 0
        if amax is not None or how.block_rows > 1:
            whole = tl.max(tl.max(magnitude, 1), 0)
        if amax is not None:
            tl.atomic_max(amax + expert, whole, mask=first < end)
        if how.block_rows > 1:
            whole = _inverse_scale(whole, how)
        if how.swizzles:
            blocks = tl.cdiv(source.num_columns, how.block)
            blocks_t = tl.cdiv(source.num_rows, how.block)
        if how.has_rows:
            length = (source.num_columns - start + how.unit - 1) // how.unit * how.unit
            where = expert, rows, rows < end, padded // how.tile, start, length, blocks
            _write_tile(target, (values, magnitude, whole), where, how)
        if how.has_columns:
            length = (end - first + how.unit - 1) // how.unit * how.unit
            is_row = (columns < source.num_columns) & (first < end)
            where = expert, columns, is_row, start // how.tile, padded, length, blocks_t
            _write_tile(target_t, (tl.trans(values), tl.trans(magnitude), whole), where, how)


class Plan(NamedTuple):
    """The outputs of `fp8_cast`, as integers, because operators take lists of integers."""

    block_rows: int  # 0 where scales are given
    block: int  # 0 where scales or amaxes are given
    power_of_two: int
    has_rows: int
    has_columns: int
    is_stack: int  # whether experts have equally many rows, and a transposed matrix each
    swizzles: int  # whether scales are in the order of cuBLAS
    measures: int  # whether the amaxes of experts are returned

    @property
    def unit(self) -> int:
        """Values of a row are a multiple of this."""
        return max(ALIGNMENT, self.block)

    def padded(self, length: int) -> int:
        """The length of a row of `length` values."""
        return -(-length // self.unit) * self.unit


@torch.library.custom_op("nanotrain::fp8_amax", mutates_args=())
def fp8_amax(x: Tensor, others: Sequence[Tensor | None], *, rows: bool, columns: bool) -> Tensor:
    """Amaxes in one tensor: of rows [R] and of columns [E, K], or of experts [E].

    `others` are `offs` and [E] numbers; experts whose number is above 0 are not read and have 0.
    """
    offs, unless = others
    out = _empty_amax(x, others, rows=rows, columns=columns).zero_()
    if x.numel():
        num_row_amaxes = len(x) if rows else 0
        row_amaxes = out[:num_row_amaxes] if rows else None
        column_amaxes = out[num_row_amaxes:] if columns else None
        expert_amaxes = None if rows or columns else out
        grid, source = plan_source(x, offs)
        targets = (row_amaxes, column_amaxes, expert_amaxes)
        how = How(num_lanes(source.num_experts)).constants()
        _amax[grid](source, unless, targets, how, num_warps=WARPS)
    return out


@fp8_amax.register_fake
def _empty_amax(x: Tensor, others: Sequence[Tensor | None], *, rows: bool, columns: bool) -> Tensor:
    """The amaxes of `fp8_amax`, uninitialized: rows, then columns per expert, or one per expert."""
    experts = 1 if others[0] is None else len(others[0])
    size = 0
    if rows:
        size += len(x)
    if columns:
        size += experts * x.shape[1]
    if not rows and not columns:
        size = experts
    return x.new_empty(size, dtype=torch.float32)


@torch.library.custom_op("nanotrain::fp8_cast", mutates_args=())
def fp8_cast(
    x: Tensor, others: Sequence[Tensor | None], *, plan: Sequence[int], dtype: torch.dtype
) -> list[Tensor]:
    """Values and scales, transposed values and scales, amaxes; empty where `plan` has none.

    `others` are `offs`, and for both forms the scales or amaxes that are given.
    """
    how = Plan(*plan)
    out = CastOutputs(*_empty_cast(x, others, plan=plan, dtype=dtype))
    offs, given, given_t = others
    if not x.numel():
        return list(out)
    grid, source = plan_source(x, offs)
    target = None
    target_t = None
    amax = None
    if how.has_rows:
        target = _build_target(out.values, out.scales, given=given)
    if how.has_columns:
        target_t = _build_target(out.values_t, out.scales_t, given=given_t)
    if how.measures:
        amax = out.amax.zero_()
    constants = How(
        lanes=num_lanes(source.num_experts),
        unit=how.unit,
        block_rows=how.block_rows,
        block=how.block,
        power_of_two=bool(how.power_of_two),
        swizzles=bool(how.swizzles),
        largest=torch.finfo(dtype).max,
        has_rows=bool(how.has_rows),
        has_columns=bool(how.has_columns),
    ).constants()
    _cast[grid](source, target, target_t, amax, constants, num_warps=WARPS)
    return list(out)


class CastOutputs(NamedTuple):
    """The outputs of `fp8_cast`; empty tensors where a form is not written."""

    values: Tensor
    scales: Tensor
    values_t: Tensor
    scales_t: Tensor
    amax: Tensor


@fp8_cast.register_fake
def _empty_cast(
    x: Tensor, others: Sequence[Tensor | None], *, plan: Sequence[int], dtype: torch.dtype
) -> list[Tensor]:
    """The results of `fp8_cast`, uninitialized; empty tensors for what the plan leaves out."""
    how = Plan(*plan)
    rows, columns = x.shape
    experts = 1 if others[0] is None else len(others[0])
    if how.is_stack:
        length = how.padded(rows // experts)
        num_rows = experts * length
        shape_t = (experts, columns, length)
    else:
        num_rows = how.padded(rows + (how.unit - 1) * (experts - 1))
        shape_t = (1, columns, num_rows)
    values, scales, values_t, scales_t, amax = (
        x.new_empty(0, dtype=torch.float32) for _ in CastOutputs._fields
    )
    if how.has_rows:
        width = how.padded(columns)
        values = x.new_empty((1, rows, width), dtype=dtype)
        scale_rows = num_rows if how.block_rows > 1 else rows
        scales = _empty_scales(x, how, shape=(1, scale_rows, width))
    if how.has_columns:
        values_t = x.new_empty(shape_t, dtype=dtype)
        scales_t = _empty_scales(x, how, shape=shape_t if how.block else (experts, columns, 1))
    if how.measures:
        amax = x.new_empty(experts, dtype=torch.float32)
    return [values, scales, values_t, scales_t, amax]


def _empty_scales(x: Tensor, how: Plan, *, shape: tuple[int, int, int]) -> Tensor:
    """Scales of matrices of a shape in their layout.

    Scales in the order of cuBLAS are 0 where they are not written.
    """
    experts, rows, columns = shape
    blocks = -(-columns // max(how.block, 1))
    if how.block == 0:
        # zeros, for experts without rows
        return x.new_zeros((experts, rows, 1) if how.block_rows else 0, dtype=torch.float32)
    if how.swizzles:
        num_tiles = -(-rows // 128) * -(-blocks // 4)
        return x.new_zeros(num_tiles * 512, dtype=torch.uint8)
    if how.block < TILE:
        return x.new_empty((experts, rows, blocks), dtype=torch.uint8)
    if how.block_rows > 1:
        return x.new_empty((experts, -(-rows // how.block_rows), blocks), dtype=torch.float32)
    return x.new_empty((experts, blocks, rows), dtype=torch.float32).mT


def _build_target(values: Tensor, scales: Tensor, *, given: Tensor | None) -> Target:
    """A target with its strides.

    Offsets are relative to the first expert, so its elements are not part of the stride.
    """
    expert_stride = 0
    if len(values) > 1:
        expert_stride = values.stride(0) - values.shape[2]
    return Target(
        data=values,
        scales=scales,
        given=given,
        strides=(expert_stride, values.stride(1)),
        scale_strides=_scale_strides(scales, is_relative=given is None),
        given_strides=_given_strides(given),
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


def amaxes(x: Tensor, offs: Tensor | None = None, *, unless: Tensor | None = None) -> Tensor:
    """[E], the amax of the rows of each expert; not measured (0) where `unless` [E] is above 0."""
    return fp8_amax(x.detach(), [offs, unless], rows=False, columns=False)


def cast(
    x: Tensor,
    how: Cast,
    *,
    inverse: Tensor | None = None,
    offs: Tensor | None = None,
    is_stack: bool = False,
    measures: bool = False,
) -> tuple[Forms, Tensor]:
    """Both forms of x [R, K], and the amaxes [E] of experts where they are measured.

    Args:
        x: fp32, bf16 or fp16, of any strides.
        how: blocks and dtype.
        inverse: [E], one scale per expert; None where a recipe has blocks.
        offs: [E] int32, the end of each expert's rows; None for one matrix.
        is_stack: whether experts have equally many rows, and a transposed matrix each.
        measures: whether to measure amaxes.
    """
    rows, columns = how.block
    plan = Plan(
        block_rows=rows or 0,
        block=columns or 0,
        power_of_two=int(how.power_of_two),
        has_rows=int(how.rows),
        has_columns=int(how.columns),
        is_stack=int(is_stack),
        swizzles=int(columns == 32 and offs is None),
        measures=int(measures),
    )
    given = None if inverse is None else inverse.view(-1, 1)
    given_t = given
    if plan.block_rows and not plan.block:
        amaxes = fp8_amax(x, [offs, None], rows=how.rows, columns=how.columns)
        num_row_amaxes = len(x) if how.rows else 0
        given = amaxes[:num_row_amaxes].view(1, -1)
        given_t = amaxes[num_row_amaxes:].view(-1, x.shape[1])
    out = CastOutputs(*fp8_cast(x, [offs, given, given_t], plan=list(plan), dtype=how.dtype))
    plain = None
    transposed = None
    if how.rows:
        scales = _arrange_scales(out.scales, inverse, plan=plan)
        plain = Quantized(out.values.flatten(0, 1), scales, how.block)
    if how.columns:
        scales = _arrange_scales(out.scales_t, inverse, plan=plan)
        transposed = Quantized(out.values_t.flatten(0, 1), scales, how.block)
    return Forms(plain, transposed), out.amax


def _arrange_scales(scales: Tensor, inverse: Tensor | None, *, plan: Plan) -> Tensor:
    """The scales of a `Quantized`, from the outputs of `fp8_cast`."""
    if inverse is not None:
        return inverse.view(-1, 1)
    if plan.swizzles:
        return scales.view(torch.float8_e8m0fnu)
    if plan.block_rows > 1 or plan.block < TILE:
        return scales.flatten(0, 1)
    return scales.mT.flatten(0, 1).t()
