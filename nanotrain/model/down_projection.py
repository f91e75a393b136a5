"""The down projection of SwiGLU in fp8, whose casts compute the activations.

fused_projection   the projection for an MLP that may have it, chosen when the MLP is built
project_swiglu     down(silu(gate) * up), for fp8 products on GPUs (kernels/fp8/swiglu.py)
"""

from collections.abc import Callable

from torch import Tensor

from nanotrain.config.model import ModelConfig
from nanotrain.kernels.fp8.swiglu import fuses_swiglu, swiglu_linear
from nanotrain.model.activations import Glu
from nanotrain.model.parameters import Parameters
from nanotrain.parallel.tp.layers import RowParallelLinear, TensorParallel

# down projection, activation and the outputs of up, or of gate and up, [B, S, F] -> [B, S, H]
Projection = Callable[..., Tensor]


def project_swiglu(
    down: RowParallelLinear, activation: Callable[..., Tensor], *projected: Tensor
) -> Tensor:
    """down(silu(gate) * up) of one tensor-parallel rank, in fp8.

    An activation that recomputation has replaced is called: it discards what the casts would keep.
    """
    if not isinstance(activation, Glu):
        recomputed: Tensor = down(activation(*projected))
        return recomputed
    gate, up = projected
    out = swiglu_linear(gate, up, linear=down)
    return out if down.bias is None or down.adds_bias else out + down.bias


def fused_projection(
    model_config: ModelConfig, params: Parameters, *, tensor_parallel: TensorParallel
) -> Projection | None:
    """`project_swiglu` for a SwiGLU in fp8 whose weight gradient is not deferred, on one rank."""
    is_plain = "gate.weight" in params and model_config.has_plain_swiglu
    is_local = tensor_parallel.group.size == 1 and tensor_parallel.wgrad_queue is None
    if is_plain and is_local and fuses_swiglu(tensor_parallel.fp8):
        return project_swiglu
    return None
