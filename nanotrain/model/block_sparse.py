"""Attention to blocks of keys that an indexer selects (MiniMax-M3).

    hidden --------+-- query -- query_norm -- rotary --> index query   E channels per index head
      (detached)   +-- key ---- key_norm ---- rotary --> index key     E channels for all heads

    index query, key -- selected blocks --+
    query, key, value of `Attention` -----+-- attention (attention/block_sparse.py) -- output

Long sequences, and generation, gather the selected keys and values; shorter sequences mask the
other keys (`gathers_blocks` in spec/kinds/block_sparse.py).

There is one index head per key/value head, whose query heads attend to the same blocks. tp shards
both alike, so no rank needs scores of another; every tp rank computes the index keys.

As in dsa.py only its own loss trains the indexer, and a layer of which the indexer alone is trained
attends to all keys in training.

    B batch   S sequence   H hidden   G key/value heads   E width of an index head
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanotrain.attention.block_sparse import attend_blocks
from nanotrain.attention.blocks import BlockIndex
from nanotrain.config.layer_kinds import DSAConfig
from nanotrain.config.model import ModelConfig
from nanotrain.model.attention import Attention
from nanotrain.model.context import LayerContext, ModelParallel, TokenCache, split_heads
from nanotrain.model.dsa import (
    ALL_KEYS,
    IndexerDivergence,
    cached_inputs,
    trains_indexer_alone,
)
from nanotrain.model.norm import RMSNorm
from nanotrain.model.parameters import Parameters
from nanotrain.model.rope import Rotary, apply_rotary
from nanotrain.parallel.cp.selected import SelectedAttention
from nanotrain.parallel.tp.layers import ColumnParallelLinear, column_parallel
from nanotrain.spec.kinds.block_sparse import gathers_blocks
from nanotrain.spec.shape import ModelShape


class BlockIndexer(nn.Module):
    """The projections of the index.

    Args:
        model_config: sizes, and whether weights of norms are offsets from 1.
        params: query, key, query_norm, key_norm.
        parallel: tp shards the queries.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel
    ) -> None:
        super().__init__()
        dsa = model_config.dsa
        assert dsa is not None, "sparse_attention_type is blocks"
        self.dsa: DSAConfig = dsa
        column = partial(ColumnParallelLinear, tensor_parallel=parallel.tp)
        self.query = column(*params.linear("query"))
        # all of its rows, which are no shard
        rows = slice(0, dsa.head_dim)
        self.key = column(*params.linear("key"), rows=rows)
        is_offset = model_config.apply_layernorm_1p
        norm = partial(RMSNorm, eps=dsa.k_norm_epsilon, is_offset=is_offset)
        self.query_norm = norm(params["query_norm.weight"])
        self.key_norm = norm(params["key_norm.weight"])

    def forward(self, hidden: Tensor, *, rotary: Rotary | None) -> BlockIndex:
        """[B, S or S/tp, H] -> the index of S tokens."""
        dsa = self.dsa
        hidden = hidden.detach()
        query, key = column_parallel(hidden, (self.query, self.key))
        query = split_heads(query, dsa.head_dim)
        query = self.query_norm(query)
        query = apply_rotary(query, rotary)
        key = split_heads(key, dsa.head_dim)
        key = self.key_norm(key)
        key = apply_rotary(key, rotary)
        return BlockIndex(
            query,
            key[:, :, 0],
            size=dsa.block_size,
            topk=dsa.topk_blocks,
            num_local=dsa.num_local_blocks,
        )


class BlockSparseAttention(Attention):
    """Attention with grouped key/value heads to selected blocks of keys.

    Args:
        model_config: configuration of the model.
        params: parameters of `Attention`, and indexer.
        parallel: tp shards the heads, cp the sequence.
        layer: index in the model.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__(model_config, params, parallel=parallel, layer=layer)
        self.core_attention: Callable[..., Any] = SelectedAttention(parallel.cp, attend_blocks)
        indexer = params.submodule("indexer")
        self.indexer = BlockIndexer(model_config, indexer, parallel=parallel)
        self.divergence = IndexerDivergence(self.indexer.dsa, parallel, shards_index=True)
        self.is_warming_up = trains_indexer_alone(params)
        self.shape = ModelShape.of(model_config)
        self.cp_size = parallel.cp.size

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        rotary = self.inputs(context).rotary
        index = self._index(hidden, context)
        query, key, value, gate = self._project(hidden)
        query, key = self.prepare_query_key(
            query, key, rotary=rotary, query_scale=context.query_scale
        )
        core = partial(self.core_attention, index=index)
        return self.attend(query, key=key, value=value, gate=gate, context=context, core=core)

    def _index(self, hidden: Tensor, context: LayerContext) -> BlockIndex:
        """The index of a microbatch; of all blocks while it alone is trained."""
        rotary = self.inputs(context).rotary
        if not self.has_rope:
            rotary = None
        index: BlockIndex = self.indexer(hidden, rotary=rotary)
        length = index.query.shape[1]
        loss = self.divergence.of(context, length)
        is_training = torch.is_grad_enabled()
        if self.is_warming_up and is_training:
            index = replace(index, topk=ALL_KEYS)
        gathers = gathers_blocks(self.shape, length * self.cp_size)
        return replace(index, loss=loss, gathers=gathers)

    def cached_function(self, cache: TokenCache) -> Callable[..., Any]:
        """The core attention to all tokens so far, whose index keys are cached too."""
        gathers = not self.shape.has_score_options
        return _CachedBlocks(self.core_attention, cache, gathers=gathers)


class _CachedBlocks:
    """The core attention of one layer to all tokens so far.

    A cache stores two tensors per token: the keys, and the values followed by the index key.
    """

    def __init__(self, core: Callable[..., Any], cache: TokenCache, *, gathers: bool) -> None:
        self._core = core
        self._gathers = gathers
        self._read_cache = cache.attend(cached_inputs, has_window=False)

    def __call__(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        mask: Any,
        index: BlockIndex,
        **options: Any,
    ) -> Tensor:
        flat = value.flatten(2)
        joined = torch.cat((flat, index.key), dim=-1)
        joined = joined[:, :, None]
        keys, cached, call = self._read_cache(query, key=key, value=joined, mask=mask)
        cached = cached[:, :, 0]
        num_channels = flat.shape[-1]
        values = cached[..., :num_channels]
        values = values.unflatten(-1, value.shape[2:])
        index = index.with_key(cached[..., num_channels:])
        index = replace(index, gathers=self._gathers)
        out: Tensor = self._core(query, key=keys, value=values, mask=call, index=index, **options)
        return out
