"""Multi-head latent attention (MLA): queries, keys and values from compressed vectors.

    hidden --+-- query_down -- query_latent_norm -- query_up --> query   Dn + R channels per head
             +-- kv_down --+-- kv_latent_norm -- kv_up --------> key     Dn channels per head
                           |                                 --> value   Dv channels per head
                           +-- rotary -------------------------> key     R channels for all heads

Without q_lora_rank the query is a projection of the hidden states.

All heads share the compressed vectors: every tp rank has the down-projections and their norms,
outside the tensor-parallel region; query_up, kv_up and output are sharded by heads. Only compressed
vectors are communicated.

DeepSeek-V2 (2024), section 2.1. Rotary channel i is paired with i + R/2 (rope.py). DeepSeek's files
pair neighbours; permuting the rows of query_up and kv_down that produce rotary channels converts
one into the other. With `scale_lora` the outputs of both norms have the variance of hidden states
(LongCat-Flash, section 2.3).

    B batch   S sequence   H hidden   N heads   C width of the compressed keys and values
    Dn channels without position   R rotary channels   Dv channels of a value
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanotrain.config.model import ModelConfig
from nanotrain.model.attention import GATE_ACTIVATIONS, LayerScores
from nanotrain.model.context import (
    DropoutPlace,
    HiddenDropout,
    LayerContext,
    ModelParallel,
    TokenCache,
    split_heads,
)
from nanotrain.model.norm import build_norm, build_scale
from nanotrain.model.parameters import Parameters
from nanotrain.model.rope import Rotary, apply_rotary, scale_query
from nanotrain.parallel.tp.layers import ColumnParallelLinear, RowParallelLinear, column_parallel
from nanotrain.spec.shape import ModelShape


class MultiLatentAttention(nn.Module):
    """Causal attention with compressed queries, keys and values; the same interface as `Attention`.

    Args:
        model_config: configuration of the model.
        params: query or query_down, query_latent_norm, query_up; kv_down, kv_latent_norm, kv_up,
            output; gate where declared.
        parallel: tp shards the heads, the core attention's cp group the sequence.
        layer: index in the model.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__()
        shape = ModelShape.of(model_config)
        mla = shape.mla
        assert mla is not None, "a model without latent attention has the class Attention"
        self.has_window = shape.has_window(layer)
        self.tensor_parallel = parallel.tp
        self.query_sizes = (mla.qk_head_dim, mla.qk_pos_emb_head_dim)
        self.key_value_sizes = (mla.qk_head_dim, shape.value_head_dim)
        self.compressed_sizes = (mla.kv_lora_rank, mla.qk_pos_emb_head_dim)
        self.scores = LayerScores(model_config, shape, layer=layer, parallel=parallel)
        self.max_logits = self.scores.max_logits
        self.core_attention: Callable[..., Any] = parallel.core_attention

        sharded = partial(ColumnParallelLinear, tensor_parallel=parallel.tp)
        replicated = partial(ColumnParallelLinear, tensor_parallel=parallel.tp.unsharded)
        epsilon = mla.compressed_norm_epsilon or model_config.norm_epsilon
        latent_norm = partial(build_norm, replace(model_config, norm_epsilon=epsilon))
        self.query: ColumnParallelLinear | None = None
        if mla.q_lora_rank is None:
            self.query = sharded(*params.linear("query"))
        else:
            self.query_down = replicated(*params.linear("query_down"))
            self.query_latent_norm = latent_norm(params.submodule("query_latent_norm"))
            self.query_up = sharded(*params.linear("query_up"))
        self.kv_down = replicated(*params.linear("kv_down"))
        self.kv_latent_norm = latent_norm(params.submodule("kv_latent_norm"))
        self.kv_up = sharded(*params.linear("kv_up"))
        self.gate = sharded(*params.linear("gate")) if shape.has_output_gate else None
        self.gate_channels = shape.gate_channels
        self.gate_activation = GATE_ACTIVATIONS[shape.attention_output_gate_activation]
        self.output = RowParallelLinear(*params.linear("output"), tensor_parallel=parallel.tp)
        self.dropout = HiddenDropout(
            model_config.hidden_dropout, layer, DropoutPlace.attention, parallel.tp
        )
        query_scale, key_value_scale = mla.lora_scales(shape.hidden_size)
        # the core attention divides scores by the root of the head dim; YaRN has a further factor
        mscale = 1.0 if model_config.yarn is None else model_config.yarn.softmax_mscale
        self.query_scale = build_scale(query_scale * mscale)
        self.key_value_scale = build_scale(key_value_scale)

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        inputs = context.windowed if self.has_window else context.full
        query, compressed = self._compress(hidden)
        compressed_kv, shared_key = compressed.split(self.compressed_sizes, dim=-1)
        if self.query is None:
            query = self.query_latent_norm(query)
        attend = self.attend(hidden, query, context=context)
        scores = self.scores(context, sink=None, device=query.device)
        compressed_kv = self.key_value_scale(self.kv_latent_norm(compressed_kv))
        query, key, value = self.up_project(
            query, compressed_kv, shared_key=shared_key, rotary=inputs.rotary
        )
        attended = attend(query, key=key, value=value, mask=inputs.mask, scores=scores)
        gate = None if self.gate is None else self.gate(hidden)
        out = self.output(self.apply_gate(attended, gate))
        return self.dropout(out, context.dropout)

    def apply_gate(self, attended: Tensor, gate: Tensor | None) -> Tensor:
        """[B, S, N/tp, Dv], times the activation of a gate if there is one -> [B, S, N/tp Dv]."""
        if gate is not None:
            attended = attended * self.gate_activation(split_heads(gate, self.gate_channels))
        return attended.flatten(2)

    def attend(
        self, hidden: Tensor, compressed_query: Tensor, *, context: LayerContext
    ) -> Callable[..., Tensor]:
        """The core attention of a microbatch; subclasses may read the inputs of the layer."""
        return self.core_attention

    def cached_function(self, cache: TokenCache) -> Callable[..., Any]:
        """The core attention to all tokens so far."""
        return cache.attend(self.core_attention, has_window=self.has_window)

    def swap_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Use another core attention; returns the one used until now."""
        before = self.core_attention
        self.core_attention = function
        return before

    def _compress(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S or S/tp, q_lora_rank] and [.., C + R], outside the tensor-parallel region.

        Without q_lora_rank the first is the query [B, S, N/tp * (Dn + R)], inside the region.
        """
        if self.query is not None:
            return self.query(hidden), self.kv_down(hidden)
        compressed_query, compressed = column_parallel(hidden, (self.query_down, self.kv_down))
        return compressed_query, compressed

    def up_project(
        self, query: Tensor, compressed_kv: Tensor, *, shared_key: Tensor, rotary: Rotary | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [B, S, N/tp, ...] from the normalized results of `_compress`."""
        query = self.up_project_query(query, rotary)
        key_value = self.kv_up(compressed_kv)
        key_value = split_heads(key_value, sum(self.key_value_sizes))
        key_nope, value = key_value.split(self.key_value_sizes, dim=-1)
        key_rope = self.share_key(shared_key, rotary, num_heads=key_nope.shape[2])
        key = torch.cat((key_nope, key_rope), dim=-1)
        return query, key, value

    def share_key(self, shared_key: Tensor, rotary: Rotary | None, *, num_heads: int) -> Tensor:
        """The rotary key of all heads: [B, S or S/tp, R] -> [B, S, N/tp, R], rotated."""
        shared_key = self.tensor_parallel.enter(shared_key)
        key_rope = apply_rotary(shared_key[:, :, None], rotary)
        return key_rope.expand(-1, -1, num_heads, -1)

    def up_project_query(self, query: Tensor, rotary: Rotary | None) -> Tensor:
        """Query [B, S, N/tp, Dn + R] from the first result of `_compress`."""
        if self.query is None:
            query = self.query_up(query)
        query = split_heads(query, sum(self.query_sizes))
        query = self.query_scale(query)
        query_nope, query_rope = query.split(self.query_sizes, dim=-1)
        query_rope = apply_rotary(query_rope, rotary)
        query = torch.cat((query_nope, query_rope), dim=-1)
        if rotary is not None:
            query = scale_query(query, rotary.query_scale)
        return query
