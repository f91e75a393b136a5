"""DeepSeek Sparse Attention (DSA): multi-latent attention to the keys that a lightning indexer
selects.

    hidden --------+-- key -- key_norm -- rotary ------> index key     E channels, one for all index heads
      (detached)   +-- head_weight --------------------> weight        one per index head
    compressed query -- query -- rotary ---------------> index query   E channels per index head
      (detached)

    index query, key, weight --- selected keys ---+
    query, key, value of MLA (mla.py) ------------+--- attention (attention/sparse.py) -- output

The indexer is trained by its own loss alone: it gets no gradient of the language model, and its
loss none into the model. Every tp rank has the whole indexer and computes the same index. Its
target is the mean over all heads, which tp shards: one all-reduce of [B, Q, S] fp32 per block of
queries, in training.

DeepSeek-V3.2 (2025), section 2.1; flags and the loss as in Megatron-LM.

    B batch   S sequence   H hidden   I index heads   E width of an index head
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nanotrain.attention.sparse import Index, IndexerLoss
from nanotrain.comm.autograd import concat_along
from nanotrain.config.layer_kinds import DSAConfig
from nanotrain.config.model import ModelConfig
from nanotrain.model.context import LayerContext, ModelParallel, TokenCache
from nanotrain.model.mla import MultiLatentAttention
from nanotrain.model.norm import LayerNorm
from nanotrain.model.parameters import Parameters
from nanotrain.model.rope import Rotary, apply_rotary
from nanotrain.model.router_stats import StatefulModule
from nanotrain.parallel.cp.selected import SelectedAttention
from nanotrain.parallel.tp.layers import SEQUENCE, ColumnParallelLinear


class Indexer(nn.Module):
    """The projections of the index.

    Args:
        dsa: sizes.
        params: query, key, key_norm, head_weight.
        parallel: replicated over tp; under sequence parallelism each rank projects its tokens.
    """

    def __init__(self, dsa: DSAConfig, params: Parameters, *, parallel: ModelParallel) -> None:
        super().__init__()
        self.dsa, self.tensor_parallel, replicated = dsa, parallel.tp, parallel.tp.unsharded
        self.query = ColumnParallelLinear(*params.linear("query"), tensor_parallel=replicated)
        self.key = ColumnParallelLinear(*params.linear("key"), tensor_parallel=replicated)
        self.key_norm = LayerNorm(
            params["key_norm.weight"], params["key_norm.bias"], eps=dsa.k_norm_epsilon
        )
        narrow = replace(replicated, fp8=None)  # too few outputs
        self.head_weight = ColumnParallelLinear(
            *params.linear("head_weight"), tensor_parallel=narrow
        )

    def forward(self, hidden: Tensor, compressed_query: Tensor, *, rotary: Rotary | None) -> Index:
        """[B, S or S/tp, H] and [B, S or S/tp, q_lora_rank] -> the index of S tokens."""
        hidden, dsa = hidden.detach(), self.dsa
        projected = (
            self.query(compressed_query.detach()),
            self.key_norm(self.key(hidden)),
            self.head_weight(hidden),
        )
        # the ranks compute equal gradients of all tokens
        if self.tensor_parallel.sequence_parallel:
            packed = concat_along(
                torch.cat(projected, dim=-1), self.tensor_parallel.group, dim=SEQUENCE
            )
            projected = tuple(
                x.contiguous() for x in packed.split([x.shape[-1] for x in projected], dim=-1)
            )
        query, key, weight = projected
        query = apply_rotary(query.unflatten(-1, (dsa.n_heads, dsa.head_dim)), rotary)
        return Index(query, apply_rotary(key[:, :, None], rotary)[:, :, 0], weight, dsa.topk)


class IndexerDivergence(StatefulModule):
    """The loss of the indexer of a layer.

    Args:
        dsa: coefficient of the loss, and the keys that it is over.
        parallel: tp shards heads, cp sequences.

    Attributes:
        sums: [2] fp64, the divergences since the last collection and the tokens they are of.
    """

    sums: Tensor

    def __init__(self, dsa: DSAConfig, parallel: ModelParallel) -> None:
        super().__init__()
        self.dsa, self.parallel = dsa, parallel
        self.register_buffer("sums", torch.zeros(2, dtype=torch.float64), persistent=False)

    def of(self, context: LayerContext, num_tokens: int) -> IndexerLoss | None:
        """The loss for a microbatch of so many local tokens per sequence; None where nothing is
        differentiated.

        Its mean over the tokens of the global batch is differentiated; padding counts nothing, but
        takes part in the collectives.
        """
        if self.dsa.loss_coeff == 0 or not torch.is_grad_enabled():
            return None
        coeff = (
            0.0
            if context.is_padding
            else self.dsa.loss_coeff / (num_tokens * self.parallel.cp.size)
        )
        is_counted = not (context.is_padding or self.parallel.recompute.is_recomputing)
        sums, tp = self.sums if is_counted else None, self.parallel.tp.group
        return IndexerLoss(coeff * context.aux_loss_scale, self.dsa.use_sparse_loss, tp, sums)


class SparseLatentAttention(MultiLatentAttention):
    """Multi-latent attention to selected keys.

    Args:
        model_config, parallel, layer: as of `MultiLatentAttention`.
        params: those of `MultiLatentAttention`, and indexer.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__(model_config, params, parallel=parallel, layer=layer)
        assert (dsa := model_config.dsa) is not None, "sparse_attention_type is dsa"
        self.core_attention = SelectedAttention(parallel.cp)
        self.indexer = Indexer(dsa, params.submodule("indexer"), parallel=parallel)
        self.divergence = IndexerDivergence(dsa, parallel)

    def attend(
        self, hidden: Tensor, compressed_query: Tensor, *, context: LayerContext
    ) -> Callable[..., Tensor]:
        index = self.indexer(hidden, compressed_query, rotary=context.rotary[0])
        index = replace(index, loss=self.divergence.of(context, index.query.shape[1]))
        return lambda query, **options: self.core_attention(query, index=index, **options)

    def cached(self, cache: TokenCache) -> dict[str, Callable[..., Tensor]]:
        """In generation the index keys of all tokens so far are kept beside keys and values."""
        core, all_tokens = self.core_attention, cache.attend(_inputs, has_window=False)

        def attend(
            query: Tensor, *, key: Tensor, value: Tensor, mask: Any, index: Index, **options: Any
        ) -> Tensor:
            widths = key.shape[-1], value.shape[-1]
            key_value, index_key = torch.cat((key, value), dim=-1), index.key[:, :, None]
            key_value, index_key, call = all_tokens(
                query, key=key_value, value=index_key, mask=mask
            )
            key, value = key_value.split(widths, dim=-1)
            return core(
                query,
                key=key,
                value=value,
                mask=call,
                index=replace(index, key=index_key[:, :, 0]),
                **options,
            )

        return {"core_attention": attend}


def _inputs(
    query: Tensor, *, key: Tensor, value: Tensor, mask: object
) -> tuple[Tensor, Tensor, object]:
    """The keys, values and mask that a cache gives to a core attention."""
    return key, value, mask
