"""Triton kernels that cast operands to NVFP4, packed and with scales in the order of cuBLAS.

    tensor_amaxes   x [T, K] -> amaxes of x and of the transformed x^T, in one read
    cast_rows       x [R, K] -> `PackedNvfp4`
    cast_columns    x [T, K] -> [K, T] after the Hadamard transform of 16 tokens

The same values as the functions of these names in nvfp4.py, to the bit: a program has 128 rows and
64 elements of each, of which the 128 x 4 scales are one tile of cuBLAS (512 bytes). Random words
are computed where they are used, from one word per token. As operators of torch they run on the
meta device. Parameters of kernels are annotated as in kernels/triton_softmax.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nanotrain.kernels.fp8.nvfp4 import UNIT, PackedNvfp4, hadamard_matrix, tensor_decode_scale
from nanotrain.kernels.fp8.rounding import ElementWords
from nanotrain.precision.fp8 import Block

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

ROWS = 128  # rows of a program: as many as a tile of scales has
WIDTH = 64  # elements of a row of a program: 4 scales
ROW_UNIT, K_UNIT = 16, 32  # torch's product takes multiples
TILE_BYTES = 512
WARPS = 8  # with 4, random words and tiles of weights do not fit into registers

if triton is not None:

    @triton.jit
    def _read(
        x: tl.tensor,
        rows: tl.tensor,
        columns: tl.tensor,
        shape: tl.tuple,
        strides: tl.tuple,
    ) -> tl.tensor:
        """A tile of x in its own dtype; zeros outside of x."""
        row = rows[:, None].to(tl.int64)
        column = columns[None, :].to(tl.int64)
        offsets = row * strides[0] + column * strides[1]
        is_row = row < shape[0]
        mask = is_row & (column < shape[1])
        return tl.load(x + offsets, mask=mask, other=0)

    @triton.jit
    def transform(tile: tl.tensor, matrix: tl.tensor) -> tl.tensor:
        """The Hadamard transform of 16 consecutive values of each row, in the dtype of the tile.

        In fp32: tensor cores of Blackwell have no product of 16 columns that Triton can reduce.
        """
        unit = tl.arange(0, 16)
        offsets = unit[:, None] * 16 + unit[None, :]
        factors = tl.load(matrix + offsets)
        num_groups: tl.constexpr = tile.numel // 16
        groups = tl.reshape(tile.to(tl.float32), (num_groups, 16))
        product = tl.dot(groups, factors, input_precision="ieee")
        return tl.reshape(product, tile.shape).to(tile.dtype)

    @triton.jit
    def magnitude(tile: tl.tensor) -> tl.tensor:
        """Absolute values in fp32, infinite for NaN."""
        wide = tile.to(tl.float32)
        return tl.where(wide == wide, tl.abs(wide), float("inf"))

    @triton.jit
    def _nvfp4_amaxes(
        x: tl.tensor, matrix: tl.tensor, out: tl.tensor, shape: tl.tuple, strides: tl.tuple
    ) -> None:
        """Raise both amaxes of a tensor to the amaxes of one tile."""
        lane = tl.arange(0, 64)
        rows = tl.program_id(0) * 64 + lane
        columns = tl.program_id(1) * 64 + lane
        tile = _read(x, rows, columns, shape, strides)
        amax = tl.max(magnitude(tile))
        tl.atomic_max(out, amax)
        transformed = transform(tl.trans(tile), matrix)
        amax = tl.max(magnitude(transformed))
        tl.atomic_max(out + 1, amax)

    @triton.jit
    def _mix_in(words: tl.tensor, numbers: tl.tensor) -> tl.tensor:
        """`mix_in` of kernels/dropout.py, in 32 bits."""
        x = words + numbers * 0x9E3779B9 + 1
        x ^= x >> 16
        x *= 0x7FEB352D
        x ^= x >> 15
        x *= 0x846CA68B
        return x ^ (x >> 16)

    @triton.jit
    def _encode_scale(amax: tl.tensor) -> tl.tensor:
        """`tensor_encode_scale` of one amax."""
        factor = tl.div_rn(2688.0, amax)
        factor = tl.minimum(factor, 3.4028234663852886e38)
        is_known = (amax > 0) & (factor > 0)
        return tl.where(is_known, factor, 1.0)

    @triton.jit
    def _round(scaled: tl.tensor, uniform: tl.tensor) -> tl.tensor:
        """e2m1 codes of scaled values, rounded to nearest, or at random with uniform numbers."""
        magnitude = tl.minimum(tl.abs(scaled), 6.0)
        is_small = magnitude < 2
        is_middle = magnitude < 4
        inverse = tl.where(is_middle, 1.0, 0.5)
        inverse = tl.where(is_small, 2.0, inverse)
        first_code = tl.where(is_middle, 2, 4)
        first_code = tl.where(is_small, 0, first_code)
        count = magnitude * inverse
        lower = tl.floor(count)
        rest = count - lower
        whole = lower.to(tl.int32)
        if uniform is None:
            is_tie = rest == 0.5
            is_odd = whole % 2 == 1
            is_upper = (rest > 0.5) | (is_tie & is_odd)
        else:
            is_upper = uniform < rest
        code = whole + is_upper.to(tl.int32)
        code += first_code
        bits = scaled.to(tl.int32, bitcast=True)
        sign = (bits >> 28) & 8
        return code | sign

    @triton.jit
    def _block_amax(tile: tl.tensor, is_tile: tl.constexpr) -> tl.tensor:
        """[R, K / 16], the amax of the block of each 16 elements of a tile [R, K]."""
        rows: tl.constexpr = tile.shape[0]
        blocks: tl.constexpr = tile.shape[1] // 16
        values = magnitude(tile)
        if is_tile:
            parts = tl.reshape(values, (rows // 16, 16, blocks, 16))
            amax = tl.max(parts, 3)
            amax = tl.max(amax, 1)
            spread = tl.broadcast_to(amax[:, None, :], (rows // 16, 16, blocks))
            return tl.reshape(spread, (rows, blocks))
        parts = tl.reshape(values, (rows, blocks, 16))
        return tl.max(parts, 2)

    @triton.jit
    def uniform_numbers(
        words: tl.tensor, tokens: tl.tensor, channels: tl.tensor, end: tl.tensor
    ) -> tl.tensor:
        """Uniform numbers of a tile, of tokens and channels that broadcast to it."""
        word = tl.load(words + tokens, mask=tokens < end, other=0)
        mixed = _mix_in(word.to(tl.uint32), channels.to(tl.uint32))
        top = mixed >> 8
        return top.to(tl.float32) * 5.9604644775390625e-08  # 2^-24

    @triton.jit
    def quantize_tile(
        tile: tl.tensor, uniform: tl.tensor, amax: tl.tensor, is_tile: tl.constexpr
    ) -> tl.tuple:
        """The packed codes [R, K / 2] and the scales [R, K / 16] of a tile [R, K].

        `amax` is the tensor's; `uniform` numbers round at random.
        """
        rows: tl.constexpr = tile.shape[0]
        blocks: tl.constexpr = tile.shape[1] // 16
        encode = _encode_scale(amax)
        per_unit = encode * 0.1666666716337204  # 1 / 6 in fp32
        scale = _block_amax(tile, is_tile) * per_unit
        scale = tl.minimum(scale, 448.0).to(tl.float8e4nv)
        decode = tl.div_rn(1.0, encode)
        decoded = scale.to(tl.float32) * decode
        factor = tl.div_rn(1.0, decoded)
        factor = tl.minimum(factor, 3.4028234663852886e38)
        values = tl.reshape(tile.to(tl.float32), (rows, blocks, 16))
        scaled = values * factor[:, :, None]
        if uniform is not None:
            uniform = tl.reshape(uniform, (rows, blocks, 16))
        code = _round(scaled, uniform)
        pairs = tl.reshape(code, (rows, blocks * 8, 2))
        low, high = tl.split(pairs)
        packed = low | (high << 4)
        return packed.to(tl.uint8), scale

    @triton.jit
    def _nvfp4_cast(
        x: tl.tensor,
        amax: tl.tensor,
        matrix: tl.tensor,
        words: tl.tensor,
        first_channel: tl.tensor,
        codes: tl.tensor,
        scales: tl.tensor,
        shape: tl.tuple,
        strides: tl.tuple,
        is_tile: tl.constexpr,
    ) -> None:
        """Cast 128 rows and 64 elements of each; with a matrix after the transform of rows."""
        program = tl.program_id(0)
        column_program = tl.program_id(1)
        rows = program * 128 + tl.arange(0, 128)
        columns = column_program * 64 + tl.arange(0, 64)
        tile = _read(x, rows, columns, shape, strides)
        if matrix is not None:
            tile = transform(tile, matrix)
        uniform = None
        if words is not None:
            row = rows[:, None]
            column = columns[None, :]
            if matrix is not None:  # a row is a channel, and its elements are tokens
                uniform = uniform_numbers(words, column, first_channel + row, shape[1])
            else:
                uniform = uniform_numbers(words, row, first_channel + column, shape[0])
        packed, scale = quantize_tile(tile, uniform, tl.load(amax), is_tile)
        byte = column_program * 32 + tl.arange(0, 32)
        is_row = rows[:, None] < shape[2]
        is_byte = byte[None, :] < shape[3]
        first_byte = rows[:, None].to(tl.int64) * shape[3]
        offsets = first_byte + byte[None, :]
        tl.store(codes + offsets, packed, mask=is_row & is_byte)
        row = tl.arange(0, 128)[:, None]
        block = tl.arange(0, 4)[None, :]
        cublas_tile = program.to(tl.int64) * tl.num_programs(1)
        cublas_tile += column_program
        offset = cublas_tile * 512
        offset += row % 32 * 16
        offset += row // 32 * 4
        scale_bits = scale.to(tl.uint8, bitcast=True)
        tl.store(scales + (offset + block), scale_bits)


@torch.library.custom_op("nanotrain::nvfp4_amaxes", mutates_args=())
def tensor_amaxes(x: Tensor) -> Tensor:
    """[2] fp32, the amaxes of x [T, K] and of its transformed form; infinite with a NaN."""
    out = torch.zeros(2, dtype=torch.float32, device=x.device)
    if x.numel():
        matrix = hadamard_matrix(x.device)
        grid = (_num_tiles(x.shape[0]), _num_tiles(x.shape[1]))
        _nvfp4_amaxes[grid](x, matrix, out, tuple(x.shape), tuple(x.stride()))
    return out


@tensor_amaxes.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(2, dtype=torch.float32)


def cast_rows(
    x: Tensor, amax: Tensor, *, block: Block, words: ElementWords | None = None
) -> PackedNvfp4:
    """x [R, K] in NVFP4, for products that sum over K; see `nvfp4.cast_rows`."""
    return _cast_matrix(x, amax, words=words, is_tile=block[0] == UNIT, is_transformed=False)


def cast_columns(x: Tensor, amax: Tensor, *, words: ElementWords | None = None) -> PackedNvfp4:
    """x [T, K] -> [K, T] after the Hadamard transform, for products that sum over tokens."""
    return _cast_matrix(x.t(), amax, words=words, is_tile=False, is_transformed=True)


def _cast_matrix(
    x: Tensor, amax: Tensor, *, words: ElementWords | None, is_tile: bool, is_transformed: bool
) -> PackedNvfp4:
    """A matrix [R, K] of any strides in NVFP4."""
    rows = None if words is None else words.rows
    first_channel = 0 if words is None else words.first_channel
    flags = [int(is_tile), int(is_transformed), first_channel]
    values, scales, tensor_scale = nvfp4_cast(x, [amax, rows], flags=flags)
    return PackedNvfp4(values, scales, tensor_scale, num_rows=len(x))


@torch.library.custom_op("nanotrain::nvfp4_cast", mutates_args=())
def nvfp4_cast(
    x: Tensor, given: Sequence[Tensor | None], *, flags: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """The packed values, block scales and tensor scale of x [R, K].

    Args:
        x: fp32 or bf16, of any strides.
        given: [] amax of the tensor; [T] random words of tokens, or None to round to nearest.
        flags: whether blocks are 16 x 16, whether rows are transformed, and the first channel.
    """
    amax, words = given
    is_tile, is_transformed, first_channel = flags
    assert amax is not None, "the scale of a tensor follows from its amax"
    values, scales, _ = _allocate(x)
    matrix = hadamard_matrix(x.device) if is_transformed else None
    shape = (*x.shape, *values.shape)
    if values.numel():
        num_tiles = _num_tiles(x.shape[1])
        grid = (-(-len(x) // ROWS), num_tiles)
        strides = tuple(x.stride())
        _nvfp4_cast[grid](
            *(x, amax, matrix, words, first_channel, values, scales, shape, strides),
            is_tile=bool(is_tile),
            num_warps=WARPS,
        )
    tensor_scale = tensor_decode_scale(amax)
    packed = values.view(torch.float4_e2m1fn_x2)
    return packed, scales.view(torch.float8_e4m3fn), tensor_scale


@nvfp4_cast.register_fake
def _(
    x: Tensor, given: Sequence[Tensor | None], *, flags: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    values, scales, tensor_scale = _allocate(x)
    packed = values.view(torch.float4_e2m1fn_x2)
    return packed, scales.view(torch.float8_e4m3fn), tensor_scale


def _allocate(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Memory of packed values [R padded, K padded / 2], block scales and the tensor scale."""
    num_rows, num_columns = x.shape
    rows = -(-num_rows // ROW_UNIT) * ROW_UNIT
    columns = -(-num_columns // K_UNIT) * K_UNIT
    values = x.new_empty((rows, columns // 2), dtype=torch.uint8)
    num_tiles = -(-num_rows // ROWS) * _num_tiles(num_columns)
    scales = x.new_empty(num_tiles * TILE_BYTES, dtype=torch.uint8)
    return values, scales, x.new_empty((), dtype=torch.float32)


def _num_tiles(num_columns: int) -> int:
    return -(-num_columns // WIDTH)
