"""Attention with FlexAttention: documents, windows, sinks and soft-capped scores in one kernel.

The mask is a table of blocks of queries and keys: a block is skipped, full, or masked by positions
inside the kernel. The table is made on the host from the spans, without a tensor of queries by
keys.

Queries, keys and values are padded with zeros to whole blocks: with a part of a block and a
function of the scores the gradients of torch's kernel may be NaN
(https://github.com/pytorch/pytorch/issues/153799). No query attends to a padded key, as keys end
with the last query, and the outputs of padded queries are dropped.

    B batch   N query heads   G key/value heads   Q queries   K keys   D, Dv head dims
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.attention.call import AttentionCall
from nanotrain.attention.chunks import ScoreOptions
from nanotrain.attention.tiles import on_device
from nanotrain.kernels.compiler import inductor_fault
from nanotrain.quantities import round_up

BLOCK = 128  # queries and keys of a block, the default of FlexAttention


def plan_blocks(call: AttentionCall, block: int = BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """The blocks of keys to which each block of queries attends in part, and in full; pure.

    A partial block may have no pair; a block with padded keys is never full.

    Returns:
        partial and full, each [B or 1, Q / BLOCK, K / BLOCK] bool.
    """
    first_query = call.queries.start
    num_queries = len(call.queries)
    num_keys = len(call.keys)
    first_keys = call.spans.first_keys[:, first_query : call.queries.stop]
    # first and last query and key of every block
    starts = np.arange(0, num_queries, block)
    ends = np.minimum(starts + block, num_queries) - 1
    key_starts = np.arange(0, num_keys, block)
    key_ends = key_starts + block - 1
    # first keys ascend: the first query of a block attends to the lowest keys, the last query to
    # the fewest low keys
    lowest_first_key = first_keys[:, starts, None]
    highest_first_key = first_keys[:, ends, None]
    is_causal_for_some = key_starts <= (first_query + ends)[:, None]
    is_allowed_for_some = np.minimum(key_ends, num_keys - 1) >= lowest_first_key
    is_causal_for_all = key_ends <= (first_query + starts)[:, None]
    is_allowed_for_all = key_starts >= highest_first_key
    has_some = is_causal_for_some & is_allowed_for_some
    has_all = is_causal_for_all & is_allowed_for_all
    return has_some & ~has_all, has_all


def build_block_mask(call: AttentionCall, block: int = BLOCK) -> Any:
    """The `BlockMask` of a call on its device."""
    # imports the compiler, which takes seconds
    from torch.nn.attention.flex_attention import BlockMask

    partial_blocks, full_blocks = plan_blocks(call, block)
    first_query = call.queries.start
    num_queries = round_up(len(call.queries), block)
    num_keys = round_up(len(call.keys), block)
    host_first_keys = call.spans.first_keys[:, first_query : call.queries.stop]
    num_padded = num_queries - len(call.queries)
    padding = ((0, 0), (0, num_padded))
    host_first_keys = np.pad(host_first_keys, padding, mode="edge")
    first_keys = on_device(host_first_keys, call.device)
    has_rows = len(first_keys) > 1

    num_partial, partial_keys = _key_blocks(partial_blocks, call.device)
    num_full, full_keys = _key_blocks(full_blocks, call.device)
    return BlockMask.from_kv_blocks(
        num_partial,
        partial_keys,
        num_full,
        full_keys,
        BLOCK_SIZE=block,
        mask_mod=lambda sample, head, query, key: (
            (key <= query + first_query) & (key >= first_keys[sample if has_rows else 0, query])
        ),
        seq_lengths=(num_queries, num_keys),
    )


def _key_blocks(table: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """The key blocks of each query block, as `BlockMask` stores them, in int32.

    Args:
        table: [B or 1, Q / BLOCK, K / BLOCK] bool.
        device: device of the result.

    Returns:
        their number [B or 1, 1, Q / BLOCK]; all key blocks [B or 1, 1, Q / BLOCK, K / BLOCK], the
        ones that count first.
    """
    table = table[:, None]
    numbers = table.sum(-1).astype(np.int32)
    indices = np.argsort(~table, axis=-1, kind="stable").astype(np.int32)
    return on_device(numbers, device), on_device(indices, device)


@cache
def _attend(device_type: str) -> Callable[..., Any]:
    """FlexAttention, compiled on a GPU; else it stores all scores, and has no backward on a CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    attention: Any = flex_attention
    is_compiled = device_type == "cuda" and not inductor_fault(device_type)
    return torch.compile(attention) if is_compiled else attention


class FlexKernel:
    """FlexAttention with the block mask of the call; sinks follow from its log-sum-exp."""

    def __call__(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        call: AttentionCall,
        scores: ScoreOptions | None,
    ) -> Tensor:
        """[B, Q, N, D], key [B, K, G, D], value [B, K, G, Dv] -> [B, Q, N, Dv]."""
        assert scores is None or scores.dropout is None, (
            "the table of backends sends dropout elsewhere"
        )
        if "flex" not in call.kernel_plans:
            call.kernel_plans["flex"] = build_block_mask(call)
        mask = call.kernel_plans["flex"]
        scores = scores or ScoreOptions()
        length = query.shape[1]
        num_queries, num_keys = mask.shape[-2:]
        query = _padded(query, num_queries).transpose(1, 2)
        key = _padded(key, num_keys).transpose(1, 2)
        value = _padded(value, num_keys).transpose(1, 2)
        is_grouped = query.shape[1] != key.shape[1]
        attend = partial(_attend(query.device.type), block_mask=mask, enable_gqa=is_grouped)
        if scores.softcap is not None:
            attend = partial(attend, score_mod=_softcap(scores.softcap))
        out: Tensor
        if scores.sink is None:
            out = attend(query, key, value)
        else:
            from torch.nn.attention.flex_attention import AuxRequest

            out, aux = attend(query, key, value, return_aux=AuxRequest(lse=True))
            # a sink takes part in the softmax: out * exp(lse) / (exp(lse) + exp(sink))
            sink = scores.sink.to(aux.lse.dtype)[:, None]
            kept = torch.sigmoid(aux.lse - sink)
            out = out * kept[..., None].to(out.dtype)
        return out.transpose(1, 2)[:, :length]


def _softcap(cap: float) -> Callable[..., Tensor]:
    """A function of a score, as FlexAttention calls it."""
    return lambda score, sample, head, query, key: cap * torch.tanh(score / cap)


def _padded(x: Tensor, length: int) -> Tensor:
    """[B, S, heads, dim] with zeros up to a length."""
    if x.shape[1] == length:
        return x
    return F.pad(x, (0, 0, 0, 0, 0, length - x.shape[1]))
