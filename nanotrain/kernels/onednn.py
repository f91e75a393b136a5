"""fp32 products of linear layers on CPUs with AVX-512, by oneDNN.

torch multiplies fp32 matrices with MKL, whose kernels for CPUs of AMD use AVX2. oneDNN's use AVX-512: measured on one
core (AMD EPYC), T = 1024, GFLOP per second:

    I, O            256, 768     768, 256     256, 4096
    fprop   torch         96           92            87
            oneDNN       205          224           203
    wgrad   torch         89           93            90
            oneDNN       157          186           159

torch's compiler calls the same operator for linear layers of frozen models.

    T tokens   I inputs   O outputs
"""

from typing import Any

import torch
from torch import Tensor

# Multiplications below which the call costs more than it gains (measured: equal at 2**20).
MIN_PRODUCTS = 2**22
# oneDNN compiles and keeps a kernel for every new number of tokens. Only multiples of this number use it, since prompts
# may have any number of tokens.
TOKENS = 64
_OPERATOR: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


def uses_onednn(x: Tensor, size: int) -> bool:
    """Whether oneDNN multiplies x [..., I] (or dy [..., O]) with a weight whose other dim is `size`."""
    return (
        x.dtype is torch.float32
        and x.device.type == "cpu"
        and is_available()  # before the sizes, on which a compiled graph would depend
        and x.numel() * size >= MIN_PRODUCTS
        and x.numel() // x.shape[-1] % TOKENS == 0
    )


def multiply(x: Tensor, weight: Tensor, *, bias: Tensor | None = None) -> Tensor:
    """[..., I], [O, I], [O] -> x W^T + b [..., O], without a gradient."""
    out: Tensor = _OPERATOR(x, weight, bias, "none", [], "")
    return out


def linear(x: Tensor, weight: Tensor, *, bias: Tensor | None) -> Tensor:
    """`multiply`, with gradients."""
    if not torch.is_grad_enabled():
        return multiply(x, weight, bias=bias)
    out: Tensor = _Linear.apply(x, weight, bias)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply(x, weight, bias=bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, weight.shape[0])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            # `linear`, as it is differentiated again with create_graph
            linear(grad, weight.t(), bias=None).view(x.shape) if needs_x else None,
            linear(grad.t(), x.flatten(0, -2).t(), bias=None) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


def is_available() -> bool:
    """Whether its products are used: on CPUs with AVX-512, outside of compiled graphs."""
    if _OPERATOR is None or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    return torch.backends.cpu.get_cpu_capability() == "AVX512"
