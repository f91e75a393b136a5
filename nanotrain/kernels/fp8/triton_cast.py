"""Triton kernels that cast operands to fp8: each reads its operand once, and writes it as it is and
transposed.

    fp8_amax   x [R, K] -> amaxes of rows, of columns, or of the whole matrix
    fp8_cast   x [R, K] -> [R, K] for products that sum over K, [K, R] for those that sum over R

The rows may be those of several experts: expert e ends at row `offs[e]`, rows after the last end
are left out. Where a product sums over rows, those of an expert begin at a multiple of a unit, with
zeros between.

    block        scales                       layout
    (None, None) given, one per expert        as given
    (1, None)    from amaxes of rows          one per row
    (1, 128)     from the values read         column-major, as cuBLAS takes them
    (128, 128)   from the values read         row-major
    (1, 32)      from the values read         bytes (e8m0); of dense layers in the order of cuBLAS

As operators of torch they are nodes of compiled graphs, and run on the meta device. Parameters of
kernels are annotated as in kernels/triton_softmax.py.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from nanotrain.kernels.fp8.quantize import Cast, Forms, Quantized

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

TILE, WARPS = 128, 8  # rows and columns of a program, and its warps
ALIGNMENT = 16  # rows of the results have a multiple of this number of values, and whole blocks


class Source(NamedTuple):
    """A matrix that programs read."""

    data: Tensor
    num_rows: int
    num_columns: int
    strides: tuple[int, int]
    offs: Tensor | None
    num_experts: int


class Target(NamedTuple):
    """A matrix in fp8 that programs write; strides are of an expert, a row, and of scales a block."""

    data: Tensor
    scales: Tensor | None
    given: Tensor | None  # inverse scales, or amaxes
    strides: tuple[int, int]
    scale_strides: tuple[int, int, int]
    given_strides: tuple[int, int]


class How(NamedTuple):
    """Constants of a kernel."""

    lanes: int  # the number of experts as a power of two
    tile: int = TILE
    unit: int = 1
    block_rows: int = 0
    block: int = 0
    power_of_two: bool = False
    swizzles: bool = False
    largest: float = 0.0  # of the dtype
    has_rows: bool = False  # the forms that are written
    has_columns: bool = False

    def constants(self) -> Self:
        """As a kernel takes them."""
        return type(self)(*map(tl.constexpr, self))


if triton is not None:

    @triton.jit
    def _counts(source: tl.tuple, how: tl.tuple) -> tl.tuple:
        index = tl.arange(0, how.lanes)
        is_expert = index < source.num_experts
        ends = tl.load(source.offs + index, mask=is_expert, other=0).to(tl.int64)
        starts = tl.load(source.offs + index - 1, mask=is_expert & (index > 0), other=0).to(
            tl.int64
        )
        return index, starts, ends - starts

    @triton.jit
    def span(source: tl.tuple, expert: tl.tensor, how: tl.tuple) -> tl.tuple:
        """The first row of an expert, its end, and its first row with padding."""
        index, starts, counts = _counts(source, how)
        padded = tl.sum(
            tl.where(index < expert, (counts + how.unit - 1) // how.unit * how.unit, 0), 0
        )
        start = tl.sum(tl.where(index == expert, starts, 0), 0)
        return start, start + tl.sum(tl.where(index == expert, counts, 0), 0), padded

    @triton.jit
    def locate(source: tl.tuple, how: tl.tuple) -> tl.tuple:
        """The expert of a tile, its first row, the end of its expert, its first row with padding."""
        tile = tl.program_id(0)
        expert, first, end, padded = (
            0,
            tile.to(tl.int64) * how.tile,
            source.num_rows,
            tile.to(tl.int64) * how.tile,
        )
        if source.offs is not None:
            index, _, counts = _counts(source, how)
            tiles = (counts + how.tile - 1) // how.tile
            expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
            first, end, padded = span(source, expert, how)
            inner = (tile - tl.sum(tl.where(index < expert, tiles, 0), 0)) * how.tile
            first, padded = first + inner, padded + inner
        return expert, first, end, padded

    @triton.jit
    def _read(source: tl.tuple, rows: tl.tensor, columns: tl.tensor, end: tl.tensor) -> tl.tuple:
        place = (
            rows[:, None] * source.strides[0] + columns[None, :].to(tl.int64) * source.strides[1]
        )
        inside = (rows < end)[:, None] & (columns < source.num_columns)[None, :]
        values = tl.load(source.data + place, mask=inside, other=0).to(tl.float32)
        return values, tl.where(values == values, tl.abs(values), float("inf"))

    @triton.jit
    def _amax(source: tl.tuple, unless: tl.tensor, targets: tl.tuple, how: tl.tuple) -> None:
        of_rows, of_columns, of_all = targets
        expert, first, end, _ = locate(source, how)
        is_read = expert < source.num_experts
        if unless is not None:
            is_read = is_read & (tl.load(unless + expert, mask=is_read, other=1) <= 0)
        end = tl.where(is_read, end, 0)
        rows, columns = (
            first + tl.arange(0, how.tile),
            tl.program_id(1) * how.tile + tl.arange(0, how.tile),
        )
        _, magnitude = _read(source, rows, columns, end)
        if of_rows is not None:
            tl.atomic_max(of_rows + rows, tl.max(magnitude, 1), mask=rows < end)
        if of_columns is not None:
            place = expert * source.num_columns + columns
            tl.atomic_max(
                of_columns + place,
                tl.max(magnitude, 0),
                mask=is_read & (columns < source.num_columns),
            )
        if of_all is not None:
            tl.atomic_max(of_all + expert, tl.max(tl.max(magnitude, 1), 0), mask=is_read)

    @triton.jit
    def _inverse(amax: tl.tensor, how: tl.tuple) -> tl.tensor:
        """As `inverse_scales`."""
        factor = tl.div_rn(tl.maximum(amax, 2.0**-100), how.largest)
        if how.power_of_two:
            bits = factor.to(tl.int32, bitcast=True) + 0x7FFFFF  # up to the next exponent
            factor = (bits & 0x7F800000).to(tl.float32, bitcast=True)
        return tl.where(amax < float("inf"), factor, float("nan"))

    @triton.jit
    def _store_scales(
        target: tl.tuple, place: tl.tensor, inverse: tl.tensor, mask: tl.tensor
    ) -> None:
        if target.scales.dtype.element_ty == tl.uint8:  # the exponent; 255 is NaN
            inverse = (inverse.to(tl.int32, bitcast=True) >> 23) & 255
        tl.store(target.scales + place, inverse.to(target.scales.dtype.element_ty), mask=mask)

    @triton.jit
    def _write(target: tl.tuple, read: tl.tuple, place: tl.tuple, how: tl.tuple) -> None:
        """A tile that begins at `start` of `rows`, `length` values of each; `blocks` of a whole row
        are swizzled.
        """
        values, magnitude, whole = read
        expert, rows, is_row, row_block, start, length, blocks = place
        size: tl.constexpr = how.tile
        if how.block == 0:
            given = target.given + expert * target.given_strides[0]
            inverse = tl.load(given + rows * target.given_strides[1], mask=is_row, other=1)
            if how.block_rows == 1:
                inverse = _inverse(inverse, how)
                scales = expert * target.scale_strides[0] + rows * target.scale_strides[1]
                _store_scales(target, scales, inverse, is_row)
            factors = tl.div_rn(1.0, inverse)[:, None]
        elif how.block_rows == 1:
            number: tl.constexpr = size // how.block
            inner = tl.arange(0, number)
            inverse = _inverse(tl.max(tl.reshape(magnitude, [size, number, how.block]), 2), how)
            row, column = rows[:, None], (start // how.block + inner)[None, :]
            scales = (
                expert * target.scale_strides[0]
                + row * target.scale_strides[1]
                + column * target.scale_strides[2]
            )
            if how.swizzles:
                tile = row // 128 * ((blocks + 3) // 4) + column // 4
                scales = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
            _store_scales(
                target, scales, inverse, is_row[:, None] & (inner * how.block < length)[None, :]
            )
            wide = tl.broadcast_to(tl.div_rn(1.0, inverse)[:, :, None], [size, number, how.block])
            factors = tl.reshape(wide, [size, size])
        else:
            factors = tl.div_rn(1.0, whole)
            is_block = (length > 0) & (tl.max(is_row.to(tl.int32), 0) > 0)
            scales = expert * target.scale_strides[0] + row_block * target.scale_strides[1]
            _store_scales(
                target, scales + start // how.block * target.scale_strides[2], whole, is_block
            )
        scaled = tl.minimum(tl.maximum(values * factors, -how.largest), how.largest)
        inner = tl.arange(0, size)
        place = (
            expert * target.strides[0]
            + rows[:, None] * target.strides[1]
            + (start + inner)[None, :]
        )
        mask = is_row[:, None] & (inner < length)[None, :]
        tl.store(target.data + place, scaled.to(target.data.dtype.element_ty), mask=mask)

    @triton.jit
    def _cast(
        source: tl.tuple, target: tl.tuple, target_t: tl.tuple, amax: tl.tensor, how: tl.tuple
    ) -> None:
        expert, first, end, padded = locate(source, how)
        start = tl.program_id(1).to(tl.int64) * how.tile
        rows, columns = first + tl.arange(0, how.tile), start + tl.arange(0, how.tile)
        values, magnitude = _read(source, rows, columns, end)
        whole, blocks, blocks_t = 0.0, 0, 0
        if amax is not None or how.block_rows > 1:
            whole = tl.max(tl.max(magnitude, 1), 0)
        if amax is not None:
            tl.atomic_max(amax + expert, whole, mask=first < end)
        if how.block_rows > 1:
            whole = _inverse(whole, how)
        if how.swizzles:
            blocks, blocks_t = (
                tl.cdiv(source.num_columns, how.block),
                tl.cdiv(source.num_rows, how.block),
            )
        if how.has_rows:
            length = (source.num_columns - start + how.unit - 1) // how.unit * how.unit
            place = expert, rows, rows < end, padded // how.tile, start, length, blocks
            _write(target, (values, magnitude, whole), place, how)
        if how.has_columns:
            length = (end - first + how.unit - 1) // how.unit * how.unit
            is_row = (columns < source.num_columns) & (first < end)
            place = expert, columns, is_row, start // how.tile, padded, length, blocks_t
            _write(target_t, (tl.trans(values), tl.trans(magnitude), whole), place, how)


class Plan(NamedTuple):
    """What `fp8_cast` writes, as whole numbers: an operator has no other arguments."""

    block_rows: int  # 0 where scales are given
    block: int  # 0 where scales or amaxes are given
    power_of_two: int
    has_rows: int
    has_columns: int
    is_stack: int  # experts have equally many rows, and a transposed matrix each
    swizzles: int  # scales are in the order of cuBLAS
    measures: int  # returns the amaxes of experts

    @property
    def unit(self) -> int:
        """Values of a row are a multiple of this."""
        return max(ALIGNMENT, self.block)

    def padded(self, length: int) -> int:
        """The length of a row of so many values."""
        return -(-length // self.unit) * self.unit


@torch.library.custom_op("nanotrain::fp8_amax", mutates_args=())
def fp8_amax(x: Tensor, others: Sequence[Tensor | None], *, rows: bool, columns: bool) -> Tensor:
    """Amaxes in one tensor: of rows [R] and of columns [E, K], or those of experts [E].

    Others are `offs`, and [E] numbers: experts whose number is above 0 are not read, and have 0.
    """
    (offs, unless), out = others, _empty_amax(x, others, rows=rows, columns=columns).zero_()
    if x.numel():
        of_rows, of_columns = (
            out[: len(x)] if rows else None,
            out[rows * len(x) :] if columns else None,
        )
        grid, source, lanes = _source(x, offs)
        targets = of_rows, of_columns, None if rows or columns else out
        _amax[grid](source, unless, targets, How(lanes).constants(), num_warps=WARPS)
    return out


@fp8_amax.register_fake
def _empty_amax(x: Tensor, others: Sequence[Tensor | None], *, rows: bool, columns: bool) -> Tensor:
    experts = 1 if others[0] is None else len(others[0])
    of_rows, of_columns = len(x) if rows else 0, experts * x.shape[1] if columns else 0
    size = of_rows + of_columns if rows or columns else experts
    return x.new_empty(size, dtype=torch.float32)


@torch.library.custom_op("nanotrain::fp8_cast", mutates_args=())
def fp8_cast(
    x: Tensor, others: Sequence[Tensor | None], *, plan: Sequence[int], dtype: torch.dtype
) -> list[Tensor]:
    """Values and scales, transposed values and scales, amaxes; empty where `plan` has none.

    Others are `offs`, and for both forms the scales or amaxes that are given.
    """
    how, out = Plan(*plan), _empty_cast(x, others, plan=plan, dtype=dtype)
    offs, given, given_t = others
    if not x.numel():
        return out
    grid, source, lanes = _source(x, offs)
    targets = (
        _target(out[0], out[1], given=given) if how.has_rows else None,
        _target(out[2], out[3], given=given_t) if how.has_columns else None,
    )
    flags, largest = (bool(how.power_of_two), bool(how.swizzles)), torch.finfo(dtype).max
    sizes, forms = (
        (TILE, how.unit, how.block_rows, how.block),
        (bool(how.has_rows), bool(how.has_columns)),
    )
    constants = How(lanes, *sizes, *flags, largest, *forms).constants()
    _cast[grid](
        source, *targets, out[4].zero_() if how.measures else None, constants, num_warps=WARPS
    )
    return out


@fp8_cast.register_fake
def _empty_cast(
    x: Tensor, others: Sequence[Tensor | None], *, plan: Sequence[int], dtype: torch.dtype
) -> list[Tensor]:
    how, (rows, columns) = Plan(*plan), x.shape
    experts = 1 if others[0] is None else len(others[0])
    if how.is_stack:
        length = how.padded(rows // experts)
        shape_t, num_rows = (experts, columns, length), experts * length
    else:
        num_rows = how.padded(rows + (how.unit - 1) * (experts - 1))
        shape_t = (1, columns, num_rows)
    out = [x.new_empty(0, dtype=torch.float32) for _ in range(5)]
    if how.has_rows:
        shape = (1, num_rows if how.block_rows > 1 else rows, how.padded(columns))
        out[0], out[1] = (
            x.new_empty((1, rows, shape[2]), dtype=dtype),
            _empty_scales(x, how, shape=shape),
        )
    if how.has_columns:
        shape = shape_t if how.block else (experts, columns, 1)
        out[2], out[3] = x.new_empty(shape_t, dtype=dtype), _empty_scales(x, how, shape=shape)
    if how.measures:
        out[4] = x.new_empty(experts, dtype=torch.float32)
    return out


def _empty_scales(x: Tensor, how: Plan, *, shape: tuple[int, int, int]) -> Tensor:
    """Scales of matrices of that shape in their layout; those of cuBLAS are 0 where they are not
    written.
    """
    experts, rows, blocks = shape[0], shape[1], -(-shape[2] // max(how.block, 1))
    if how.block == 0:
        # of experts without rows
        return x.new_zeros((experts, rows, 1) if how.block_rows else 0, dtype=torch.float32)
    if how.swizzles:
        return x.new_zeros(-(-rows // 128) * -(-blocks // 4) * 512, dtype=torch.uint8)
    if how.block < TILE:
        return x.new_empty((experts, rows, blocks), dtype=torch.uint8)
    if how.block_rows > 1:
        return x.new_empty((experts, -(-rows // how.block_rows), blocks), dtype=torch.float32)
    return x.new_empty((experts, blocks, rows), dtype=torch.float32).mT


def _source(x: Tensor, offs: Tensor | None) -> tuple[tuple[int, int], Source, int]:
    """The grid of programs, the matrix, and the number of experts as a power of two."""
    experts = 1 if offs is None else len(offs)
    num_tiles = triton.cdiv(len(x), TILE) + (0 if offs is None else experts)
    source = Source(x, x.shape[0], x.shape[1], (x.stride(0), x.stride(1)), offs, experts)
    return (num_tiles, triton.cdiv(x.shape[1], TILE)), source, num_lanes(experts)


def num_lanes(experts: int) -> int:
    """The number of experts as a power of two."""
    return 1 << (experts - 1).bit_length()


def _target(values: Tensor, scales: Tensor, *, given: Tensor | None) -> Target:
    """A program counts values of a row from those of the first expert, so these are left out of its
    stride.
    """
    expert = values.stride(0) - values.shape[2] if len(values) > 1 else 0
    of_expert = of_row = of_block = given_expert = given_row = 0
    if scales.dim() == 3:
        of_expert, of_row, of_block = scales.stride()
        of_expert -= scales.shape[2] * of_block if given is None else 0
        of_expert *= len(scales) > 1
    if given is not None:
        given_expert, given_row = (
            n * (size > 1) for n, size in zip(given.stride(), given.shape, strict=True)
        )
    strides = (of_expert, of_row, of_block), (given_expert, given_row)
    return Target(values, scales, given, (expert, values.stride(1)), *strides)


def amaxes(x: Tensor, offs: Tensor | None = None, *, unless: Tensor | None = None) -> Tensor:
    """[E], of the rows of each expert; 0 where `unless` [E] is above 0."""
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
    block_rows, block = how.block[0] or 0, how.block[1] or 0
    given = given_t = None if inverse is None else inverse.view(-1, 1)
    if block_rows and not block:
        found = fp8_amax(x, [offs, None], rows=how.rows, columns=how.columns)
        given, given_t = (
            found[: len(x) * how.rows].view(1, -1),
            found[len(x) * how.rows :].view(-1, x.shape[1]),
        )
    flags = (
        how.power_of_two,
        how.rows,
        how.columns,
        is_stack,
        block == 32 and offs is None,
        measures,
    )
    plan = Plan(block_rows, block, *map(int, flags))
    out = fp8_cast(x, [offs, given, given_t], plan=list(plan), dtype=how.dtype)
    rows, columns = (
        Quantized(values.flatten(0, 1), _as_scales(scales, inverse, plan=plan), how.block)
        if wanted
        else None
        for wanted, values, scales in ((how.rows, *out[:2]), (how.columns, *out[2:4]))
    )
    return (rows, columns), out[4]


def _as_scales(scales: Tensor, inverse: Tensor | None, *, plan: Plan) -> Tensor:
    if inverse is not None:
        return inverse.view(-1, 1)
    if plan.swizzles:
        return scales.view(torch.float8_e8m0fnu)
    return (
        scales.flatten(0, 1)
        if plan.block_rows > 1 or plan.block < TILE
        else scales.mT.flatten(0, 1).t()
    )
