"""The table of fp8 recipes."""

import torch

from nanotrain.precision.fp8 import FP8_FORMATS, RECIPES


def test_weights_and_activations_are_e4m3_in_both_formats() -> None:
    assert {each.forward for each in FP8_FORMATS.values()} == {torch.float8_e4m3fn}
    assert FP8_FORMATS["hybrid"].backward is torch.float8_e5m2


def test_recipes_with_one_scale_per_tensor() -> None:
    assert [name for name, recipe in RECIPES.items() if recipe.is_per_tensor] == [
        "tensorwise",
        "delayed",
    ]
    assert [name for name, recipe in RECIPES.items() if recipe.has_history] == ["delayed"]
