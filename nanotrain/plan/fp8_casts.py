"""`cast_recipe`: whether casts to fp8 compute norms and SwiGLU on GPUs (kernels/fp8/norm.py)."""

from collections.abc import Mapping
from typing import Any

from nanotrain.config.config import Config
from nanotrain.plan.compile import defers_wgrad
from nanotrain.precision.fp8 import RECIPES


def cast_recipe(config: Config, sizes: Mapping[Any, int]) -> str:
    """The recipe of casts that compute the input of linear layers; empty where none do.

    Args:
        config: a validated configuration.
        sizes: ranks of tp and cp.
    """
    fp8 = config.precision.fp8
    if fp8 is None or not fp8.wgrad or sizes["tp"] > 1 or defers_wgrad(config.parallel):
        return ""
    recipe = RECIPES[fp8.recipe]
    shares_scales = recipe.is_per_tensor and sizes["cp"] > 1
    return "" if recipe.is_two_level or shares_scales else fp8.recipe
