"""The norms of a block: `build_norm` makes the one the configuration names.

Both compute in fp32 whatever the activations are and hold nothing but their parameters.
"""

from collections.abc import Callable

import torch
from torch import nn

from nanotrain.config.config import Normalization


def build_norm(kind: Normalization, size: int, *, epsilon: float, dtype: torch.dtype) -> nn.Module:
    """A norm over the last dim, on the meta device.

    Args:
        kind: LayerNorm (weight and bias) or RMSNorm (weight).
        size: length of the last dim.
        epsilon: added to the variance.
        dtype: of the parameters.
    """
    return NORMS[kind](size, eps=epsilon, dtype=dtype, device="meta")


NORMS: dict[Normalization, Callable[..., nn.Module]] = {
    Normalization.LayerNorm: nn.LayerNorm,
    Normalization.RMSNorm: nn.RMSNorm,
}
