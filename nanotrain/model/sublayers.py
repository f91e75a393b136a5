"""`Sublayers`: the token mixer and the MLP of a block, with their norms.

    MIXER_MODULES   token mixers by the kinds of spec/kinds.MIXERS

What they read from and write to the residual stream is in transformer.py and in the other kinds of
blocks of `RESIDUAL_MODULES` there.
"""

from torch import Tensor, nn

from nanotrain.config.model import ModelConfig
from nanotrain.model.attention import Attention
from nanotrain.model.attention_mamba import AttentionMamba2
from nanotrain.model.block_sparse import BlockSparseAttention
from nanotrain.model.compressed import CompressedSparse, HeavilyCompressed, WindowAttention
from nanotrain.model.context import LayerContext, ModelParallel
from nanotrain.model.delta_net import GatedDeltaNet, KimiDeltaAttention
from nanotrain.model.dsa import SharedSelectionAttention, SparseLatentAttention
from nanotrain.model.mamba import Mamba2
from nanotrain.model.mla import MultiLatentAttention
from nanotrain.model.mlp import build_mlp
from nanotrain.model.norm import build_norm, build_post_norm
from nanotrain.model.parameters import Parameters
from nanotrain.model.shared_kv import SharedKVAttention
from nanotrain.model.short_conv import ShortConv
from nanotrain.spec.shape import ModelShape

# __init__(model_config, params, *, parallel, layer), forward(hidden, context)
MIXER_MODULES: dict[str, type[nn.Module]] = {
    "attention": Attention,
    "shared_kv": SharedKVAttention,
    "mla": MultiLatentAttention,
    "dsa": SparseLatentAttention,
    "shared_dsa": SharedSelectionAttention,
    "block_sparse": BlockSparseAttention,
    "sliding": WindowAttention,
    "csa": CompressedSparse,
    "hca": HeavilyCompressed,
    "gated_delta_net": GatedDeltaNet,
    "kda": KimiDeltaAttention,
    "mamba2": Mamba2,
    "attention_mamba2": AttentionMamba2,
    "short_conv": ShortConv,
}


class Sublayers(nn.Module):
    """A token mixer and an MLP, or one of them, with norms of their inputs and outputs.

    With `norm_placement` the outputs are normalized too, or only these.

    Args:
        model_config: configuration of the model.
        params: attention and mlp where declared, and the declared norms before and after them.
        parallel: groups of the layers.
        layer: index in the model.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__()
        if attention := params.submodule("attention"):
            self.attention_norm = build_norm(model_config, params.submodule("attention_norm"))
            self.attention = build_mixer(model_config, attention, parallel=parallel, layer=layer)
            self.attention_post_norm = build_post_norm(model_config, params, half="attention")
        if mlp := params.submodule("mlp"):
            self.mlp_norm = build_norm(model_config, params.submodule("mlp_norm"))
            self.mlp = build_mlp(model_config, mlp, parallel=parallel, layer=layer)
            self.mlp_post_norm = build_post_norm(model_config, params, half="mlp")

    def attention_output(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """The output of the token mixer: [B, S or S/tp, H] -> the same shape."""
        attended = self.attention(self.attention_norm(hidden), context)
        out: Tensor = self.attention_post_norm(attended)
        return out

    def mlp_output(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """The output of the MLP: [B, S or S/tp, H] -> the same shape."""
        transformed = self.mlp(self.mlp_norm(hidden), context)
        out: Tensor = self.mlp_post_norm(transformed)
        return out


def build_mixer(
    model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
) -> nn.Module:
    """The token mixer of a layer: attention, or a kind in its place."""
    mixer, _ = ModelShape.of(model_config).kinds(layer)
    assert mixer is not None, "the layer is an MLP alone"
    return MIXER_MODULES[mixer](model_config, params, parallel=parallel, layer=layer)
