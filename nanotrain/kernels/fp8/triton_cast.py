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

from nanotrain.kernels.fp8.quantize import (
    Cast,
    ComputedInput,
    Forms,
    NormInput,
    Quantized,
    SwigluInput,
)
from nanotrain.kernels.fp8.triton_scales import build_target
from nanotrain.kernels.fp8.triton_tiles import TILE, WARPS, How, line_unit, num_lanes, plan_source

try:
    import triton
    import triton.language as tl

    from nanotrain.kernels.fp8.triton_scales import (
        exponent,
        given_factors,
        inverse_scale,
        raise_amax,
        short_block_factors,
        store_scales,
        store_words,
        tile_factor,
    )
    from nanotrain.kernels.fp8.triton_tiles import locate, read_tile
except ImportError:
    triton = None

# Registers per thread of a cast: two programs of 8 warps share the 65,536 of a multiprocessor.
MAX_REGISTERS = 128
# Triton 3.6 spills 100 bytes where a program transposes what it has cast.
JOINS_TENSORS = triton is not None and not triton.__version__.startswith("3.6.")


if triton is not None:

    @triton.jit
    def _amax(source: tl.tuple, unless: tl.tensor, targets: tl.tuple, how: tl.tuple) -> None:
        """One tile of `fp8_amax`: raise the amaxes of its rows, columns or expert in `targets`."""
        row_amaxes, column_amaxes, expert_amaxes = targets
        expert, first, end, _ = locate(source, tl.program_id(0), how)
        is_read = expert < source.num_experts
        if unless is not None:
            known = tl.load(unless + expert, mask=is_read, other=1)
            is_read = is_read & (known <= 0)
        end = tl.where(is_read, end, 0)
        rows = first + tl.arange(0, how.tile)
        columns = tl.program_id(1) * how.tile + tl.arange(0, how.tile)
        _, magnitude = read_tile(source, rows, columns, end)
        if row_amaxes is not None:
            tl.atomic_max(row_amaxes + rows, tl.max(magnitude, 1), mask=rows < end)
        if column_amaxes is not None:
            offsets = expert.to(tl.int64) * source.num_columns + columns
            mask = is_read & (columns < source.num_columns)
            tl.atomic_max(column_amaxes + offsets, tl.max(magnitude, 0), mask=mask)
        if expert_amaxes is not None:
            amax = tl.max(tl.max(magnitude, 1), 0)
            tl.atomic_max(expert_amaxes + expert, amax, mask=is_read)

    @triton.jit
    def _to_fp8(target: tl.tuple, scaled: tl.tensor, how: tl.tuple) -> tl.tensor:
        """Values clamped to the range of fp8, and cast."""
        clamped = tl.minimum(tl.maximum(scaled, -how.largest), how.largest)
        return clamped.to(target.data.dtype.element_ty)

    @triton.jit
    def _store_tile(
        target: tl.tuple, lines: tl.tensor, tile: tl.tensor, where: tl.tuple, first: tl.constexpr
    ) -> None:
        """Store values of lines from `start + first` on; the last one is `start + length - 1`."""
        expert, _, is_line, start, length, _ = where
        inner = first + tl.arange(0, tile.shape[1])
        line_offsets = expert * target.expert_stride + lines[:, None] * target.row_stride
        mask = is_line[:, None] & (inner < length)[None, :]
        tl.store(target.data + line_offsets + (start + inner)[None, :], tile, mask=mask)

    @triton.jit
    def _line_factors(
        target: tl.tuple,
        lines: tl.tensor,
        magnitude: tl.tensor,
        where: tl.tuple,
        how: tl.tuple,
        dim: tl.constexpr,
    ) -> tl.tensor:
        """Factors of a tile whose lines lie along `dim`; scales that are computed are stored."""
        _, _, _, start, _, _ = where
        if how.block_rows > 1:
            factors = tile_factor(target, tl.max(tl.max(magnitude, 1), 0), where, how)
        elif how.block == 0:
            factors = given_factors(target, lines, where, how)
            if how.block_rows > 0:
                factors = tl.expand_dims(factors, dim)
        else:
            inverse = inverse_scale(tl.max(magnitude, dim), how)
            store_scales(target, lines, start // how.tile, inverse, where)
            factors = tl.expand_dims(tl.div_rn(1.0, inverse), dim)
        return factors

    @triton.jit
    def _cast_rows(
        source: tl.tuple, target: tl.tuple, tile: tl.tensor, amax: tl.tensor, how: tl.tuple
    ) -> None:
        """Write the plain form of a tile."""
        expert, first, end, padded = locate(source, tile, how)
        # times a stride: weights of experts may have more than 2^31 values
        expert = expert.to(tl.int64)
        start = tl.program_id(1).to(tl.int64) * how.tile
        rows = first + tl.arange(0, how.tile)
        columns = start + tl.arange(0, how.tile)
        length = tl.cdiv(source.num_columns - start, how.unit) * how.unit
        last = padded // how.tile
        if how.swizzles:
            last = tl.cdiv(source.num_columns, how.tile)
        where = expert, first < end, rows < end, start, length, last
        values, magnitude = read_tile(source, rows, columns, end)
        raise_amax(amax, magnitude, where)
        if how.block > 0 and how.block < how.tile:
            factors = short_block_factors(target, rows, magnitude, where, how)
        else:
            factors = _line_factors(target, rows, magnitude, where, how, 1)
        _store_tile(target, rows, _to_fp8(target, values * factors, how), where, 0)

    @triton.jit
    def _cast_short_columns(
        source: tl.tuple,
        target: tl.tuple,
        first: tl.tensor,
        read: tl.tuple,
        where: tl.tuple,
        how: tl.tuple,
    ) -> None:
        """Write the transposed form of a tile with short blocks, one block of rows at a time."""
        columns, end = read
        _, _, _, _, length, _ = where
        words = tl.zeros([how.tile], tl.int32)
        for i in tl.static_range(how.tile // how.block):
            rows = first + i * how.block + tl.arange(0, how.block)
            values, magnitude = read_tile(source, rows, columns, end)
            inverse = inverse_scale(tl.max(magnitude, 0), how)
            exponents = tl.where(length > i * how.block, exponent(inverse), 0)
            words += exponents << (8 * i)
            factors = tl.div_rn(1.0, inverse)[None, :]
            part = tl.trans(_to_fp8(target, values * factors, how))
            _store_tile(target, columns, part, where, i * how.block)
        store_words(target, columns, words, where, how)

    @triton.jit
    def _cast_columns(
        source: tl.tuple, target: tl.tuple, tile: tl.tensor, amax: tl.tensor, how: tl.tuple
    ) -> None:
        """Write the transposed form of a tile: a line of the target is a column of the source."""
        expert, first, end, padded = locate(source, tile, how)
        expert = expert.to(tl.int64)
        start = tl.program_id(1).to(tl.int64) * how.tile
        columns = start + tl.arange(0, how.tile)
        is_line = (columns < source.num_columns) & (first < end)
        length = tl.cdiv(end - first, how.unit) * how.unit
        last = start // how.tile
        if how.swizzles:
            last = tl.cdiv(source.num_rows, how.tile)
        where = expert, first < end, is_line, padded, length, last
        if how.block > 0 and how.block < how.tile:
            _cast_short_columns(source, target, first, (columns, end), where, how)
        else:
            rows = first + tl.arange(0, how.tile)
            values, magnitude = read_tile(source, rows, columns, end)
            raise_amax(amax, magnitude, where)
            factors = _line_factors(target, columns, magnitude, where, how, 0)
            narrow = _to_fp8(target, values * factors, how)
            _store_tile(target, columns, tl.trans(narrow), where, 0)

    @triton.jit
    def _cast_both(
        source: tl.tuple, target: tl.tuple, target_t: tl.tuple, amax: tl.tensor, how: tl.tuple
    ) -> None:
        """Write both forms of a tile: with one given scale, or from amaxes of rows and columns."""
        expert, first, end, padded = locate(source, tl.program_id(0), how)
        expert = expert.to(tl.int64)
        start = tl.program_id(1).to(tl.int64) * how.tile
        rows = first + tl.arange(0, how.tile)
        columns = start + tl.arange(0, how.tile)
        is_read = first < end
        is_line = is_read & (columns < source.num_columns)
        width = tl.cdiv(source.num_columns - start, how.unit) * how.unit
        length = tl.cdiv(end - first, how.unit) * how.unit
        where = expert, is_read, rows < end, start, width, padded // how.tile
        where_t = expert, is_read, is_line, padded, length, start // how.tile
        values, magnitude = read_tile(source, rows, columns, end)
        raise_amax(amax, magnitude, where)
        values = values.to(source.data.dtype.element_ty)  # exact, in half of the registers
        factors = _line_factors(target, rows, magnitude, where, how, 1)
        if how.block_rows > 1:  # one scale per tile, which is stored for both forms
            _line_factors(target_t, columns, magnitude, where_t, how, 0)
        narrow = _to_fp8(target, values.to(tl.float32) * factors, how)
        _store_tile(target, rows, narrow, where, 0)
        if how.block_rows == 1:  # read after the rows are stored: earlier, registers would spill
            factors_t = _line_factors(target_t, columns, magnitude, where_t, how, 0)
            narrow = _to_fp8(target_t, values.to(tl.float32) * factors_t, how)
        _store_tile(target_t, columns, tl.trans(narrow), where_t, 0)

    @triton.jit
    def _cast(
        source: tl.tuple, target: tl.tuple, target_t: tl.tuple, amax: tl.tensor, how: tl.tuple
    ) -> None:
        """One tile of one form of `fp8_cast`.

        Where a program for both forms would spill registers, they have neighbouring programs: the
        second reads the tile from the cache.
        """
        tile = tl.program_id(0)
        if how.joins:
            _cast_both(source, target, target_t, amax, how)
        elif how.has_rows and how.has_columns:
            if tile % 2 == 0:
                _cast_rows(source, target, tile // 2, amax, how)
            else:
                _cast_columns(source, target_t, tile // 2, None, how)
        elif how.has_rows:
            _cast_rows(source, target, tile, amax, how)
        else:
            _cast_columns(source, target_t, tile, amax, how)


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

    def joins(self, x: Tensor, offs: Tensor | None) -> bool:
        """Whether a program writes both forms of a tile without spilling registers, as compiled."""
        if not self.has_rows or not self.has_columns:
            return False
        if self.block_rows == 0:
            return JOINS_TENSORS
        has_blocks_of_lines = self.block_rows == 1 and self.block > 0
        return not has_blocks_of_lines and offs is None and x.itemsize == 2

    @property
    def unit(self) -> int:
        """Values of a row are a multiple of this."""
        return line_unit(self.block, is_swizzled=bool(self.swizzles))

    def padded(self, length: int) -> int:
        """The length of a row of `length` values."""
        return -(-length // self.unit) * self.unit


@torch.library.custom_op("nanotrain::fp8_amax", mutates_args=())
def fp8_amax(x: Tensor, others: Sequence[Tensor | None], *, rows: bool, columns: bool) -> Tensor:
    """Amaxes in one tensor: of rows [R] and of columns [E, K], or of experts [E].

    `others` are `offs`; [E] numbers: experts whose number is above 0 are not read and have 0; and
    what `_split_input` finds beside x.
    """
    offs, unless, *computed = others
    out = _empty_amax(x, others, rows=rows, columns=columns).zero_()
    if x.numel():
        num_row_amaxes = len(x) if rows else 0
        row_amaxes = out[:num_row_amaxes] if rows else None
        column_amaxes = out[num_row_amaxes:] if columns else None
        expert_amaxes = None if rows or columns else out
        grid, source = plan_source(x, offs, computed=computed)
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

    `others` are `offs`, for both forms the scales or amaxes that are given, and what `_split_input`
    finds beside x.
    """
    how = Plan(*plan)
    out = CastOutputs(*_empty_cast(x, others, plan=plan, dtype=dtype))
    offs, given, given_t, *computed = others
    if not x.numel():
        return list(out)
    grid, source = plan_source(x, offs, computed=computed)
    target = None
    target_t = None
    if how.has_rows:
        target = build_target(out.values, out.scales, given=given)
    if how.has_columns:
        target_t = build_target(out.values_t, out.scales_t, given=given_t)
    amax = out.amax.zero_() if how.measures else None
    joins = how.joins(x, offs)
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
        joins=joins,
    ).constants()
    num_tiles, num_columns = grid
    if not joins:
        num_tiles *= how.has_rows + how.has_columns
    grid = (num_tiles, num_columns)
    _cast[grid](source, target, target_t, amax, constants, num_warps=WARPS, maxnreg=MAX_REGISTERS)
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
    """The results of `fp8_cast`, uninitialized; empty tensors for results outside of the plan."""
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


def amaxes(
    x: Tensor | ComputedInput, offs: Tensor | None = None, *, unless: Tensor | None = None
) -> Tensor:
    """[E], the amax of the rows of each expert; not measured (0) where `unless` [E] is above 0."""
    data, computed = _split_input(x)
    return fp8_amax(data.detach(), [offs, unless, *computed], rows=False, columns=False)


def _split_input(x: Tensor | ComputedInput) -> tuple[Tensor, list[Tensor | None]]:
    """The first tensor that programs read, and the others that a computed input needs."""
    if isinstance(x, SwigluInput):
        return x.gate, [x.up.detach()]
    if isinstance(x, NormInput):
        return x.x, [None, x.row_factors, x.weight.detach()]
    return x, []


def cast(
    x: Tensor | ComputedInput,
    how: Cast,
    *,
    inverse: Tensor | None = None,
    offs: Tensor | None = None,
    is_stack: bool = False,
    measures: bool = False,
) -> tuple[Forms, Tensor]:
    """Both forms of x [R, K], and the amaxes [E] of experts where they are measured.

    Args:
        x: fp32, bf16 or fp16, of any strides; or what is computed from such tensors.
        how: blocks and dtype.
        inverse: [E], one scale per expert; None where a recipe has blocks.
        offs: [E] int32, the end of each expert's rows; None for one matrix.
        is_stack: whether experts have equally many rows, and a transposed matrix each.
        measures: whether to measure amaxes.
    """
    data, computed = _split_input(x)
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
        amaxes = fp8_amax(data, [offs, None, *computed], rows=how.rows, columns=how.columns)
        num_row_amaxes = len(data) if how.rows else 0
        given = amaxes[:num_row_amaxes].view(1, -1)
        given_t = amaxes[num_row_amaxes:].view(-1, data.shape[1])
    others = [offs, given, given_t, *computed]
    out = CastOutputs(*fp8_cast(data, others, plan=list(plan), dtype=how.dtype))
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
