"""Attention to the keys and values of an earlier layer (Gemma 4, Gemma 3n; Sun et al. 2024, "You
Only Cache Once").

    hidden -- query -- norm, rotary --+
    layer of `kv_sources`             +-- attention -- output
      its key and value --------------+

The layer has no projections of keys and values. Their gradients are summed over the layers that
read them and over the layer that computes them.

B batch   S sequence   H hidden   N query heads   G key/value heads   D width of a head
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from nanotrain.config.model import ModelConfig
from nanotrain.model.attention import HeadAttention
from nanotrain.model.context import (
    LayerContext,
    ModelParallel,
    TokenCache,
    head_channels,
    local_heads,
    split_heads,
)
from nanotrain.model.norm import build_head_norm
from nanotrain.model.parameters import Parameters
from nanotrain.model.rope import Rotary
from nanotrain.parallel.tp.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parallel,
)
from nanotrain.spec.shape import ModelShape


class SharedKVAttention(HeadAttention):
    """Attention to the keys and values that an earlier layer keeps.

    Args:
        model_config: configuration of the model.
        params: query, output; gate, query_norm and softmax_offset where declared.
        parallel: tp shards the heads, the core attention's cp group the sequence.
        layer: index in the model.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__()
        shape = ModelShape.of(model_config).for_layer(layer)
        self._set_options(model_config, shape, parallel=parallel, layer=layer)
        source = shape.key_value_source(layer)
        assert source is not None, "a layer with keys of its own has the class Attention"
        self.source = source
        tp = parallel.tp.group
        self.softmax_offset = params.get("softmax_offset")
        query_channels = head_channels(local_heads(shape.num_heads, tp), shape.head_dim)
        column = partial(ColumnParallelLinear, tensor_parallel=parallel.tp)
        self.query = column(*params.linear("query"))
        self.gate = column(*params.linear("gate")) if shape.has_output_gate else None
        self.query_norm = build_head_norm(
            model_config,
            params.submodule("query_norm"),
            channels=query_channels,
            group=tp,
            is_l2=shape.qk_l2_norm,
        )
        self.output = RowParallelLinear(*params.linear("output"), tensor_parallel=parallel.tp)

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        rotary = self.inputs(context).rotary
        query, gate = self._project_query(hidden)
        query = self.prepare_query_key(query, rotary=rotary, query_scale=context.query_scale)
        key, value = context.state[self.source]
        return self.attend(query, key=key, value=value, gate=gate, context=context)

    def _project_query(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Query [B, S, N, D]; gate as in `attend`."""
        if self.gate is None:
            (query,) = column_parallel(hidden, (self.query,))
            return split_heads(query, self.head_dim), None
        query, gate = column_parallel(hidden, (self.query, self.gate))
        return split_heads(query, self.head_dim), split_heads(gate, self.gate_channels)

    def prepare_query_key(
        self, query: Tensor, *, rotary: Rotary | None, query_scale: Tensor | None
    ) -> Tensor:
        """Queries alone, under the name of what recomputation runs again."""
        return self.prepare_query(query, rotary=rotary, query_scale=query_scale)

    def cached_function(self, cache: TokenCache) -> Callable[..., Any]:
        """The core attention to all tokens so far of the layer that keeps them."""
        return cache.attend(self.core_attention, has_window=self.has_window, reads=self.source)
