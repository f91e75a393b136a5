"""The table of fp8 recipes, and the GPUs that have their products."""

import pytest
import torch

from nanotrain.config.config import Fp8Config
from nanotrain.config.precision import Fp8Format
from nanotrain.errors import ConfigError
from nanotrain.precision.fp8 import FP8_FORMATS, RECIPES, require_fp8


def test_weights_and_activations_are_e4m3_in_both_formats() -> None:
    assert {each.forward for each in FP8_FORMATS.values()} == {torch.float8_e4m3fn}
    assert FP8_FORMATS["hybrid"].backward is torch.float8_e5m2


def test_recipes_with_one_scale_per_tensor() -> None:
    assert [name for name, recipe in RECIPES.items() if recipe.is_per_tensor] == [
        "tensorwise",
        "delayed",
    ]
    assert [name for name, recipe in RECIPES.items() if recipe.has_history] == ["delayed"]


def precision(recipe: str, name: Fp8Format = "e4m3") -> Fp8Config:
    return Fp8Config(format=name, recipe=recipe)


@pytest.mark.parametrize(
    ("recipe", "capability", "cure"),
    [
        ("delayed", (8, 0), "set --fp8-format none"),
        ("blockwise", (8, 9), "set --fp8-recipe tensorwise or delayed or rowwise"),
        ("blockwise", (10, 0), "set --fp8-recipe tensorwise or delayed or rowwise or mxfp8"),
        ("mxfp8", (9, 0), "set --fp8-recipe tensorwise or delayed or rowwise or blockwise"),
    ],
)
def test_a_gpu_without_the_products_is_an_error(
    recipe: str, capability: tuple[int, int], cure: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"compute capability {capability[0]}.{capability[1]}"
    ) as caught:
        require_fp8(precision(recipe), capability)
    assert caught.value.fix == cure


@pytest.mark.parametrize(
    ("recipe", "capability"),
    [("delayed", (8, 9)), ("blockwise", (9, 0)), ("mxfp8", (12, 0)), ("mxfp8", None)],
)
def test_other_devices_pass(recipe: str, capability: tuple[int, int] | None) -> None:
    require_fp8(precision(recipe), capability)
    require_fp8(None, (7, 0))


def test_nvfp4_on_an_older_gpu_names_its_flag_and_what_the_gpu_has() -> None:
    four_bits = precision("nvfp4", "e2m1")
    require_fp8(four_bits, (10, 3))
    with pytest.raises(ConfigError, match=r"--fp4-format e2m1 on .* 9\.0: .* 10\.x") as caught:
        require_fp8(four_bits, (9, 0))
    assert caught.value.fix == "set --fp8-format e4m3 in its place"
    with pytest.raises(ConfigError) as caught:
        require_fp8(four_bits, (8, 0))
    assert caught.value.fix == "leave it out"
