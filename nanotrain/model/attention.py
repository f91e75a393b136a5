"""Causal attention with grouped key/value heads.

Attention     project, norm, rotate, attend, gate, project
LayerScores   softcap, sink and dropout of the scores of a layer, per microbatch
MaxLogits     the largest logits of every head, counted on the device during forward passes (train/parts/qk_clip.py)

B batch   S sequence   H hidden   N query heads   G key/value heads (N is a multiple of G)   D width of a head
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from nanotrain.attention.call import largest_logits
from nanotrain.attention.chunks import AttentionChunk, ScoreOptions, WeightDropout
from nanotrain.config.model import ModelConfig
from nanotrain.memory.recompute import Recompute
from nanotrain.model.context import (
    DropoutPlace,
    HiddenDropout,
    LayerContext,
    ModelParallel,
    TokenCache,
)
from nanotrain.model.norm import build_head_norm
from nanotrain.model.parameters import Parameters
from nanotrain.model.rope import Rotary, apply_rotary, scale_query
from nanotrain.model.router_stats import StatefulModule
from nanotrain.parallel.tp.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    column_parallel,
)
from nanotrain.spec.shape import ModelShape


class Attention(nn.Module):
    """Causal multi-head attention with grouped key/value heads (Ainslie et al. 2023).

    The number of heads follows from the shapes of the projections, so a rank with a shard of the
    heads runs this code.

    Args:
        model_config: configuration of the model.
        params: query, key, value, output; gate, query_norm, key_norm and softmax_offset where
            declared.
        parallel: tp shards the heads, the core attention's cp group the sequence.
        layer: index in the model.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__()
        shape = ModelShape.of(model_config).of_layer(layer)
        self.softmax_offset = params.get("softmax_offset")
        self.scores = LayerScores(model_config, layer=layer, parallel=parallel)
        self.max_logits = self.scores.max_logits
        # as projected
        self.head_dims = (
            shape.head_dim,
            shape.head_dim,
            shape.value_head_dim,
            shape.value_head_dim,
        )
        self.has_window = shape.has_window(layer)
        # in the order of `layer_tables`
        self.rotary_index = int(self.has_window) if shape.has_rope(layer) else 2
        self.factor = model_config.attention_output_multiplier
        self.core_attention = parallel.core_attention
        query_rows = _rows(shape, shape.num_heads, tensor_parallel=parallel.tp)
        key_rows = _rows(shape, shape.query_groups, tensor_parallel=parallel.tp)
        value_rows = slice(
            *(
                row // shape.head_dim * shape.value_head_dim
                for row in (key_rows.start, key_rows.stop)
            )
        )
        column = partial(ColumnParallelLinear, tensor_parallel=parallel.tp)
        is_replicated = shape.replicates_kv_heads(parallel.tp.group.size)
        self.query = column(*params.linear("query"))
        self.key = column(*params.linear("key"), rows=key_rows if is_replicated else None)
        self.value = column(*params.linear("value"), rows=value_rows if is_replicated else None)
        self.gate = column(*params.linear("gate")) if shape.has_output_gate else None
        self.projections = (self.query, self.key, self.value) + (
            () if self.gate is None else (self.gate,)
        )
        head_norm = partial(
            build_head_norm, model_config, group=parallel.tp.group, is_l2=shape.qk_l2_norm
        )
        self.query_norm = head_norm(params.submodule("query_norm"), heads=query_rows)
        self.key_norm = head_norm(params.submodule("key_norm"), heads=key_rows)
        self.norm_is_last = model_config.qk_layernorm_after_rope
        # the core attention divides scores by the root of the head's width
        scale = model_config.softmax_scale
        self.query_factor = 1.0 if scale is None else scale * math.sqrt(shape.head_dim)
        self.output = RowParallelLinear(*params.linear("output"), tensor_parallel=parallel.tp)
        self.dropout = HiddenDropout(
            model_config.hidden_dropout, layer, DropoutPlace.attention, parallel.tp
        )

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        projected = column_parallel(hidden, self.projections)
        # [B, S, N or G, D or Dv]
        query, key, value, *gates = (
            x.unflatten(-1, (-1, d)) for x, d in zip(projected, self.head_dims, strict=False)
        )
        query, key = self._position(query, key, rotary=context.rotary[self.rotary_index])
        if self.query_factor != 1.0:
            query = query * self.query_factor
        scores = self.scores(context, sink=self.softmax_offset, device=query.device)
        mask = context.masks[int(self.has_window)]  # torch 2.11 does not trace a bool as an index
        attended = self.core_attention(query, key=key, value=value, mask=mask, scores=scores)
        for gate in gates:  # one or none
            attended = attended * gate.sigmoid()
        if self.factor != 1.0:
            attended = attended * self.factor
        return self.dropout(self.output(attended.flatten(2)), context.dropout)

    def _position(
        self, query: Tensor, key: Tensor, *, rotary: Rotary | None
    ) -> tuple[Tensor, Tensor]:
        """Normalize and rotate queries and keys, in the order of the model."""
        if not self.norm_is_last:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = apply_rotary(query, rotary), apply_rotary(key, rotary)
        if self.norm_is_last:
            query, key = self.query_norm(query), self.key_norm(key)
        return scale_query(query, rotary), key

    def cached(self, cache: TokenCache) -> dict[str, Callable[..., Tensor]]:
        """In generation the core attention attends to all keys so far."""
        return {"core_attention": cache.attend(self.core_attention, has_window=self.has_window)}


def _rows(shape: ModelShape, num_heads: int, *, tensor_parallel: TensorParallel) -> slice:
    """The outputs of a query, key or value projection that this tp rank computes: its heads, at
    least one.
    """
    group = tensor_parallel.group
    first = group.index * num_heads // group.size
    return slice(first * shape.head_dim, (first + max(1, num_heads // group.size)) * shape.head_dim)


class LayerScores:
    """The options of the scores of one layer.

    Args:
        model_config: type of the softmax, softcap of the scores, rate of dropout.
        layer: index in the model.
        parallel: tp shards the heads.

    Attributes: max_logits: counts the logits in training, not in evaluation; None where they are
        not tracked.
    """

    def __init__(self, model_config: ModelConfig, *, layer: int, parallel: ModelParallel) -> None:
        self.softcap, self.rate = (
            model_config.attn_logit_softcapping,
            model_config.attention_dropout,
        )
        self.has_zero_sink = model_config.softmax_type == "off-by-one"
        tp, num_heads = (
            parallel.tp.group,
            ModelShape.of(model_config).num_heads // parallel.tp.group.size,
        )
        self.layer, self.num_heads, self.first_head = layer, num_heads, tp.index * num_heads
        self.max_logits = (
            MaxLogits(num_heads, parallel.recompute) if parallel.tracks_logits else None
        )

    def __call__(
        self, context: LayerContext, *, sink: Tensor | None, device: torch.device
    ) -> ScoreOptions | None:
        """The options for a microbatch; None for a plain softmax.

        Args:
            context: context of the microbatch.
            sink: [heads of this rank] where it is learned, else None.
            device: device of the scores.
        """
        if self.has_zero_sink:
            sink = torch.zeros(self.num_heads, device=device)
        dropout = None
        if context.dropout is not None and self.rate > 0:
            words = context.dropout.words_of(self.layer, DropoutPlace.weights)
            dropout = WeightDropout(words, self.rate, self.first_head)
        observe = (
            self.max_logits.observe
            if self.max_logits is not None and torch.is_grad_enabled()
            else None
        )
        is_plain = sink is None and self.softcap is None and dropout is None and observe is None
        return None if is_plain else ScoreOptions(sink, self.softcap, dropout, observe)


class MaxLogits(StatefulModule):
    """The largest attention logit of each query head of this rank since the last collection.

    Args:
        num_heads: query heads of this rank.
        recompute: a layer that is recomputed is counted once.

    Attributes:
        largest: [N / tp] fp32, minus infinity before the first microbatch.
        peak: fp32 scalar, the largest of all heads since it was last logged.
    """

    largest: Tensor
    peak: Tensor

    def __init__(self, num_heads: int, recompute: Recompute) -> None:
        super().__init__()
        self.recompute = recompute
        self.register_buffer("largest", torch.full((num_heads,), -torch.inf), persistent=False)
        self.register_buffer("peak", torch.tensor(-torch.inf), persistent=False)

    def observe(self, chunk: AttentionChunk, *, first_head: int = 0) -> None:
        """Count the logits of a chunk; the `observe` of `ScoreOptions`."""
        if self.recompute.is_recomputing:
            return
        heads = self.largest[first_head : first_head + chunk.query.shape[1]]
        logits = largest_logits(chunk)
        torch.maximum(heads, logits, out=heads)
        torch.maximum(self.peak, logits.amax(), out=self.peak)
