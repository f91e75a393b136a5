"""Weights in fp8: shards quantized apart are the whole weight quantized, to the bit."""

import pytest
import torch

from nanotrain.kernels.fp8.quantize import block_amax, inverse_scales, quantize
from nanotrain.parallel.dp.fp8_weights import WeightPart, placeholder, scales_shape
from nanotrain.precision.fp8 import FP8_RECIPES, WEIGHT_DTYPE

SHAPE = (2, 300, 200)  # experts, rows, columns: no multiple of a block
GATHERED = [
    name for name, recipe in FP8_RECIPES.items() if recipe.weight_block[0] == recipe.weight_block[1]
]


@pytest.mark.parametrize("recipe", GATHERED)
@pytest.mark.parametrize("borders", [(0, 7, 59_999), (0, 33_333, 77_777)])
def test_shards_have_the_scales_and_the_values_of_the_whole_weight(
    recipe: str, borders: tuple[int, ...]
) -> None:
    block, power = FP8_RECIPES[recipe].weight_block, FP8_RECIPES[recipe].power_of_two
    experts, rows, columns = SHAPE
    weight = (torch.randn(SHAPE, generator=torch.manual_seed(1)) * 0.02).bfloat16()
    flat, numel, target = (
        weight.flatten(),
        rows * columns,
        torch.zeros(weight.numel(), dtype=WEIGHT_DTYPE),
    )
    edges = sorted({*borders, *range(0, experts * numel + 1, numel)})
    pairs = zip(edges, edges[1:], strict=False)
    parts = [WeightPart(a // numel, a % numel, columns, slice(a, b), block) for a, b in pairs]
    largest = torch.zeros(scales_shape(SHAPE, block))
    for part in parts:
        part.amax(flat, largest)
    whole = torch.stack([block_amax(matrix, block) for matrix in weight])
    assert torch.equal(largest, whole)
    inverse = inverse_scales(largest, WEIGHT_DTYPE, power_of_two=power)
    for part in parts:
        part.quantize(flat, target, inverse=inverse)
    expected = [
        quantize(matrix, scales, block=block, dtype=WEIGHT_DTYPE).values
        for matrix, scales in zip(weight, inverse, strict=True)
    ]
    assert torch.equal(target.view(SHAPE).float(), torch.stack(expected).float())


def test_a_placeholder_takes_no_memory_and_is_not_a_number() -> None:
    param = placeholder((4, 1000), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert (
        param.shape == (4, 1000) and param.untyped_storage().nbytes() == 2 and param.isnan().all()
    )
