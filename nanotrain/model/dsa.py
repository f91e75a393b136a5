"""DeepSeek Sparse Attention (DSA): latent attention to the keys that a lightning indexer selects.

    hidden --------+-- key -- key_norm -- rotary ------> index key     E channels for all heads
      (detached)   +-- head_weight --------------------> weight        one per index head
    compressed query -- query -- rotary ---------------> index query   E channels per index head
      (detached)

    index query, key, weight --- selected keys ---+
    query, key, value of MLA (mla.py) ------------+--- attention (attention/sparse.py) -- output
    or query, and compressed keys and values -----+--- attention (attention/latent.py) -- output

Sequences of which few keys are selected, and generation, gather the selected compressed keys and
values; shorter sequences mask the other keys (`gathers_keys` in spec/kinds/dsa.py).

Only its own loss trains the indexer, and this loss has no gradients with respect to the rest of the
model. Every tp rank has a replica of the indexer and computes the same index. The target of the
loss is a mean over all heads, which tp shards: in training one all-reduce of [B, Q, S] fp32 per
block of queries.

A layer of which the indexer alone is trained attends to all keys in training (section 2.1.1).

A layer of `selection_sources` has no indexer: it attends to the keys that an earlier layer selected
(GLM-5.2). The positions are kept as state of that layer, in digits that every dtype of hidden
states holds, so they travel to later pipeline stages as keys of earlier layers do.

DeepSeek-V3.2 (2025), section 2.1; flags and the loss as in Megatron-LM.

    B batch   S sequence   H hidden   N heads   I index heads   E width of an index head
    C width of the compressed keys and values   R rotary channels
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanotrain.attention.absorbed import UpProjection
from nanotrain.attention.selection import AnyIndex, Index, IndexerLoss, KeptSelection
from nanotrain.comm.autograd import concat_along, eager
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
from nanotrain.spec.kinds.dsa import gathers_keys
from nanotrain.spec.shape import ModelShape
from nanotrain.spec.shared_state import POSITION_DIGITS

BITS = 8  # of a digit of a position
BASE = 2**BITS
ALL_KEYS = 2**31  # more keys than there are


def trains_indexer_alone(params: Parameters) -> bool:
    """Whether only the indexer of a layer is trained.

    This is the dense warm-up of the paper: attention stays dense while its indexer learns.
    """
    trained = [name for name, param in params.items() if param.requires_grad]
    indexer = [name for name in trained if name.startswith("indexer.")]
    return len(indexer) > 0 and indexer == trained


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
        shards_index: whether tp also shards the heads of the index, and so the divergences.

    Attributes:
        sums: [2] fp64, the divergences and the number of tokens since the last collection.
    """

    sums: Tensor

    def __init__(
        self, dsa: DSAConfig, parallel: ModelParallel, *, shards_index: bool = False
    ) -> None:
        super().__init__()
        self.dsa = dsa
        self.shards_index = shards_index
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

    def take_sums(self) -> Tensor:
        """[2] fp64, `sums` since the last call, to be summed over all ranks.

        Every tp rank counts all tokens; its divergences are of all heads, or of its own heads.
        """
        tp = self.parallel.tp.group
        divergence, num_tokens = self.sums.clone().chunk(2)
        self.sums.zero_()
        divergence = divergence / tp.size if self.shards_index else tp.once(divergence)
        return torch.cat([divergence, tp.once(num_tokens)])


class SelectiveLatentAttention(MultiLatentAttention):
    """Multi-latent attention to selected keys; subclasses say who selects them.

    Args:
        model_config: configuration of the model.
        params: parameters of `MultiLatentAttention`.
        parallel: tp shards the heads, cp the sequence.
        layer: index in the model.
    """

    is_warming_up = False

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__(model_config, params, parallel=parallel, layer=layer)
        assert model_config.dsa is not None, "sparse_attention_type is dsa"
        self.dsa = model_config.dsa
        # gathered keys are multiplied with its weight in the dtype of the activations
        without_fp8 = replace(parallel.tp, fp8=None)
        self.kv_up = ColumnParallelLinear(*params.linear("kv_up"), tensor_parallel=without_fp8)
        self.core_attention: Callable[..., Any] = SelectedAttention(parallel.cp)
        self.shape = ModelShape.of(model_config)
        self.cp_size = parallel.cp.size
        self.reads_cache = False  # in generation

    def _up_projection(self, length: int) -> UpProjection | None:
        """The up-projections for `length` local tokens; None where keys are not gathered."""
        if not self._gathers_keys(length):
            return None
        return UpProjection(self.kv_up.weight, *self.key_value_sizes)

    def _gathers_keys(self, length: int) -> bool:
        """Whether attention of `length` local tokens gathers the selected keys."""
        if self.reads_cache:
            return True
        if self.is_warming_up and torch.is_grad_enabled():
            return False
        return gathers_keys(self.shape, length * self.cp_size)

    def up_project(
        self, query: Tensor, compressed_kv: Tensor, *, shared_key: Tensor, rotary: Rotary | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Query [B, S, N/tp, Dn + R], and key and value of all heads or compressed.

        Compressed, the key is [B, S, 1, C + R], of which the value is the first C channels.
        """
        tp = self.tensor_parallel
        length = query.shape[1]
        if tp.sequence_parallel:
            length *= tp.group.size
        if not self._gathers_keys(length):
            return super().up_project(query, compressed_kv, shared_key=shared_key, rotary=rotary)
        query = self.up_project_query(query, rotary)
        joined = tp.enter(torch.cat((compressed_kv, shared_key), dim=-1))
        compressed_kv, key_rope = joined[:, :, None].split(self.compressed_sizes, dim=-1)
        key_rope = apply_rotary(key_rope, rotary)
        key = torch.cat((compressed_kv, key_rope), dim=-1)
        return query, key, key[..., : compressed_kv.shape[-1]]

    def cached_function(self, cache: TokenCache) -> Callable[..., Any]:
        """The core attention to all tokens so far, whose index keys are cached too."""
        return _CachedSelection(self.core_attention, cache)

    def swap_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Use another core attention; returns the one used until now."""
        self.reads_cache = isinstance(function, _CachedSelection)
        return super().swap_function(function)


class SparseLatentAttention(SelectiveLatentAttention):
    """Multi-latent attention to the keys that its indexer selects.

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
        self.indexer = Indexer(self.dsa, params.submodule("indexer"), parallel=parallel)
        self.divergence = IndexerDivergence(self.dsa, parallel)
        self.is_warming_up = trains_indexer_alone(params)
        self.kept_sources = self.shape.kept(layer)

    def attend(
        self, hidden: Tensor, compressed_query: Tensor, *, context: LayerContext
    ) -> Callable[..., Tensor]:
        """The core attention to the keys that the indexer selects; to all keys in its warm-up."""
        index = self.indexer(hidden, compressed_query, rotary=context.full.rotary)
        if self.is_warming_up and torch.is_grad_enabled():
            index = replace(index, topk=ALL_KEYS)
        length = index.query.shape[1]
        loss = self.divergence.of(context, length)
        index = replace(index, loss=loss, up=self._up_projection(length))
        if not self.kept_sources:
            return partial(self.core_attention, index=index)
        index = replace(index, kept={})
        return partial(self._attend_and_keep, index=index, context=context)

    @eager
    def _attend_and_keep(
        self, query: Tensor, *, index: Index, context: LayerContext, **inputs: Any
    ) -> Tensor:
        """The core attention, whose selection is kept for later layers."""
        out: Tensor = self.core_attention(query, index=index, **inputs)
        assert index.kept is not None, "later layers read the selection"
        positions = torch.cat([index.kept[call] for call in sorted(index.kept)], dim=1)
        for source in self.kept_sources:
            context.keep(source, encode_positions(positions, dtype=out.dtype))
        return out


class SharedSelectionAttention(SelectiveLatentAttention):
    """Multi-latent attention to the keys that an earlier layer selected.

    Args:
        model_config: configuration of the model.
        params: parameters of `MultiLatentAttention`.
        parallel: tp shards the heads, cp the sequence.
        layer: index in the model.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, layer: int
    ) -> None:
        super().__init__(model_config, params, parallel=parallel, layer=layer)
        source = self.shape.selection_source(layer)
        assert source is not None, "a layer with an indexer has the class SparseLatentAttention"
        self.source = source

    def attend(
        self, hidden: Tensor, compressed_query: Tensor, *, context: LayerContext
    ) -> Callable[..., Tensor]:
        """The core attention to the selection of the earlier layer."""
        (encoded,) = context.state[self.source]
        positions = decode_positions(encoded)
        up = self._up_projection(positions.shape[1])
        # in memory of its own: a view would keep all digits
        no_channels = encoded.new_empty((*positions.shape[:2], 0))
        selection = KeptSelection(positions, no_channels, self.dsa.topk, up)
        return partial(self.core_attention, index=selection)


def encode_positions(positions: Tensor, *, dtype: torch.dtype) -> Tensor:
    """[B, Q, K] int32 from -1 on -> [B, Q, K, digits] of a dtype of hidden states.

    >>> digits = encode_positions(torch.tensor([[[-1, 0, 70000]]]), dtype=torch.bfloat16)
    >>> digits.tolist(), decode_positions(digits).tolist()
    ([[[[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [113.0, 17.0, 1.0]]]], [[[-1, 0, 70000]]])
    """
    code = positions + 1
    digits = [code >> (BITS * digit) & BASE - 1 for digit in range(POSITION_DIGITS)]
    return torch.stack(digits, dim=-1).to(dtype)


def decode_positions(encoded: Tensor) -> Tensor:
    """The inverse of `encode_positions`; nothing is differentiated."""
    digits = encoded.detach().to(torch.int32)
    code = digits[..., 0]
    for digit in range(1, POSITION_DIGITS):
        code = code + (digits[..., digit] << BITS * digit)
    return code - 1


class _CachedSelection:
    """The core attention of one layer to all tokens so far.

    A cache stores two tensors per token: the compressed key and value, and the index key.
    """

    def __init__(self, core: Callable[..., Any], cache: TokenCache) -> None:
        self._core = core
        self._read_cache = cache.attend(cached_inputs, has_window=False)

    def __call__(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        mask: Any,
        index: AnyIndex,
        **options: Any,
    ) -> Tensor:
        index_key = index.key[:, :, None]
        keys, index_key, call = self._read_cache(query, key=key, value=index_key, mask=mask)
        index = index.with_key(index_key[:, :, 0])
        out: Tensor = self._core(query, key=keys, value=value, mask=call, index=index, **options)
        return out


def cached_inputs(
    query: Tensor, *, key: Tensor, value: Tensor, mask: object
) -> tuple[Tensor, Tensor, object]:
    """A core attention that only returns the cached keys, values and mask that it is given."""
    return key, value, mask
