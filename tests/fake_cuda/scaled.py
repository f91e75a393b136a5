"""torch's products of fp8 matrices on CUDA, in fp32 over the same memory.

    scaled_mm          `_scaled_mm_v2`, of two matrices
    scaled_grouped_mm  `_scaled_grouped_mm_v2`, of the tokens of each group

They take what torch's kernels take on compute capability 9.0 and 10.0, and end with an error
otherwise: dtypes, sizes, strides of matrices and of scales. Source: the checks in
aten/src/ATen/native/cuda/ScaledBlas.cpp, GroupedBlas.cpp and GroupMMCommon.cuh of torch 2.13.

M rows of a   N columns of b   K what is summed over   E groups
"""

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from tests.fake_cuda.memory import on_cpu, to_device

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
UNIT = 16  # bytes that rows are a multiple of
BLOCK = 128


def scaled_mm(given: SimpleNamespace) -> Tensor:
    """[M, K] and [K, N] -> [M, N] in `out_dtype`."""
    a, b = given.self, given.mat2
    assert a.stride() == (a.shape[1], 1) and b.stride() == (1, b.shape[0]), (
        "row-major times column-major"
    )
    assert a.shape[1] % UNIT == 0 and b.shape[1] % UNIT == 0, "K and N are multiples of 16"
    assert {a.dtype, b.dtype} <= {E4M3, E5M2} and not a.dtype == b.dtype == E5M2
    recipes = [ScalingType(*recipe) for recipe in (given.recipe_a, given.recipe_b)]
    is_per_block = [recipe.name.startswith("Block") for recipe in recipes]
    assert recipes[0] == recipes[1] or all(is_per_block), "no kernel of both recipes"
    assert not any(is_per_block) or {a.dtype, b.dtype} == {E4M3}, "blocks are e4m3"
    assert recipes != [ScalingType.BlockWise128x128] * 2, "no kernel of tiles times tiles"
    is_mx = ScalingType.BlockWise1x32 in recipes
    assert recipes[0] == recipes[1] or not is_mx
    assert not any(is_per_block) or torch.cuda.get_device_capability()[0] == (10 if is_mx else 9)
    assert list(given.swizzle_a) == list(given.swizzle_b) == [int(is_mx)], (
        "scales of 1 x 32 are swizzled, no others"
    )
    (scale_a,), (scale_b,) = given.scale_a, given.scale_b
    if recipes[1] == ScalingType.RowWise:
        assert scale_b.shape == (1, b.shape[1]) and scale_b.stride(1) == 1
        scale_b = scale_b.t()
    wide_a = on_cpu(a).float() * _factors(scale_a, recipes[0], rows=a.shape[0], columns=a.shape[1])
    wide_b = on_cpu(b).t().float() * _factors(
        scale_b, recipes[1], rows=b.shape[1], columns=b.shape[0]
    )
    return to_device((wide_a @ wide_b.t()).to(given.out_dtype), a.device)


def _factors(scale: Tensor, recipe: ScalingType, *, rows: int, columns: int) -> Tensor:
    """Of each element [rows, columns], or a shape that is broadcast to it."""
    if recipe == ScalingType.BlockWise1x32:
        return _swizzled_factors(scale, rows=rows, columns=columns)
    assert scale.dtype == torch.float32
    num_blocks = -(-columns // BLOCK)
    if recipe == ScalingType.TensorWise:
        assert scale.numel() == 1
        return on_cpu(scale).reshape(1, 1)
    if recipe == ScalingType.RowWise:
        assert scale.shape == (rows, 1)
        return on_cpu(scale)
    if recipe == ScalingType.BlockWise1x128:
        assert scale.shape == (rows, num_blocks)
        assert scale.stride(0) == 1 and (scale.stride(1) == rows or num_blocks == 1), (
            "scales are column-major"
        )
        return on_cpu(scale).repeat_interleave(BLOCK, dim=1)[:, :columns]
    assert recipe == ScalingType.BlockWise128x128, f"no {recipe}"
    padded = -(-num_blocks // 4) * 4
    assert scale.shape == (padded, -(-rows // BLOCK))
    assert scale.stride(0) == 1 and (scale.stride(1) == padded or scale.shape[1] == 1), (
        "scales are column-major"
    )
    tiles = on_cpu(scale)[:num_blocks].t()
    return tiles.repeat_interleave(BLOCK, dim=0)[:rows].repeat_interleave(BLOCK, dim=1)[:, :columns]


def _swizzled_factors(scale: Tensor, *, rows: int, columns: int) -> Tensor:
    """[rows, columns] of scales in the order of cuBLAS ("1D block scaling factors layout"), read
    one by one.
    """
    num_tiles, num_blocks = -(-rows // 128), -(-columns // 32)
    tiles_per_row = -(-num_blocks // 4)
    assert scale.dtype == torch.float8_e8m0fnu and scale.is_contiguous()
    assert scale.numel() == 512 * num_tiles * tiles_per_row
    row, block = torch.arange(rows)[:, None], torch.arange(num_blocks)
    tile = row // 128 * tiles_per_row + block // 4
    places = 512 * tile + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    return on_cpu(scale).float().flatten()[places].repeat_interleave(32, dim=1)[:, :columns]


def scaled_grouped_mm(given: SimpleNamespace) -> Tensor:
    """[M, K] and [E, K, N] -> [M, N], or [M, K] and [K, N] -> [E, M, N], in bf16; what no group
    writes is NaN.
    """
    a, b, offs = given.self, given.mat2, given.offs
    assert (
        a.dtype == b.dtype == E4M3
        and given.out_dtype == torch.bfloat16
        and offs.dtype == torch.int32
    )
    assert given.recipe_a == given.recipe_b == [ScalingType.RowWise.value]
    assert a.dim() == 2 and a.stride(1) == 1 and b.stride(-2) == 1, "row-major times column-major"
    assert all(size % UNIT == 0 for size in (a.shape[1], *b.shape[-2:], a.stride(0), b.stride(-1)))
    (scale_a,), (scale_b,) = (map(on_cpu, scales) for scales in (given.scale_a, given.scale_b))
    wide_a, wide_b, ends = on_cpu(a).float(), on_cpu(b).float(), on_cpu(offs).tolist()
    groups = [slice(*bounds) for bounds in zip([0, *ends], ends, strict=False)]
    assert all(
        group.start <= group.stop <= (a.shape[0] if b.dim() == 3 else a.shape[1])
        for group in groups
    )
    if b.dim() == 3:
        assert scale_a.shape == (a.shape[0],) and scale_b.shape == (len(ends), b.shape[2])
        out = torch.full((a.shape[0], b.shape[2]), torch.nan)
        for group, matrix, scale in zip(groups, wide_b, scale_b, strict=True):
            out[group] = (wide_a[group] @ matrix) * scale_a[group, None] * scale
    else:
        assert all((group.stop - group.start) % UNIT == 0 for group in groups[:-1]), (
            "groups of a multiple of 16"
        )
        assert scale_a.shape == (len(ends) * a.shape[0],) and scale_b.shape == (
            len(ends) * b.shape[1],
        )
        scales = zip(scale_a.view(len(ends), -1, 1), scale_b.view(len(ends), 1, -1), strict=True)
        products = [wide_a[:, group] @ wide_b[group] for group in groups]
        out = torch.stack(
            [
                product * rows * columns
                for product, (rows, columns) in zip(products, scales, strict=True)
            ]
        )
    return to_device(out.to(torch.bfloat16), a.device)
