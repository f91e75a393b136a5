"""Triton kernels of stacked experts in NVFP4: amaxes, casts and products of all experts at once.

    expert_amaxes     x [T, K] -> [2, E], amaxes of each expert's tokens and of their transformed
                      form
    cast_tokens       x [T, K] -> `ExpertsNvfp4` of T rows, for products with the matrices
    cast_channels     x [T, K] -> K rows, after the Hadamard transform of tokens, for sums over them
    cast_matrices     [E, R, K] -> E * R rows
    grouped_mm        the products of all experts; `write_grouped_mm` writes or adds gradients

The values, scales and random words are those of triton_nvfp4.py for the tokens of each expert, to
the bit. The tokens of expert e end at `offs[e]`, which stays on the device: the host never waits.
Scales are row by row, as the product of triton_grouped.py reads them; every row has whole units of
256 values, the 128 bytes of its tiles. In rows of tokens each expert begins at a unit, and padding
is 0.

    T tokens   K elements of a row   R rows of a matrix   E experts
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanotrain.kernels.fp8.nvfp4 import UNIT, hadamard_matrix, tensor_decode_scale
from nanotrain.kernels.fp8.rounding import ElementWords
from nanotrain.kernels.fp8.triton_grouped import Factor, Out, launch_products
from nanotrain.kernels.fp8.triton_tiles import TILE, How, Source, num_lanes
from nanotrain.kernels.grouped import matrix_ends

try:
    import triton
    import triton.language as tl

    from nanotrain.kernels.fp8.triton_nvfp4 import (
        magnitude,
        quantize_tile,
        transform,
        uniform_numbers,
    )
    from nanotrain.kernels.fp8.triton_tiles import locate
except ImportError:
    triton = None

WIDTH = 64  # columns of a program; it reads 128 rows
AMAX_TILE = 64  # rows and columns of a program that measures
LINE_UNIT = 256  # values of a tile of the product
WARPS = 8


@dataclass(frozen=True)
class ExpertsNvfp4:
    """Rows of experts in NVFP4."""

    values: Tensor  # [rows, K / 2] uint8, K a multiple of 256
    block_scales: Tensor  # [rows, K / 16] e4m3
    tensor_scales: Tensor  # [E] fp32; NaN for an expert with an element that is not finite

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors as arguments of an operator."""
        return [self.values, self.block_scales, self.tensor_scales]


if triton is not None:

    @triton.jit
    def _read_rows(
        source: tl.tuple,
        rows: tl.tensor,
        columns: tl.tensor,
        end: tl.tensor,
        first: tl.tensor,
    ) -> tl.tensor:
        """Values of rows and columns that broadcast to a tile, in their dtype; zeros outside."""
        row_offsets = rows * source.row_stride
        column_offsets = columns.to(tl.int64) * source.column_stride
        offsets = row_offsets + column_offsets
        is_row = rows < end
        is_column = columns < source.num_columns
        data = source.data + first
        return tl.load(data + offsets, mask=is_row & is_column, other=0)

    @triton.jit
    def _nvfp4_expert_amaxes(
        source: tl.tuple, matrix: tl.tensor, out: tl.tensor, how: tl.tuple
    ) -> None:
        """Raise both amaxes of an expert to the amaxes of one tile."""
        program = tl.program_id(0)
        column_program = tl.program_id(1)
        expert, first, end, _ = locate(source, program, how)
        lane = tl.arange(0, how.tile)
        rows = first + lane
        columns = column_program * how.tile + lane
        tokens = rows[:, None]
        channels = columns[None, :]
        tile = _read_rows(source, tokens, channels, end, 0)
        is_read = expert < source.num_experts
        values = magnitude(tile)
        amax = tl.max(values)
        target = out + expert
        tl.atomic_max(target, amax, mask=is_read)
        lines = tl.trans(tile)
        transformed = transform(lines, matrix)
        values = magnitude(transformed)
        amax = tl.max(values)
        target += source.num_experts
        tl.atomic_max(target, amax, mask=is_read)

    @triton.jit
    def _store_codes(
        codes: tl.tensor, packed: tl.tensor, line_bytes: tl.tensor, mask: tl.tensor
    ) -> None:
        """Store the packed codes [rows, n] of a tile."""
        num_bytes: tl.constexpr = packed.shape[1]
        byte = tl.arange(0, num_bytes)
        line_starts = line_bytes[:, None]
        offsets = line_starts + byte[None, :]
        tl.store(codes + offsets, packed, mask=mask[:, None])

    @triton.jit
    def _store_scale_words(
        words: tl.tensor, scale: tl.tensor, row_offsets: tl.tensor, mask: tl.tensor
    ) -> None:
        """Store the scales [rows, n] of a tile, four in one word."""
        rows: tl.constexpr = scale.shape[0]
        num_words: tl.constexpr = scale.shape[1] // 4
        stored = scale.to(tl.uint8, bitcast=True)
        bits = stored.to(tl.int32)
        parts = tl.reshape(bits, (rows, num_words, 4))
        place = tl.arange(0, 4)
        shifts = place * 8
        shifted = parts << shifts[None, None, :]
        word = tl.sum(shifted, 2)
        index = tl.arange(0, num_words)
        first = row_offsets[:, None]
        offsets = first + index[None, :]
        tl.store(words + offsets, word, mask=mask[:, None])

    @triton.jit
    def _nvfp4_expert_cast(
        source: tl.tuple,
        matrices: tl.tuple,
        amax: tl.tensor,
        hadamard: tl.tensor,
        words: tl.tensor,
        first_channel: tl.tensor,
        codes: tl.tensor,
        scales: tl.tensor,
        row_bytes: tl.tensor,
        how: tl.tuple,
        is_tile: tl.constexpr,
    ) -> None:
        """Cast 128 rows of an expert and 64 columns; with a Hadamard matrix the transposed form.

        `matrices` has the number of rows of a matrix and its stride, or is None for tokens.
        """
        program = tl.program_id(0)
        column_program = tl.program_id(1)
        shift = 0
        first_line = 0
        if matrices is not None:
            num_rows, stride = matrices
            num_tiles = tl.cdiv(num_rows, 128)
            expert = program // num_tiles
            row_tile = program % num_tiles
            first = row_tile.to(tl.int64) * 128
            end = num_rows
            padded = first
            wide = expert.to(tl.int64)
            shift = wide * stride
            first_line = wide * num_rows
        else:
            # two programs per unit: the padding of a unit is written too
            unit = program // 2
            expert, first, end, padded = locate(source, unit, how)
            second = (program % 2) * 128
            first = first + second
            padded = padded + second
        is_read = expert < source.num_experts
        rows = first + tl.arange(0, 128)
        first_column = column_program * 64
        columns = first_column + tl.arange(0, 64)
        expert_amax = tl.load(amax + expert, mask=is_read, other=0)
        uniform = None
        if hadamard is not None:
            tokens = rows[None, :]
            outputs = columns[:, None]
            tile = _read_rows(source, tokens, outputs, end, shift)
            tile = transform(tile, hadamard)
            lines = columns.to(tl.int64)
            is_column = columns < source.num_columns
            is_line = is_read & is_column
            first_byte = padded // 2
        else:
            tokens = rows[:, None]
            outputs = columns[None, :]
            tile = _read_rows(source, tokens, outputs, end, shift)
            lines = first_line + rows
            is_line = rows < end
            first_byte = column_program.to(tl.int64) * 32
        if words is not None:
            channels = first_channel + outputs
            uniform = uniform_numbers(words, tokens, channels, end)
        packed, scale = quantize_tile(tile, uniform, expert_amax, is_tile)
        first_byte = tl.multiple_of(first_byte, 32)
        line_bytes = lines * row_bytes
        line_bytes += first_byte
        _store_codes(codes, packed, line_bytes, is_line)
        _store_scale_words(scales, scale, line_bytes // 32, is_line)


@torch.library.custom_op("nanotrain::nvfp4_expert_amaxes", mutates_args=())
def expert_amaxes(x: Tensor, offs: Tensor) -> Tensor:
    """[2, E] fp32, amaxes of each expert's tokens [t, K] and of their transformed form.

    0 for an expert without tokens; infinite with a NaN.
    """
    out = torch.zeros(2, len(offs), dtype=torch.float32, device=x.device)
    if x.numel():
        source = _source(x, offs)
        experts = source.num_experts
        lanes = num_lanes(experts)
        how = How(lanes, tile=AMAX_TILE).constants()
        num_tiles = _num_tiles(source.num_rows, AMAX_TILE)
        num_columns = _num_tiles(source.num_columns, AMAX_TILE)
        grid = (num_tiles + experts, num_columns)
        _nvfp4_expert_amaxes[grid](source, hadamard_matrix(x.device), out, how)
    return out


@expert_amaxes.register_fake
def _(x: Tensor, offs: Tensor) -> Tensor:
    return x.new_empty((2, len(offs)), dtype=torch.float32)


def cast_tokens(
    x: Tensor, amaxes: Tensor, *, offs: Tensor, words: ElementWords | None = None
) -> ExpertsNvfp4:
    """x [T, K] in blocks of 1 x 16, for products with the matrix of each token's expert.

    Args:
        x: fp32 or bf16, sorted by expert.
        amaxes: [E] of the tokens of each expert.
        offs: [E] int32, the end of each expert's tokens.
        words: random words of the tokens; None rounds to nearest.
    """
    return _cast(x, amaxes, offs=offs, words=words, plan=Plan())


def cast_channels(
    x: Tensor, amaxes: Tensor, *, offs: Tensor, words: ElementWords | None = None
) -> ExpertsNvfp4:
    """x [T, K] -> K rows of tokens, each expert's transformed, for products that sum over them."""
    return _cast(x, amaxes, offs=offs, words=words, plan=Plan(is_transformed=1))


def cast_matrices(matrices: Tensor, amaxes: Tensor) -> ExpertsNvfp4:
    """[E, R, K] of any strides in blocks of 16 x 16, to nearest."""
    ends = matrix_ends(matrices)
    return _cast(matrices, amaxes, offs=ends, words=None, plan=Plan(is_tile=1))


@dataclass(frozen=True)
class Plan:
    """How a cast reads and writes; numbers, as arguments of an operator."""

    is_tile: int = 0  # whether blocks are 16 x 16
    is_transformed: int = 0  # whether rows of channels are written, after the transform
    first_channel: int = 0


def _cast(
    x: Tensor, amaxes: Tensor, *, offs: Tensor, words: ElementWords | None, plan: Plan
) -> ExpertsNvfp4:
    """Cast the rows of experts, with the amaxes [E] of the experts."""
    rows = None if words is None else words.rows
    first_channel = 0 if words is None else words.first_channel
    flags = [plan.is_tile, plan.is_transformed, first_channel]
    values, scales = nvfp4_expert_cast(x, [amaxes, offs, rows], flags=flags)
    return ExpertsNvfp4(values, scales, tensor_decode_scale(amaxes))


@torch.library.custom_op("nanotrain::nvfp4_expert_cast", mutates_args=())
def nvfp4_expert_cast(
    x: Tensor, given: Sequence[Tensor | None], *, flags: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The packed values and block scales of tokens [T, K] or of matrices [E, R, K].

    Args:
        x: fp32 or bf16, of any strides.
        given: [E] amaxes; [E] ends of rows; [T] random words of tokens, or None.
        flags: whether blocks are 16 x 16, whether tokens are transformed, and the first channel.
    """
    amaxes, offs, words = given
    assert amaxes is not None, "scales follow from amaxes"
    assert offs is not None, "experts have rows"
    is_tile, is_transformed, first_channel = flags
    values, scales = _allocate(x, given, flags=flags)
    if x.numel():
        source = _source(x, offs)
        matrices = None
        num_tiles = 2 * (_num_tiles(len(x), LINE_UNIT) + len(offs))
        if x.dim() == 3:
            matrices = (x.shape[1], x.stride(0))
            num_tiles = len(offs) * _num_tiles(x.shape[1], TILE)
        hadamard = hadamard_matrix(x.device) if is_transformed else None
        how = How(num_lanes(len(offs)), tile=LINE_UNIT, unit=LINE_UNIT).constants()
        columns = values.shape[1] * 2 if not is_transformed else x.shape[-1]
        grid = (num_tiles, _num_tiles(columns, WIDTH))
        _nvfp4_expert_cast[grid](
            *(source, matrices, amaxes, hadamard, words, first_channel),
            *(values, scales.view(torch.int32), values.shape[1], how),
            is_tile=bool(is_tile),
            num_warps=WARPS,
        )
    return values, scales


@nvfp4_expert_cast.register_fake
def _allocate(
    x: Tensor, given: Sequence[Tensor | None], *, flags: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Memory of packed values [rows, K / 2] and of block scales [rows, K / 16]."""
    _, is_transformed, _ = flags
    offs = given[1]
    assert offs is not None, "experts have rows"
    rows = x.shape[:-1].numel()
    columns = x.shape[-1]
    if is_transformed:  # every expert may have a unit that is not full
        num_units = _num_tiles(rows, LINE_UNIT) + len(offs) - 1
        rows, columns = columns, num_units * LINE_UNIT
    width = _num_tiles(columns, LINE_UNIT) * LINE_UNIT
    values = x.new_empty((rows, width // 2), dtype=torch.uint8)
    return values, x.new_empty((rows, width // UNIT), dtype=torch.float8_e4m3fn)


def _source(x: Tensor, offs: Tensor) -> Source:
    """Tokens [T, K], or matrices [E, R, K] with the strides of one."""
    row_stride, column_stride = x.stride()[-2:]
    num_rows = x.shape[:-1].numel()
    return Source(x, num_rows, x.shape[-1], row_stride, column_stride, offs, len(offs))


def _num_tiles(size: int, tile: int) -> int:
    return -(-size // tile)


def grouped_mm(
    a: ExpertsNvfp4, b: ExpertsNvfp4, *, offs: Tensor, sums: bool, dtype: torch.dtype
) -> Tensor:
    """[T, K], [E * N, K] -> [T, N]; with `sums` [M, T], [N, T] -> [E, M, N]."""
    out: Tensor = nvfp4_grouped_mm([*a.tensors, *b.tensors, offs], sums=sums, dtype=dtype)
    return out


@torch.library.custom_op("nanotrain::nvfp4_grouped_mm", mutates_args=())
def nvfp4_grouped_mm(operands: Sequence[Tensor], *, sums: bool, dtype: torch.dtype) -> Tensor:
    """The product of `grouped_mm`; operands are the tensors of a, the tensors of b, and offs."""
    out = _empty_product(operands, sums=sums, dtype=dtype)
    _launch(operands, out, adds=False)
    return out


@nvfp4_grouped_mm.register_fake
def _empty_product(operands: Sequence[Tensor], *, sums: bool, dtype: torch.dtype) -> Tensor:
    """The uninitialized result of `nvfp4_grouped_mm`."""
    a, _, _, b, _, _, offs = operands
    experts = len(offs)
    shape = (experts, len(a), len(b)) if sums else (len(a), len(b) // experts)
    return a.new_empty(shape, dtype=dtype)


@torch.library.custom_op("nanotrain::nvfp4_write_grouped_mm", mutates_args=("out",))
def write_grouped_mm(operands: Sequence[Tensor], out: Tensor, *, adds: bool) -> None:
    """Write the product [E, M, N] of `nvfp4_grouped_mm` with `sums` to `out`, or add it."""
    _launch(operands, out, adds=adds)


@write_grouped_mm.register_fake
def _(operands: Sequence[Tensor], out: Tensor, *, adds: bool) -> None:
    pass


def _launch(operands: Sequence[Tensor], out: Tensor, *, adds: bool) -> None:
    """Run the programs of the products of all experts, written or added to `out`."""
    *tensors, offs = operands
    a, b = ExpertsNvfp4(*tensors[:3]), ExpertsNvfp4(*tensors[3:])
    sums = out.dim() == 3
    rows, columns = out.shape[-2:]
    target = Out(
        data=out,
        expert_stride=out.stride(0) if sums else 0,
        row_stride=out.stride(-2),
        num_rows=rows,
        num_columns=columns,
        length=a.values.shape[1],
    )
    # of bytes, which have two values
    how = How(num_lanes(len(offs)), unit=LINE_UNIT, block=UNIT // 2, packs=True)
    factors = (_factor(a, rows_per_expert=0), _factor(b, rows_per_expert=0 if sums else columns))
    source = Source(a.values, rows, 0, 0, 0, offs, len(offs))
    launch_products(factors, target, source=source, how=how, adds=adds)


def _factor(matrix: ExpertsNvfp4, *, rows_per_expert: int) -> Factor:
    """A matrix with its strides; `rows_per_expert` is 0 where experts share its rows."""
    row_bytes = matrix.values.stride(0)
    row_scales = matrix.block_scales.stride(0)
    return Factor(
        data=matrix.values,
        expert_stride=row_bytes * rows_per_expert,
        row_stride=row_bytes,
        scales=matrix.block_scales,
        scale_expert_stride=row_scales * rows_per_expert,
        scale_row_stride=row_scales,
        scale_block_stride=1,
        tensor_scales=matrix.tensor_scales,
    )
