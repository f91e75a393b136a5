"""fp8 training: the two formats and the table of recipes.

    FP8_FORMATS   the fp8 dtypes of activations, weights and gradients
    RECIPES       how many elements share a scale, and where its amax comes from

An amax is the largest absolute value of the elements that share a scale. A recipe is one row here;
kernels/fp8 reads only its fields.

    R rows   K elements of a row that a product sums over
"""

from dataclasses import dataclass

import torch

Capability = tuple[int, int]  # CUDA compute capability
# The only one with a grouped product of fp8 matrices with a scale per row (torch 2.13).
GROUPED_CAPABILITY: Capability = (9, 0)

# Rows and elements of a row that share a scale; None is all of them.
Block = tuple[int | None, int | None]
PER_TENSOR: Block = (None, None)
PER_ROW: Block = (1, None)
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
WEIGHT_DTYPE = torch.float8_e4m3fn  # dtype of weights, in both formats


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
    e4m3_only: bool = False  # whether torch lacks kernels for e5m2

    @property
    def is_per_tensor(self) -> bool:
        """Whether a tensor has one scale."""
        return self.block == PER_TENSOR


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
        e4m3_only=True,
    ),
    # OCP Microscaling Formats 1.0: scales are e8m0
    "mxfp8": Recipe(
        block=BLOCK_1X32,
        weight_block=BLOCK_1X32,
        power_of_two=True,
        capability=(10, 0),
        e4m3_only=True,
    ),
}
