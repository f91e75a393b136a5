"""Attention to a window and to compressed keys (DeepSeek-V4, section 2.3).

    hidden --+-- query_down -- query_latent_norm -- query_up -- norm -- rotary --> query  D per head
             +-- key -- key_norm -- rotary ----------------------------------> key  D for all heads
             +-- compressor: value, gate -- sums of windows -- norm -- rotary --> compressed keys

    query, key, compressed keys -- attention (attention/compressed.py) -- rotary back --+
                                        out <-- output -- output_down by group <--------+

Every key is its value too, so outputs have the rotary positions of their keys: they are rotated
back by the position of the query. The rotary channels are the last of a head, and neighbours are a
pair.

    WindowAttention        the window alone
    HeavilyCompressed      also all compressed keys, each of many tokens
    CompressedSparse       also compressed keys of few tokens, those that an indexer selects

Over cp every rank computes the compressed keys of its own tokens (parallel/cp/key_windows.py).
tp shards queries and outputs by groups of heads; every rank computes all keys, compressed keys and
the whole index, whose loss alone trains the indexer, as in dsa.py.

    B batch   S sequence   H hidden   N heads   D head dim   T compressed keys   G groups of heads
    I index heads   E width of an index head   R rotary channels
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanotrain.attention.call import AttentionCall
from nanotrain.attention.chunks import ScoreOptions
from nanotrain.attention.compressed import (
    CompressedKeys,
    attend_compressed,
)
from nanotrain.comm.autograd import eager
from nanotrain.config.model import ModelConfig
from nanotrain.model.attention import LayerScores
from nanotrain.model.compressor import (
    CompressedIndexer,
    Compressor,
    ProjectedTokens,
    read_new_tokens,
    rotary_tables,
    rotate_last,
    windows_of,
)
from nanotrain.model.context import (
    AttentionInputs,
    DropoutPlace,
    HiddenDropout,
    LayerContext,
    ModelParallel,
    TokenCache,
    split_heads,
)
from nanotrain.model.dsa import (
    ALL_KEYS,
    IndexerDivergence,
    cached_inputs,
    trains_indexer_alone,
)
from nanotrain.model.norm import RMSNorm, build_norm
from nanotrain.model.parameters import Parameters
from nanotrain.model.rope import Rotary
from nanotrain.parallel.cp.key_windows import with_tokens_before
from nanotrain.parallel.cp.selected import plan_calls
from nanotrain.parallel.tp.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parallel,
)
from nanotrain.spec.kinds.compressed import ratio_of
from nanotrain.spec.shape import ModelShape


class WindowAttention(nn.Module):
    """Attention to the keys of a window; the same interface as `Attention`.

    Args:
        model_config: configuration of the model.
        params: query_down, query_latent_norm, query_up, key, key_norm, output_down, output;
            softmax_offset where declared.
        parallel: tp shards the heads.
        layer: index in the model.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__()
        shape = ModelShape.of(model_config)
        assert shape.compressed is not None, "sparse_attention_type is compressed"
        self.shape = shape
        self.head_dim = shape.head_dim
        self.has_window = shape.has_window(layer)
        self.ratio = ratio_of(shape, layer)
        self.tensor_parallel = parallel.tp
        self.cp = parallel.cp
        self.num_groups = shape.compressed.output_groups // parallel.tp.group.size
        self.softmax_offset = params.get("softmax_offset")
        sharded = partial(ColumnParallelLinear, tensor_parallel=parallel.tp)
        replicated = partial(ColumnParallelLinear, tensor_parallel=parallel.tp.unsharded)
        self.query_down = replicated(*params.linear("query_down"))
        self.query_latent_norm = build_norm(model_config, params.submodule("query_latent_norm"))
        self.query_up = sharded(*params.linear("query_up"))
        self.query_norm = RMSNorm(None, eps=model_config.norm_epsilon)
        self.key = replicated(*params.linear("key"))
        self.key_norm = build_norm(model_config, params.submodule("key_norm"))
        self.output_down = GroupedLinear(params.submodule("output_down"), groups=self.num_groups)
        self.output = RowParallelLinear(*params.linear("output"), tensor_parallel=parallel.tp)
        self.scores = LayerScores(model_config, shape, layer=layer, parallel=parallel)
        self.max_logits = self.scores.max_logits
        assert model_config.window_size is not None, "a rule demands it"
        self.read_tokens: Callable[..., ProjectedTokens] = read_new_tokens
        self.window = model_config.window_size
        self.core_attention: Callable[..., Any] = CompressedAttention(self.window)
        self.dropout = HiddenDropout(
            model_config.hidden_dropout, layer, DropoutPlace.attention, parallel.tp
        )

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        inputs = context.windowed if self.has_window else context.full
        rotary = inputs.rotary
        assert rotary is not None, "a rule demands rotary positions"
        query, key = column_parallel(hidden, (self.query_down, self.key))
        query = self.query_latent_norm(query)
        compressed = self.compress(hidden, query, inputs=inputs, context=context)
        query = split_heads(self.query_up(query), self.head_dim)
        query = rotate_last(self.query_norm(query), rotary)
        key = self.tensor_parallel.enter(self.key_norm(key))
        key = rotate_last(key[:, :, None], rotary)
        if self.cp.size > 1:
            key = with_tokens_before(key[:, :, 0], self.cp, count=self.window)[:, :, None]
        scores = self.scores(context, sink=self.softmax_offset, device=query.device)
        attended = self.core_attention(
            query, key=key, value=key, mask=inputs.mask, scores=scores, compressed=compressed
        )
        attended = rotate_last(attended, rotary, back=True)
        out = self.output(self.output_down(attended.flatten(2)))
        return self.dropout(out, context.dropout)

    def compress(
        self, hidden: Tensor, query: Tensor, *, inputs: AttentionInputs, context: LayerContext
    ) -> CompressedKeys | None:
        """The compressed keys of a microbatch.

        Args:
            hidden: [B, S or S/tp, H].
            query: [B, S or S/tp, q_lora_rank], the compressed queries.
            inputs: rotary tables and mask of the layer.
            context: context of the microbatch.
        """
        return None

    def cached_function(self, cache: TokenCache) -> Callable[..., Any]:
        """The core attention to all tokens so far."""
        return _CachedAttention(self.core_attention, cache, has_window=self.has_window)

    def swap_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Use another core attention; returns the one used until now."""
        before = self.core_attention
        self.core_attention = function
        self.read_tokens = read_new_tokens
        if isinstance(function, _CachedAttention):
            self.read_tokens = function.read_tokens
        return before


class HeavilyCompressed(WindowAttention):
    """Attention to a window and to all compressed keys before it.

    Args:
        model_config: configuration of the model.
        params: parameters of `WindowAttention`, and compressor.
        parallel: tp shards the heads.
        layer: index in the model.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__(model_config, params, parallel=parallel, layer=layer)
        compressor = params.submodule("compressor")
        self.compressor = Compressor(
            model_config, compressor, parallel=parallel, width=self.head_dim
        )

    def compress(
        self, hidden: Tensor, query: Tensor, *, inputs: AttentionInputs, context: LayerContext
    ) -> CompressedKeys | None:
        """The compressed keys of a microbatch; None where sequences have no window of tokens."""
        value, gate = self._project(hidden, self.compressor)
        tokens = self.read_tokens(value, gate, inputs=inputs, name="compressor")
        windows = windows_of(tokens.inputs.mask, tokens.value, size=self.ratio)
        if windows.number == 0:
            return None
        return CompressedKeys(self.compressor(tokens, windows), windows)

    def _project(self, hidden: Tensor, compressor: Compressor) -> tuple[Tensor, Tensor]:
        """Values and gates of all tokens; their gradients are summed over tp."""
        tp = self.tensor_parallel
        value, gate = column_parallel(hidden, (compressor.value, compressor.gate))
        if tp.group.size == 1:
            return value, gate
        joined = tp.enter(torch.cat((value, gate), dim=-1))
        value, gate = joined.chunk(2, dim=-1)
        return value, gate


class CompressedSparse(HeavilyCompressed):
    """Attention to a window and to the compressed keys that an indexer selects.

    Args:
        model_config: configuration of the model.
        params: parameters of `HeavilyCompressed`, and indexer.
        parallel: tp shards the heads.
        layer: index in the model.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__(model_config, params, parallel=parallel, layer=layer)
        assert model_config.dsa is not None, "sparse_attention_type is compressed"
        self.dsa = model_config.dsa
        indexer = params.submodule("indexer")
        self.indexer = CompressedIndexer(model_config, indexer, parallel=parallel)
        self.divergence = IndexerDivergence(self.dsa, parallel)
        self.is_warming_up = trains_indexer_alone(params)

    def compress(
        self, hidden: Tensor, query: Tensor, *, inputs: AttentionInputs, context: LayerContext
    ) -> CompressedKeys | None:
        """Compressed keys of a microbatch, and their index; of all while it alone is trained."""
        compressed = super().compress(hidden, query, inputs=inputs, context=context)
        index_query, weight, value, gate = self.indexer.project(hidden, query)
        tokens = self.read_tokens(value, gate, inputs=inputs, name="indexer")
        if compressed is None:
            return None
        key = self.indexer(tokens, compressed.windows)
        index = self.indexer.index(index_query, key=key, weight=weight, rotary=inputs.rotary)
        if self.is_warming_up and torch.is_grad_enabled():
            index = replace(index, topk=ALL_KEYS)
        loss = self.divergence.of(context, index.query.shape[1])
        return replace(compressed, index=replace(index, loss=loss))


class GroupedLinear(nn.Module):
    """A linear layer per group of channels.

    Args:
        params: weight [groups of this rank x outputs, channels of a group].
        groups: groups of this rank.
    """

    def __init__(self, params: Parameters, *, groups: int) -> None:
        super().__init__()
        self.weight = params["weight"]
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, groups x channels] -> [B, S, groups x outputs]."""
        weights = self.weight.unflatten(0, (self.groups, -1))
        rows = x.flatten(0, 1).unflatten(-1, (self.groups, -1))
        out = rows.transpose(0, 1) @ weights.mT
        return out.transpose(0, 1).flatten(1).unflatten(0, x.shape[:2])


class CompressedAttention:
    """Attention of queries to the keys of a window and to compressed keys.

    Args:
        window: earlier keys that a query attends to.
    """

    def __init__(self, window: int) -> None:
        self.window = window

    @eager  # the loss of the index is counted, and the plan is made on the host
    def __call__(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        mask: AttentionCall | tuple[AttentionCall, ...] | None,
        scores: ScoreOptions | None,
        compressed: CompressedKeys | None,
    ) -> Tensor:
        """[B, S / cp, N, D] -> the same shape.

        Args:
            query: queries.
            key: [B, S, 1, D], or over cp [2 B, K, 1, D]: the chunks after the keys before them.
            value: the same as `key`.
            mask: the plan of all-gather attention, or of one rank.
            scores: as of `CoreAttention`.
            compressed: compressed keys; None for none.
        """
        calls = plan_calls(mask, query)
        number = len(calls)
        queries = query.chunk(number, dim=1)
        keys = key[:, :, 0].unflatten(0, (-1, number))
        outputs = []
        for i, call in enumerate(calls):
            out = attend_compressed(
                queries[i],
                key=keys[:, i],
                compressed=_for_call(compressed, i, num_calls=number),
                call=call,
                window=self.window,
                scores=scores,
            )
            outputs.append(out)
        return outputs[0] if number == 1 else torch.cat(outputs, dim=1)


def _for_call(
    compressed: CompressedKeys | None, number: int, *, num_calls: int
) -> CompressedKeys | None:
    """The compressed keys of one of several calls, each with an equal part of the queries."""
    if compressed is None or compressed.index is None:
        return compressed
    num_keys = compressed.keys.shape[1]
    index = compressed.index.for_call(number, num_calls=num_calls, num_keys=num_keys)
    return replace(compressed, index=index)


class _CachedAttention:
    """The core attention of one layer to all tokens so far.

    A cache stores the keys of all tokens, and their values, gates and rotary tables, of which the
    compressed keys are computed again for every new token.

    Args:
        core: core attention of the layer.
        cache: the cache of the prompts.
        has_window: whether the layer has the window alone.
    """

    def __init__(self, core: Callable[..., Any], cache: TokenCache, *, has_window: bool) -> None:
        self._core = core
        self._read_keys = cache.attend(cached_inputs, has_window=has_window)
        self._read = {}
        for name in ("compressor", "indexer"):
            self._read[name] = cache.attend(cached_inputs, has_window=False)

    def read_tokens(
        self, value: Tensor, gate: Tensor, *, inputs: AttentionInputs, name: str
    ) -> ProjectedTokens:
        """The tokens so far; arguments as of `read_new_tokens`."""
        rotary = inputs.rotary
        assert rotary is not None, "a rule demands rotary positions"
        tables = rotary_tables(rotary, batch=len(value))
        joined = torch.cat((gate[:, :, None], tables), dim=-1)
        values, joined, call = self._read[name](
            value, key=value[:, :, None], value=joined, mask=inputs.mask
        )
        num_pairs = rotary.cos.shape[-1]
        gates, cos, sin = joined.split((gate.shape[-1], num_pairs, num_pairs), dim=-1)
        so_far = AttentionInputs(Rotary(cos, sin), call)
        return ProjectedTokens(values[:, :, 0], gates[:, :, 0], so_far)

    def __call__(
        self, query: Tensor, *, key: Tensor, value: Tensor, mask: object, **options: Any
    ) -> Tensor:
        no_channels = key[..., :0]
        keys, _, call = self._read_keys(query, key=key, value=no_channels, mask=mask)
        out: Tensor = self._core(query, key=keys, value=keys, mask=call, **options)
        return out
