"""DeepSeek Sparse Attention (DSA): latent attention to the keys that a lightning indexer selects.

    hidden --------+-- key -- key_norm -- rotary ------> index key     E channels for all heads
      (detached)   +-- head_weight --------------------> weight        one per index head
    compressed query -- query -- rotary ---------------> index query   E channels per index head
      (detached)

    index query, key, weight --- selected keys ---+
    query, key, value of MLA (mla.py) ------------+--- attention (attention/sparse.py) -- output

Only its own loss trains the indexer, and this loss has no gradients with respect to the rest of the
model. Every tp rank has a replica of the indexer and computes the same index. The target of the
loss is a mean over all heads, which tp shards: in training one all-reduce of [B, Q, S] fp32 per
block of queries.

A layer of which the indexer alone is trained attends to all keys in training (section 2.1.1).

DeepSeek-V3.2 (2025), section 2.1; flags and the loss as in Megatron-LM.

    B batch   S sequence   H hidden   I index heads   E width of an index head
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanotrain.attention.sparse import Index, IndexerLoss
from nanotrain.comm.autograd import concat_along
from nanotrain.config.layer_kinds import DSAConfig
from nanotrain.config.model import ModelConfig
from nanotrain.model.context import LayerContext, ModelParallel, TokenCache, split_heads
from nanotrain.model.mla import MultiLatentAttention
from nanotrain.model.norm import LayerNorm
from nanotrain.model.parameters import Parameters
from nanotrain.model.rope import Rotary, apply_rotary
from nanotrain.model.router_stats import StatefulModule
from nanotrain.parallel.cp.selected import SelectedAttention
from nanotrain.parallel.tp.layers import SEQUENCE, ColumnParallelLinear

ALL_KEYS = 2**31  # more keys than there are


class Indexer(nn.Module):
    """The projections of the index.

    Args:
        dsa: sizes.
        params: query, key, key_norm, head_weight.
        parallel: replicated over tp; under sequence parallelism each rank projects its tokens.
    """

    def __init__(self, dsa: DSAConfig, params: Parameters, *, parallel: ModelParallel) -> None:
        super().__init__()
        self.dsa = dsa
        self.tensor_parallel = parallel.tp
        replicated = parallel.tp.unsharded
        narrow = replace(replicated, fp8=None)  # too few outputs for fp8
        self.query = ColumnParallelLinear(*params.linear("query"), tensor_parallel=replicated)
        self.key = ColumnParallelLinear(*params.linear("key"), tensor_parallel=replicated)
        self.key_norm = LayerNorm(
            params["key_norm.weight"], params["key_norm.bias"], eps=dsa.k_norm_epsilon
        )
        self.head_weight = ColumnParallelLinear(
            *params.linear("head_weight"), tensor_parallel=narrow
        )

    def forward(self, hidden: Tensor, compressed_query: Tensor, *, rotary: Rotary | None) -> Index:
        """[B, S or S/tp, H] and [B, S or S/tp, q_lora_rank] -> the index of S tokens."""
        hidden = hidden.detach()
        query = self.query(compressed_query.detach())
        key = self.key_norm(self.key(hidden))
        weight = self.head_weight(hidden)
        if self.tensor_parallel.sequence_parallel:
            query, key, weight = self._gather_sequence(query, key, weight)
        query = apply_rotary(split_heads(query, self.dsa.head_dim), rotary)
        key = apply_rotary(key[:, :, None], rotary)[:, :, 0]
        return Index(query, key, weight, self.dsa.topk)

    def _gather_sequence(self, *projected: Tensor) -> list[Tensor]:
        """[B, S/tp, ...] -> [B, S, ...]; the ranks compute equal gradients of all tokens."""
        packed = torch.cat(projected, dim=-1)
        gathered = concat_along(packed, self.tensor_parallel.group, dim=SEQUENCE)
        widths = [x.shape[-1] for x in projected]
        return [x.contiguous() for x in gathered.split(widths, dim=-1)]


class IndexerDivergence(StatefulModule):
    """The loss of the indexer of a layer.

    Args:
        dsa: coefficient of the loss; whether it is over the selected keys or all keys.
        parallel: tp shards heads, cp sequences.

    Attributes:
        sums: [2] fp64, the divergences and the number of tokens since the last collection.
    """

    sums: Tensor

    def __init__(self, dsa: DSAConfig, parallel: ModelParallel) -> None:
        super().__init__()
        self.dsa = dsa
        self.parallel = parallel
        self.register_buffer("sums", torch.zeros(2, dtype=torch.float64), persistent=False)

    def of(self, context: LayerContext, num_tokens: int) -> IndexerLoss | None:
        """The loss of a microbatch; None where nothing is differentiated.

        The mean over the tokens of the global batch is differentiated; padding counts nothing, but
        takes part in the collectives.

        Args:
            context: context of the microbatch.
            num_tokens: local tokens per sequence.
        """
        if self.dsa.loss_coeff == 0 or not torch.is_grad_enabled():
            return None
        coeff = 0.0
        if not context.is_padding:
            coeff = self.dsa.loss_coeff / (num_tokens * self.parallel.cp.size)
        is_counted = not context.is_padding and not self.parallel.recompute.is_recomputing
        return IndexerLoss(
            coeff * context.aux_loss_scale,
            self.dsa.use_sparse_loss,
            self.parallel.tp.group,
            self.sums if is_counted else None,
        )


class SparseLatentAttention(MultiLatentAttention):
    """Multi-latent attention to selected keys.

    Args:
        model_config: configuration of the model.
        params: parameters of `MultiLatentAttention`, and indexer.
        parallel: tp shards the heads, cp the sequence.
        layer: index in the model.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__(model_config, params, parallel=parallel, layer=layer)
        dsa = model_config.dsa
        assert dsa is not None, "sparse_attention_type is dsa"
        self.core_attention = SelectedAttention(parallel.cp)
        self.indexer = Indexer(dsa, params.submodule("indexer"), parallel=parallel)
        self.divergence = IndexerDivergence(dsa, parallel)
        trained = [name for name, param in params.items() if param.requires_grad]
        indexer = [name for name in trained if name.startswith("indexer.")]
        # the dense warm-up of the paper: attention stays dense while only its indexer learns
        self.is_warming_up = len(indexer) > 0 and indexer == trained

    def attend(
        self, hidden: Tensor, compressed_query: Tensor, *, context: LayerContext
    ) -> Callable[..., Tensor]:
        """The core attention to the keys that the indexer selects; to all keys in its warm-up."""
        index = self.indexer(hidden, compressed_query, rotary=context.full.rotary)
        if self.is_warming_up and torch.is_grad_enabled():
            index = replace(index, topk=ALL_KEYS)
        length = index.query.shape[1]
        loss = self.divergence.of(context, length)
        index = replace(index, loss=loss)
        return partial(self.core_attention, index=index)

    def cached_function(self, cache: TokenCache) -> Callable[..., Any]:
        """The core attention to all tokens so far, whose index keys are cached too."""
        core = self.core_attention
        read_cache = cache.attend(_cached_inputs, has_window=False)

        def attend(
            query: Tensor, *, key: Tensor, value: Tensor, mask: Any, index: Index, **options: Any
        ) -> Tensor:
            # a cache stores two tensors per token: joined keys and values, and index keys
            key_value = torch.cat((key, value), dim=-1)
            index_key = index.key[:, :, None]
            key_value, index_key, call = read_cache(
                query, key=key_value, value=index_key, mask=mask
            )
            widths = (key.shape[-1], value.shape[-1])
            keys, values = key_value.split(widths, dim=-1)
            index = replace(index, key=index_key[:, :, 0])
            return core(query, key=keys, value=values, mask=call, index=index, **options)

        return attend


def _cached_inputs(
    query: Tensor, *, key: Tensor, value: Tensor, mask: object
) -> tuple[Tensor, Tensor, object]:
    """A core attention that only returns the cached keys, values and mask that it is given."""
    return key, value, mask
