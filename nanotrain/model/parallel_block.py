"""`ParallelBlock`: attention and MLP side by side (GPT-J, PaLM).

B batch   S sequence   H hidden
"""

from torch import Tensor, nn

from nanotrain.config.model import ModelConfig
from nanotrain.model.context import LayerContext, ModelParallel
from nanotrain.model.norm import build_norm
from nanotrain.model.parameters import Parameters
from nanotrain.model.sublayers import Sublayers


class ParallelBlock(Sublayers):
    """x + attention(norm(x)) + mlp(norm(x)), with a norm each or with one norm of both.

    Source: Wang and Komatsuzaki 2021 (GPT-J); Black et al. 2022 (GPT-NeoX) for two norms.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__(model_config, params, parallel=parallel, layer=layer)
        self.input_norm: nn.Module = nn.Identity()
        if model_config.parallel_shared_norm:
            self.input_norm = build_norm(model_config, params.submodule("input_norm"))
            self.attention_norm = nn.Identity()
            self.mlp_norm = nn.Identity()

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        return x + self.attend_and_transform(self.input_norm(x), context)

    def attend_and_transform(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """The sum of both outputs."""
        return self.attention_output(hidden, context) + self.mlp_output(hidden, context)
