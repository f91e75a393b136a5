"""Token dispatchers: tokens to their experts and back, as `MoEAlltoAllTokenDispatcher` of Megatron-LM.

    LocalTokenDispatcher      all experts are on this rank: permute, experts, unpermute
    AllToAllTokenDispatcher   experts are sharded over ep, their matrices over etp (Lepikhin et al. 2020, section 3.2):

    permute      (token, expert) pairs sorted by expert, so those for one rank are adjacent (permute.py)
    all-to-all   of the token counts; the only host sync
    all-to-all   over ep: rows to the ranks that hold their experts
    all-gather   over etp: the rows of all ranks that share the matrices of an expert
    reorder      from source rank order to expert order
    experts      grouped matrix products
    ... and back in reverse, with a reduce-scatter over etp

T tokens of this rank   K experts per token   E experts   R permuted rows   H hidden
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nanotrain.comm.all_to_all import all_to_all, start_all_to_all
from nanotrain.comm.collectives import all_gather_into
from nanotrain.comm.group import Group
from nanotrain.parallel.ep.permute import inverse_of, permute, plan_permutation, reorder, unpermute

# Runs the local experts: rows [R, H] sorted by expert, and offs [local experts] int32, the end of each expert's rows.
RunExperts = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Routing:
    """The experts of each token, as chosen by a router.

    Args:
        topk_ids: [T, K] int64; the number of experts marks a dropped pair.
        topk_weights: [T, K] fp32, the factors of the expert outputs.
    """

    topk_ids: Tensor
    topk_weights: Tensor


class TokenDispatcher(Protocol):
    """How the tokens of a rank pass through the experts.

    Attributes:
        keeps_dropped: whether rows of dropped pairs are passed to the experts, after those of the last expert.
    """

    keeps_dropped: bool

    def __call__(self, x: Tensor, routing: Routing, *, run_experts: RunExperts) -> Tensor:
        """[T, H] -> [T, H]: the weighted sum of the expert outputs of every token."""


def build_token_dispatcher(num_experts: int, *, ep: Group, etp: Group) -> TokenDispatcher:
    """The dispatcher for experts sharded over `ep`, with matrices sharded over `etp`."""
    if ep.size * etp.size == 1:
        return LocalTokenDispatcher(num_experts)
    return AllToAllTokenDispatcher(num_experts, ep=ep, etp=etp)


class LocalTokenDispatcher:
    """All experts are on this rank; without a host sync, as rows of dropped pairs stay."""

    keeps_dropped = True

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts

    def __call__(self, x: Tensor, routing: Routing, *, run_experts: RunExperts) -> Tensor:
        """[T, H] -> [T, H]."""
        permutation = plan_permutation(routing.topk_ids, self._num_experts)
        rows = permute(x, permutation, num_rows=routing.topk_ids.numel())
        rows = run_experts(rows, _offs(permutation.tokens_per_expert))
        return unpermute(rows, permutation, topk_weights=routing.topk_weights)


class AllToAllTokenDispatcher:
    """Experts are on several ranks; rank i of `ep` holds the i-th equal shard of them."""

    keeps_dropped = False

    def __init__(self, num_experts: int, *, ep: Group, etp: Group) -> None:
        assert num_experts % ep.size == 0, "every rank of ep holds the same number of experts"
        self._num_experts, self._ep, self._etp = num_experts, ep, etp

    def __call__(self, x: Tensor, routing: Routing, *, run_experts: RunExperts) -> Tensor:
        """[T, H] -> [T, H]."""
        permutation = plan_permutation(routing.topk_ids, self._num_experts)
        splits = self._exchange_counts(permutation.tokens_per_expert)
        rows = permute(x, permutation, num_rows=sum(splits.ep_inputs))
        rows = all_to_all(rows, self._ep, input_splits=splits.ep_inputs, output_splits=splits.ep_outputs)
        rows = _all_gather(rows, self._etp, splits=splits.etp)
        order = _expert_order(splits.tokens_per_expert, num_rows=sum(splits.etp))
        rows = reorder(rows, order)
        rows = run_experts(rows, _offs(splits.tokens_per_expert.sum(0)))
        rows = reorder(rows, inverse_of(order))
        rows = _reduce_scatter(rows, self._etp, splits=splits.etp)
        rows = all_to_all(rows, self._ep, input_splits=splits.ep_outputs, output_splits=splits.ep_inputs)
        return unpermute(rows, permutation, topk_weights=routing.topk_weights)

    def _exchange_counts(self, tokens_per_expert: Tensor) -> "_Splits":
        """The split sizes of all collectives, from the token counts of this rank [E] int64."""
        sent = tokens_per_expert.view(self._ep.size, -1)
        received, ones = torch.zeros_like(sent), [1] * self._ep.size
        start_all_to_all(received, sent, input_splits=ones, output_splits=ones, group=self._ep).wait()
        gathered = received.new_zeros((self._etp.size, *received.shape))
        all_gather_into(gathered, received, group=self._etp)
        numbers = torch.cat([sent.sum(1), received.sum(1), gathered.sum((1, 2))]).tolist()
        size = self._ep.size
        return _Splits(numbers[:size], numbers[size : 2 * size], numbers[2 * size :], gathered.flatten(0, 1))


@dataclass(frozen=True)
class _Splits:
    """Split sizes, in rows.

    Args:
        ep_inputs: rows sent to each rank of ep.
        ep_outputs: rows received from each rank of ep.
        etp: rows that each rank of etp has received over its ep group.
        tokens_per_expert: [etp * ep, local experts] int64, by source rank.
    """

    ep_inputs: list[int]
    ep_outputs: list[int]
    etp: list[int]
    tokens_per_expert: Tensor


def _all_gather(rows: Tensor, group: Group, *, splits: list[int]) -> Tensor:
    """[own split, H] -> [sum(splits), H], in the order of the group; backward sums the gradients of all ranks."""
    if group.size == 1:
        return rows
    copies = rows.repeat(group.size, 1)  # torch has no all-gather of uneven sizes; this sends the same bytes
    return all_to_all(copies, group, input_splits=[len(rows)] * group.size, output_splits=splits)


def _reduce_scatter(rows: Tensor, group: Group, *, splits: list[int]) -> Tensor:
    """[sum(splits), H], partial sums -> [own split, H], their sum over the group."""
    if group.size == 1:
        return rows
    num_rows = splits[group.index]
    partials = all_to_all(rows, group, input_splits=splits, output_splits=[num_rows] * group.size)
    return partials.view(group.size, num_rows, rows.shape[1]).sum(0)


def _expert_order(tokens_per_expert: Tensor, *, num_rows: int) -> Tensor:
    """The order [num_rows] int64 that sorts rows by expert, from rows sorted by source rank, then expert."""
    num_sources, num_experts = tokens_per_expert.shape
    experts = torch.arange(num_experts, device=tokens_per_expert.device).repeat(num_sources)
    return experts.repeat_interleave(tokens_per_expert.flatten(), output_size=num_rows).argsort(stable=True)


def _offs(tokens_per_expert: Tensor) -> Tensor:
    return tokens_per_expert.cumsum(0).to(torch.int32)
