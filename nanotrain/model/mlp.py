"""The feed-forward layer: up, activation, down; gated with swiglu.

B batch   S sequence   H hidden   F width inside
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.config.config import Activation, ModelConfig
from nanotrain.config.derive import ffn_size
from nanotrain.model.meta import column_linear, row_linear
from nanotrain.parallel.tp.layers import column_parallel
from nanotrain.parallel.tp.tensor_parallel import TensorParallel

ALONE = TensorParallel.single_rank()

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.gelu: F.gelu,
    Activation.gelu_tanh: partial(F.gelu, approximate="tanh"),
    Activation.swiglu: F.silu,
}


class MLP(nn.Module):
    """down(activation(up(x))), or down(silu(gate(x)) * up(x)) with swiglu (Shazeer, "GLU variants", 2020).

    Args:
        model_config: the whole model's shape.
        dtype: of the parameters and activations.
        tensor_parallel: cuts the width inside.
        size: the width inside; the model's by default.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        *,
        dtype: torch.dtype,
        tensor_parallel: TensorParallel = ALONE,
        size: int | None = None,
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[model_config.activation]
        hidden, inner = model_config.hidden_size, size or ffn_size(model_config)
        options: Any = {"bias": model_config.add_bias_linear, "dtype": dtype, "tensor_parallel": tensor_parallel}
        is_gated = model_config.activation is Activation.swiglu
        self.gate = column_linear(hidden, inner, **options) if is_gated else None
        self.up = column_linear(hidden, inner, **options)
        self.down = row_linear(inner, hidden, **options)

    def forward(self, hidden: Tensor, context: object = None) -> Tensor:
        """[B, S or S/tp, H] -> the same shape; the context is for layers with experts, which are called alike."""
        if self.gate is None:
            (up,) = column_parallel(hidden, (self.up,))
            inner = self.activation(up)
        else:
            gate, up = column_parallel(hidden, (self.gate, self.up))
            inner = self.activation(gate) * up
        out: Tensor = self.down(inner)
        return out
