"""Tiles of the rows of several experts, for the programs of fp8 kernels.

    rows     | expert 0      | expert 1 | expert 3 (none for 2) | left out |
    offs                     offs[0]    offs[1] = offs[2]       offs[3]
    tiles    |  0   |  1   | |  2   | | |  3   |  4   |  5   |             of TILE rows, or fewer

    Source        a matrix that programs read
    How           constants of a kernel
    plan_source   the grid of programs that read a matrix
    span          the rows of an expert, in a program
    locate        the rows of a program
    read_tile     the values of a tile, computed where the source is a SwiGLU or an RMSNorm

Where a product sums over rows, each expert is padded to a multiple of a unit.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

TILE = 128  # rows and columns of a program
WARPS = 8  # warps per program
ALIGNMENT = 16  # lines of results have a multiple of this number of values


class Source(NamedTuple):
    """A matrix that programs read."""

    data: Tensor
    num_rows: int
    num_columns: int
    row_stride: int
    column_stride: int
    offs: Tensor | None
    num_experts: int
    up: Tensor | None = None  # where data is the gate of a SwiGLU, which casts compute
    # of an RMSNorm that casts compute: a factor per row in fp32, and one per column
    row_factors: Tensor | None = None
    column_factors: Tensor | None = None


class How(NamedTuple):
    """Constants of a kernel."""

    lanes: int  # the number of experts as a power of two
    tile: int = TILE
    unit: int = 1
    block_rows: int = 0
    block: int = 0
    power_of_two: bool = False
    swizzles: bool = False
    largest: float = 0.0  # largest number of the dtype
    has_rows: bool = False  # whether the plain form is written
    has_columns: bool = False  # whether the transposed form is written
    joins: bool = False  # whether a program writes both
    packs: bool = False  # whether a byte has two values, as in NVFP4

    def constants(self) -> Self:
        """The constants as arguments of a kernel."""
        return type(self)(*map(tl.constexpr, self))


if triton is not None:

    @triton.jit
    def _counts(source: tl.tuple, how: tl.tuple) -> tl.tuple:
        """Index, first row and number of rows of each expert, as vectors of `how.lanes`."""
        index = tl.arange(0, how.lanes)
        is_expert = index < source.num_experts
        has_start = is_expert & (index > 0)
        ends = tl.load(source.offs + index, mask=is_expert, other=0).to(tl.int64)
        starts = tl.load(source.offs + index - 1, mask=has_start, other=0).to(tl.int64)
        return index, starts, ends - starts

    @triton.jit
    def span(source: tl.tuple, expert: tl.tensor, how: tl.tuple) -> tl.tuple:
        """The first row of an expert, its end, and its first row with padding."""
        index, starts, counts = _counts(source, how)
        units = tl.cdiv(counts, how.unit)
        # multiplied after the sum: Triton then knows a multiple of the unit, and moves 16 bytes
        padded = tl.sum(tl.where(index < expert, units, 0), 0) * how.unit
        start = tl.sum(tl.where(index == expert, starts, 0), 0)
        count = tl.sum(tl.where(index == expert, counts, 0), 0)
        return start, start + count, padded

    @triton.jit
    def locate(source: tl.tuple, tile: tl.tensor, how: tl.tuple) -> tl.tuple:
        """The expert of a tile, its first row, the expert's end, the first row with padding."""
        expert = 0
        first = tile.to(tl.int64) * how.tile
        end = source.num_rows
        padded = tile.to(tl.int64) * how.tile
        if source.offs is not None:
            index, _, counts = _counts(source, how)
            tiles = tl.cdiv(counts, how.tile)
            is_before = tl.cumsum(tiles, 0) <= tile
            expert = tl.sum(is_before.to(tl.int32), 0)
            first, end, padded = span(source, expert, how)
            first_tile = tl.sum(tl.where(index < expert, tiles, 0), 0)
            inner = (tile - first_tile) * how.tile
            first = first + inner
            padded = padded + inner
        return expert, first, end, padded

    @triton.jit
    def read_tile(
        source: tl.tuple, rows: tl.tensor, columns: tl.tensor, end: tl.tensor
    ) -> tl.tuple:
        """A tile of the source in fp32 and its magnitudes, where NaN counts as infinity."""
        column_offsets = columns[None, :].to(tl.int64) * source.column_stride
        offsets = rows[:, None] * source.row_stride + column_offsets
        mask = (rows < end)[:, None] & (columns < source.num_columns)[None, :]
        values = tl.load(source.data + offsets, mask=mask, other=0).to(tl.float32)
        if source.up is not None:  # as triton_swiglu.py, rounded once
            up = tl.load(source.up + offsets, mask=mask, other=0).to(tl.float32)
            product = values * tl.sigmoid(values) * up
            values = product.to(source.data.dtype.element_ty).to(tl.float32)
        if source.row_factors is not None:  # in the order of torch's RMSNorm, rounded once
            row_factors = tl.load(source.row_factors + rows, mask=rows < end, other=0)
            is_column = columns < source.num_columns
            weight = tl.load(source.column_factors + columns, mask=is_column, other=0)
            product = values * row_factors[:, None]
            product *= weight.to(tl.float32)[None, :]
            values = product.to(source.data.dtype.element_ty).to(tl.float32)
        is_number = values == values  # false for NaN
        return values, tl.where(is_number, tl.abs(values), float("inf"))


# What casts compute an operand from, besides its first tensor: the fields of `Source` from `up` on.
Computed = Sequence[Tensor | None]


def plan_source(
    x: Tensor, offs: Tensor | None, *, computed: Computed = ()
) -> tuple[tuple[int, int], Source]:
    """The grid of programs, and the matrix."""
    rows, columns = x.shape
    num_tiles = triton.cdiv(rows, TILE)
    experts = 1
    if offs is not None:  # every expert may have a tile that is not full
        experts = len(offs)
        num_tiles += experts
    source = Source(x, rows, columns, x.stride(0), x.stride(1), offs, experts, *computed)
    return (num_tiles, triton.cdiv(columns, TILE)), source


def line_unit(block: int, *, is_swizzled: bool = False) -> int:
    """The unit of the lengths of lines: values that one scale or one word of scales belongs to.

    Of experts with blocks shorter than a tile it is a tile, as kernels read the scales of its four
    blocks as one word. Dense layers have these in the order of cuBLAS.
    """
    if 0 < block < TILE and not is_swizzled:
        return TILE
    return max(ALIGNMENT, block)


def num_lanes(experts: int) -> int:
    """The number of experts as a power of two."""
    return 1 << (experts - 1).bit_length()
