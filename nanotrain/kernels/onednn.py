"""fp32 products by oneDNN, for causal attention: with AVX-512, where torch's MKL uses AVX2."""

from typing import Any

import torch
from torch import Tensor

# oneDNN compiles and keeps a kernel for every new number of tokens. Only multiples of this number use it, since prompts
# may have any number of tokens.
TOKENS = 64
_OPERATOR: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """[..., I], [O, I] -> x W^T [..., O], without a gradient."""
    out: Tensor = _OPERATOR(x, weight, None, "none", [], "")
    return out


def is_available() -> bool:
    """Whether its products are used: on CPUs with AVX-512, outside of compiled graphs."""
    if _OPERATOR is None or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    return torch.backends.cpu.get_cpu_capability() == "AVX512"
