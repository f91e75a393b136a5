"""Causal attention with grouped key/value heads: `Attention`.

B batch   S sequence   H hidden   N query heads   G key/value heads (N is a multiple of G)   D width of a head
"""

import math
from functools import partial

from torch import Tensor, nn

from nanotrain.config.config import ModelConfig
from nanotrain.model.context import LayerContext
from nanotrain.model.dropout import DropoutPlace, HiddenDropout
from nanotrain.model.norm import build_head_norm
from nanotrain.model.parallel import ModelParallel
from nanotrain.model.parameters import Parameters
from nanotrain.model.rope import apply_rotary
from nanotrain.model.scores import LayerScores
from nanotrain.parallel.tp.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parallel,
)
from nanotrain.parallel.tp.tensor_parallel import TensorParallel
from nanotrain.spec.shape import ModelShape


class Attention(nn.Module):
    """Causal multi-head attention with grouped key/value heads (Ainslie et al. 2023).

    The number of heads follows from the shapes of the projections, so a rank with a shard of the heads runs this code.

    Args:
        model_config: of the model.
        params: query, key, value, output; query_norm, key_norm and softmax_offset where declared.
        parallel: tp shards the heads, the core attention's cp group the sequence.
        has_window: attend within the window of the model.
        layer: index in the model.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        params: Parameters,
        *,
        parallel: ModelParallel,
        has_window: bool = False,
        layer: int = 0,
    ) -> None:
        super().__init__()
        shape = ModelShape.of(model_config)
        self.softmax_offset = params.get("softmax_offset")
        self.scores = LayerScores(model_config, layer=layer, parallel=parallel)
        self.max_logits = self.scores.max_logits
        self.head_dim, self.has_window, self.has_rope = shape.head_dim, has_window, shape.has_rope(layer)
        self.core_attention = parallel.core_attention
        query_rows = _rows(shape, shape.num_heads, tensor_parallel=parallel.tp)
        key_rows = _rows(shape, shape.num_query_groups, tensor_parallel=parallel.tp)
        column = partial(ColumnParallelLinear, tensor_parallel=parallel.tp)
        rows = key_rows if shape.replicates_kv_heads(parallel.tp.group.size) else None
        self.query = column(*params.linear("query"))
        self.key = column(*params.linear("key"), rows=rows)
        self.value = column(*params.linear("value"), rows=rows)
        self.query_norm, self.key_norm = (
            build_head_norm(model_config, params, name=f"{name}_norm", heads=rows, group=parallel.tp.group)
            for name, rows in (("query", query_rows), ("key", key_rows))
        )
        # the core attention divides scores by the root of the head's width
        scale = model_config.softmax_scale
        self.query_factor = 1.0 if scale is None else scale * math.sqrt(shape.head_dim)
        self.output = RowParallelLinear(*params.linear("output"), tensor_parallel=parallel.tp)
        self.dropout = HiddenDropout(model_config.hidden_dropout, layer, DropoutPlace.attention, parallel.tp)

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        projected = column_parallel(hidden, (self.query, self.key, self.value))
        query, key, value = (x.unflatten(-1, (-1, self.head_dim)) for x in projected)  # [B, S, N or G, D]
        query, key = self.query_norm(query), self.key_norm(key)
        if self.query_factor != 1.0:
            query = query * self.query_factor
        rotary = context.rotary_of(has_window=self.has_window) if self.has_rope else None
        if rotary is not None:
            query, key = apply_rotary(query, rotary), apply_rotary(key, rotary)
        scores = self.scores(context, sink=self.softmax_offset, device=query.device)
        options = {} if scores is None else {"scores": scores}
        mask = context.mask_of(has_window=self.has_window)
        attended = self.core_attention(query, key=key, value=value, mask=mask, **options)
        return self.dropout(self.output(attended.flatten(2)), context.dropout)


def _rows(shape: ModelShape, num_heads: int, *, tensor_parallel: TensorParallel) -> slice:
    """The outputs of a query, key or value projection that this tp rank computes: its heads, at least one."""
    group = tensor_parallel.group
    first = group.index * num_heads // group.size
    return slice(first * shape.head_dim, (first + max(1, num_heads // group.size)) * shape.head_dim)
