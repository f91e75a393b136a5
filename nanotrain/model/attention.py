"""Causal attention with grouped key/value heads.

HeadAttention     options, gate and cache of attention
Attention     project, normalize, rotate, attend, gate, project
LayerScores   softcap, sink and dropout of the scores of a layer, per microbatch
MaxLogits     the largest logit of every head, counted on the device in forward passes
              (train/parts/qk_clip.py)

B batch   S sequence   H hidden   N query heads   G key/value heads (N is a multiple of G)
D head dim of queries and keys   Dv head dim of values
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.attention.call import largest_logits
from nanotrain.attention.chunk_kernels import AttentionChunk, WeightDropout
from nanotrain.attention.chunks import ScoreOptions
from nanotrain.config.model import ModelConfig
from nanotrain.config.mup import score_scale
from nanotrain.memory.recompute import Recompute
from nanotrain.model.context import (
    AttentionInputs,
    DropoutPlace,
    HiddenDropout,
    LayerContext,
    ModelParallel,
    TokenCache,
    head_channels,
    local_heads,
    split_heads,
)
from nanotrain.model.norm import RMSNorm, build_head_norm
from nanotrain.model.parameters import Parameters
from nanotrain.model.rope import Rotary, apply_rotary, scale_query
from nanotrain.model.router_stats import StatefulModule
from nanotrain.parallel.tp.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parallel,
)
from nanotrain.spec.shape import ModelShape

# functions of the gates of outputs, in fp32 of bf16 inside of torch
GATE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
}


class HeadAttention(nn.Module):
    """Base of attention with its own keys and values, and of attention to an earlier layer's."""

    query_norm: nn.Module
    output: nn.Module
    softmax_offset: nn.Parameter | None

    def _set_options(
        self, model_config: ModelConfig, shape: ModelShape, *, parallel: ModelParallel, layer: int
    ) -> None:
        """Set the sizes and functions that have no parameters.

        Args:
            model_config: configuration of the model.
            shape: shape of the layer.
            parallel: groups of the layer.
            layer: index in the model.
        """
        self.head_dim = shape.head_dim
        self.value_head_dim = shape.value_head_dim
        self.gate_channels = shape.gate_channels
        self.gate_activation = GATE_ACTIVATIONS[shape.attention_output_gate_activation]
        self.has_window = shape.has_window(layer)
        self.has_rope = shape.has_rope(layer)
        self.kept_sources = shape.kept(layer)
        self.norm_is_last = model_config.qk_layernorm_after_rope
        self.factor = model_config.attention_output_multiplier
        # the core attention divides scores by the root of the head dim
        scale = score_scale(model_config)
        self.query_factor = 1.0 if scale is None else scale * math.sqrt(shape.head_dim)
        self.scores = LayerScores(model_config, shape, layer=layer, parallel=parallel)
        self.max_logits = self.scores.max_logits
        self.core_attention: Callable[..., Tensor] = parallel.core_attention
        self.dropout = HiddenDropout(
            model_config.hidden_dropout, layer, DropoutPlace.attention, parallel.tp
        )

    def attend(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        gate: Tensor | None,
        context: LayerContext,
        core: Callable[..., Any] | None = None,
    ) -> Tensor:
        """Core attention, gate, output projection and dropout.

        Args:
            query: [B, S, N, D].
            key: [B, S, G, D].
            value: [B, S, G, Dv].
            gate: [B, S, N, Dv] or, one per head, [B, S, N, 1]; None without one.
            context: context of the microbatch.
            core: core attention of the microbatch; None for the layer's own.
        """
        core = core or self.core_attention
        mask = self.inputs(context).mask
        scores = self.scores(context, sink=self.softmax_offset, device=query.device)
        attended = core(query, key=key, value=value, mask=mask, scores=scores)
        attended = self.apply_gate(attended, gate)
        out = self.output(attended)
        return self.dropout(out, context.dropout)

    def inputs(self, context: LayerContext) -> AttentionInputs:
        """Rotary tables and mask of the layer."""
        return context.windowed if self.has_window else context.full

    def prepare_query(
        self, query: Tensor, *, rotary: Rotary | None, query_scale: Tensor | None
    ) -> Tensor:
        """Normalize, rotate and scale queries [B, S, N, D].

        Args:
            query: queries as projected.
            rotary: rotary tables, which layers without rotary positions do not read.
            query_scale: factors of the queries in layers without rotary positions.
        """
        query = self.normalize(query, self.query_norm, rotary=rotary)
        if self.has_rope:
            query_scale = None if rotary is None else rotary.query_scale
        query = scale_query(query, query_scale)
        if self.query_factor != 1.0:
            query = query * self.query_factor
        return query

    def normalize(self, heads: Tensor, norm: nn.Module, *, rotary: Rotary | None) -> Tensor:
        """Normalize and rotate queries or keys, in the order of the model."""
        if not self.has_rope:
            rotary = None
        if self.norm_is_last:
            rotated = apply_rotary(heads, rotary)
            out: Tensor = norm(rotated)
            return out
        return apply_rotary(norm(heads), rotary)

    def apply_gate(self, attended: Tensor, gate: Tensor | None) -> Tensor:
        """[B, S, N, Dv] times the activation of a gate and a factor -> [B, S, N Dv]."""
        if gate is not None:
            attended = attended * self.gate_activation(gate)
        if self.factor != 1.0:
            attended = attended * self.factor
        return attended.flatten(2)

    def cached_function(self, cache: TokenCache) -> Callable[..., Any]:
        """The core attention to all tokens so far."""
        return cache.attend(
            self.core_attention, has_window=self.has_window, keeps=self.kept_sources
        )

    def swap_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Use another core attention; returns the one used until now."""
        before = self.core_attention
        self.core_attention = function
        return before


class Attention(HeadAttention):
    """Causal multi-head attention with grouped key/value heads (Ainslie et al. 2023).

    The number of heads follows from the shapes of the projections, so the same code runs with all
    heads and with the shard of a tp rank.

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
        shape = ModelShape.of(model_config).for_layer(layer)
        self._set_options(model_config, shape, parallel=parallel, layer=layer)
        tp = parallel.tp.group
        self.softmax_offset = params.get("softmax_offset")
        query_heads = local_heads(shape.num_heads, tp)
        key_heads = local_heads(shape.query_groups, tp)
        query_channels = head_channels(query_heads, shape.head_dim)
        key_channels = head_channels(key_heads, shape.head_dim)
        key_rows: slice | None = None
        value_rows: slice | None = None
        if shape.replicates_kv_heads(tp.size):
            key_rows = key_channels
            value_rows = head_channels(key_heads, shape.value_head_dim)
        column = partial(ColumnParallelLinear, tensor_parallel=parallel.tp)
        self.query = column(*params.linear("query"))
        self.key = column(*params.linear("key"), rows=key_rows)
        self.value: ColumnParallelLinear | None = None
        if not shape.attention_k_eq_v:
            self.value = column(*params.linear("value"), rows=value_rows)
        self.gate = column(*params.linear("gate")) if shape.has_output_gate else None
        head_norm = partial(build_head_norm, model_config, group=tp, is_l2=shape.qk_l2_norm)
        self.query_norm = head_norm(params.submodule("query_norm"), channels=query_channels)
        self.key_norm = head_norm(params.submodule("key_norm"), channels=key_channels)
        self.value_norm: nn.Module = nn.Identity()
        if shape.value_l2_norm:
            self.value_norm = RMSNorm(None, eps=model_config.norm_epsilon)
        self.output = RowParallelLinear(*params.linear("output"), tensor_parallel=parallel.tp)

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        rotary = self.inputs(context).rotary
        query, key, value, gate = self._project(hidden)
        query, key = self.prepare_query_key(
            query, key, rotary=rotary, query_scale=context.query_scale
        )
        for source in self.kept_sources:
            context.keep(source, key, value)
        return self.attend(query, key=key, value=value, gate=gate, context=context)

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Query [B, S, N, D], key [B, S, G, D], value [B, S, G, Dv]; gate as in `attend`."""
        layers = [self.query, self.key]
        layers += [layer for layer in (self.value, self.gate) if layer is not None]
        query, key, *others = column_parallel(hidden, layers)
        value = key if self.value is None else others.pop(0)
        gate = split_heads(others[0], self.gate_channels) if others else None
        query = split_heads(query, self.head_dim)
        key = split_heads(key, self.head_dim)
        value = self.value_norm(split_heads(value, self.value_head_dim))
        return query, key, value, gate

    def prepare_query_key(
        self, query: Tensor, key: Tensor, *, rotary: Rotary | None, query_scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Queries as `prepare_query`, and keys [B, S, G, D] normalized and rotated."""
        query = self.prepare_query(query, rotary=rotary, query_scale=query_scale)
        key = self.normalize(key, self.key_norm, rotary=rotary)
        return query, key


class LayerScores:
    """The options of the scores of one layer.

    Args:
        model_config: type of the softmax, softcap of the scores, rate of dropout.
        shape: shape of the layer.
        layer: index in the model.
        parallel: tp shards the heads.

    Attributes:
        max_logits: counts the logits in training; None where they are not tracked.
    """

    def __init__(
        self, model_config: ModelConfig, shape: ModelShape, *, layer: int, parallel: ModelParallel
    ) -> None:
        tp = parallel.tp.group
        self.layer = layer
        self.softcap = model_config.attn_logit_softcapping
        self.rate = model_config.attention_dropout
        self.has_zero_sink = model_config.softmax_type == "off-by-one"
        self.num_heads = shape.num_heads // tp.size
        self.first_head = tp.index * self.num_heads
        self.max_logits: MaxLogits | None = None
        if parallel.tracks_logits:
            self.max_logits = MaxLogits(self.num_heads, parallel.recompute)

    def __call__(
        self, context: LayerContext, *, sink: Tensor | None, device: torch.device
    ) -> ScoreOptions | None:
        """The options for a microbatch; None for a plain softmax.

        Args:
            context: context of the microbatch.
            sink: [heads of this rank], a learned sink; None without one.
            device: device of the scores.
        """
        if self.has_zero_sink:
            sink = torch.zeros(self.num_heads, device=device)
        dropout = None
        if context.dropout is not None and self.rate > 0:
            words = context.dropout.words_of(self.layer, DropoutPlace.weights)
            dropout = WeightDropout(words, self.rate, self.first_head)
        observe = None
        if self.max_logits is not None and torch.is_grad_enabled():
            observe = self.max_logits.observe
        if sink is None and self.softcap is None and dropout is None and observe is None:
            return None
        return ScoreOptions(sink, self.softcap, dropout, observe)


class MaxLogits(StatefulModule):
    """The largest attention logit of each query head of this rank since the last collection.

    Args:
        num_heads: query heads of this rank.
        recompute: recomputation of the stage; a recomputed forward counts nothing.

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
