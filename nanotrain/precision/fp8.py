"""fp8 and NVFP4 training: the formats and the table of recipes.

    FORMATS       the dtypes of activations, weights and gradients; FP8_FORMATS: of 8 bits
    RECIPES       how many elements share a scale, and where its amax comes from; FP8_RECIPES:
                  of 8 bits
    require_fp8   the devices that have the products of a recipe

An amax is the largest absolute value of the elements that share a scale. A recipe is one row here;
kernels/fp8 reads only its fields.

    R rows   K elements of a row that a product sums over
"""

from dataclasses import dataclass

import torch

from nanotrain.config.config import Fp8Config
from nanotrain.errors import ConfigError

Capability = tuple[int, int]  # CUDA compute capability
# The only one with a grouped product of fp8 matrices with a scale per row (torch 2.13).
GROUPED_CAPABILITY: Capability = (9, 0)

# Rows and elements of a row that share a scale; None is all of them.
Block = tuple[int | None, int | None]
PER_TENSOR: Block = (None, None)
PER_ROW: Block = (1, None)
BLOCK_1X16: Block = (1, 16)
BLOCK_16X16: Block = (16, 16)
BLOCK_1X32: Block = (1, 32)
BLOCK_1X128: Block = (1, 128)
BLOCK_128X128: Block = (128, 128)


@dataclass(frozen=True)
class Fp8Dtypes:
    """The dtypes of a format (Micikevicius et al. 2022, "FP8 Formats for Deep Learning")."""

    forward: torch.dtype  # activations and weights
    backward: torch.dtype  # gradients


FP8_FORMATS: dict[str, Fp8Dtypes] = {
    "e4m3": Fp8Dtypes(torch.float8_e4m3fn, torch.float8_e4m3fn),
    "hybrid": Fp8Dtypes(torch.float8_e4m3fn, torch.float8_e5m2),
}
E2M1 = torch.float4_e2m1fn_x2
FORMATS = dict(FP8_FORMATS)
FORMATS["e2m1"] = Fp8Dtypes(E2M1, E2M1)
WEIGHT_DTYPE = torch.float8_e4m3fn  # dtype of weights, in the formats of 8 bits


@dataclass(frozen=True)
class Recipe:
    """The scaling of operands [R, K] of a matrix product."""

    block: Block  # block of activations and gradients
    weight_block: Block
    # whether scales are powers of two: dequantization is then exact, and values that stay normal do
    # not depend on the scale
    power_of_two: bool = False
    has_history: bool = False  # whether scales follow from the amaxes of earlier steps
    capability: Capability = (8, 9)  # the first with kernels
    last_capability: Capability | None = None  # the last one; None: no limit
    formats: tuple[str, ...] = tuple(FP8_FORMATS)  # the formats for which torch has kernels
    # whether a block has an e4m3 scale and a tensor an fp32 scale, with the Hadamard transform of
    # wgrad and stochastic rounding of gradients
    is_two_level: bool = False

    @property
    def is_per_tensor(self) -> bool:
        """Whether a tensor has one scale."""
        return self.block == PER_TENSOR

    def runs_on(self, capability: Capability) -> bool:
        """Whether a GPU has the products."""
        last = self.last_capability or capability
        return self.capability <= capability <= last

    @property
    def needed_capability(self) -> str:
        """The GPUs that have the products, in words."""
        if self.last_capability is None:
            return f"{_capability_text(self.capability)} or newer"
        return f"{self.capability[0]}.x"


RECIPES: dict[str, Recipe] = {
    # current scaling: the amax of the tensor itself
    "tensorwise": Recipe(PER_TENSOR, PER_TENSOR),
    # delayed scaling: the amaxes of earlier steps
    "delayed": Recipe(PER_TENSOR, PER_TENSOR, has_history=True),
    # one scale per token or output channel
    "rowwise": Recipe(PER_ROW, PER_ROW, power_of_two=True),
    # DeepSeek-V3 (2024), section 3.3.2; torch has kernels for Hopper only
    "blockwise": Recipe(
        block=BLOCK_1X128,
        weight_block=BLOCK_128X128,
        power_of_two=True,
        capability=(9, 0),
        last_capability=(9, 9),
        formats=("e4m3",),
    ),
    # OCP Microscaling Formats 1.0: scales are e8m0
    "mxfp8": Recipe(
        block=BLOCK_1X32,
        weight_block=BLOCK_1X32,
        power_of_two=True,
        capability=(10, 0),
        formats=("e4m3",),
    ),
    # NVIDIA 2025, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149)
    "nvfp4": Recipe(
        block=BLOCK_1X16,
        weight_block=BLOCK_16X16,
        capability=(10, 0),
        last_capability=(10, 9),
        formats=("e2m1",),
        is_two_level=True,
    ),
}
FP8_RECIPES = {name: recipe for name, recipe in RECIPES.items() if not recipe.is_two_level}


def require_fp8(fp8: Fp8Config | None, capability: Capability | None) -> None:
    """Check that a device has the matrix products of the recipe.

    Args:
        fp8: section of the configuration; None without fp8.
        capability: CUDA compute capability; None on a CPU, which emulates every recipe.

    Raises:
        ConfigError: the GPU lacks them.
    """
    if fp8 is None or capability is None:
        return
    recipe = RECIPES[fp8.recipe]
    if recipe.runs_on(capability):
        return
    flag = "--fp4-format e2m1" if recipe.is_two_level else f"--fp8-recipe {fp8.recipe}"
    raise ConfigError(
        f"{flag} on a GPU of compute capability {_capability_text(capability)}",
        why=f"its products need compute capability {recipe.needed_capability}",
        fix=_fitting_setting(fp8, capability),
    )


def _fitting_setting(fp8: Fp8Config, capability: Capability) -> str:
    """The setting that a GPU can compute in the place of another one."""
    if fp8.recipe not in FP8_RECIPES:
        has_fp8 = RECIPES["tensorwise"].runs_on(capability)
        return "set --fp8-format e4m3 in its place" if has_fp8 else "leave it out"
    fitting = []
    for name, recipe in FP8_RECIPES.items():
        if fp8.format in recipe.formats and recipe.runs_on(capability):
            fitting.append(name)
    return f"set --fp8-recipe {' or '.join(fitting)}" if fitting else "set --fp8-format none"


def _capability_text(capability: Capability) -> str:
    """A compute capability as NVIDIA writes it: 9.0."""
    return ".".join(map(str, capability))
