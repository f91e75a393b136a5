"""`GatedBlock`: a learned weight per channel of x and of the output of a sublayer (Muse Spark).

B batch   S sequence   H hidden
"""

import torch
from torch import Tensor, nn

from nanotrain.config.model import ModelConfig
from nanotrain.model.context import LayerContext, ModelParallel
from nanotrain.model.parameters import Parameters
from nanotrain.model.sublayers import Sublayers
from nanotrain.precision.dtypes import as_fp32

MIN_SQUARE = 1e-3  # of the weight of x, as in Muse Spark


class ResidualGate(nn.Module):
    """sqrt(1 - b^2) x + b output, where b is the sigmoid of a learned vector.

    Squares of the two weights sum to 1, so the sum of independent vectors keeps their variance.

    Args:
        weight: [H].
        temperature: divisor of the weight.
    """

    def __init__(self, weight: nn.Parameter, *, temperature: float) -> None:
        super().__init__()
        self.weight = weight
        self.temperature = temperature

    def forward(self, x: Tensor, output: Tensor) -> Tensor:
        """Two [B, S, H] -> the same shape."""
        logits = as_fp32(self.weight) / self.temperature
        output_weight = torch.sigmoid(logits)
        square = torch.sigmoid(-logits) * (1.0 + output_weight)
        x_weight = torch.sqrt(torch.clamp(square, min=MIN_SQUARE))
        return (x_weight * x + output_weight * output).to(x.dtype)


class GatedBlock(Sublayers):
    """gate(x, attention(norm(x))), then gate(x, mlp(norm(x))); or one of the two."""

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__(model_config, params, parallel=parallel, layer=layer)
        temperature = model_config.residual_gate_temperature
        if "attention_gate.weight" in params:
            weight = params["attention_gate.weight"]
            self.attention_gate = ResidualGate(weight, temperature=temperature)
        if "mlp_gate.weight" in params:
            weight = params["mlp_gate.weight"]
            self.mlp_gate = ResidualGate(weight, temperature=temperature)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        if hasattr(self, "attention"):
            x = self.attention_gate(x, self.attention_output(x, context))
        if hasattr(self, "mlp"):
            x = self.mlp_gate(x, self.mlp_output(x, context))
        return x
