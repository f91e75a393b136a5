"""Token dispatchers: tokens to their experts and back, as `MoEAlltoAllTokenDispatcher` of Megatron-LM.

    LocalTokenDispatcher      all experts are on this rank: permute, experts, unpermute
    AllToAllTokenDispatcher   experts are sharded over ep, their matrices over etp (Lepikhin et al. 2020, section 3):

    permute      (token, expert) pairs sorted by expert, so those for one rank are adjacent
    all-to-all   of the token counts; the only host sync
    all-to-all   over ep: permuted tokens to the ranks of their experts
    all-gather   over etp: of the permuted tokens of all ranks that share an expert
    reorder      from source rank order to expert order
    experts      grouped matrix products
    ... and back in reverse, with a reduce-scatter over etp

kernels/permute.py has the permutations.

T tokens of this rank   K experts per token   E experts   P permuted tokens   H hidden
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nanotrain.comm.all_to_all import all_to_all, start_all_to_all
from nanotrain.comm.collectives import all_gather_into
from nanotrain.comm.group import Group
from nanotrain.kernels.permute import Permutation, inverse_of, permute, plan_permutation, reorder, unpermute

# Runs the local experts: permuted tokens [P, H], and offs [local experts] int32, the end of each expert's tokens.
RunExperts = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Routing:
    """The experts of each token, as chosen by a router."""

    topk_ids: Tensor  # [T, K] int64; the number of experts marks a dropped pair
    topk_weights: Tensor  # [T, K] fp32, the factors of the expert outputs
    permutation: Permutation | None = None  # of the pairs; None: not planned yet


def build_token_dispatcher(
    num_experts: int, *, ep: Group, etp: Group
) -> "LocalTokenDispatcher | AllToAllTokenDispatcher":
    """The dispatcher for experts sharded over `ep`, with matrices sharded over `etp`."""
    is_local = ep.size * etp.size == 1
    return LocalTokenDispatcher(num_experts) if is_local else AllToAllTokenDispatcher(num_experts, ep=ep, etp=etp)


class LocalTokenDispatcher:
    """All experts are on this rank; dropped pairs stay among the permuted tokens, so no host sync is needed."""

    keeps_dropped = True  # dropped pairs are passed to `run_experts`, after those of the last expert

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts

    def __call__(self, x: Tensor, routing: Routing, *, run_experts: RunExperts) -> Tensor:
        """[T, H] -> [T, H]: the weighted sum of the expert outputs of every token."""
        permutation = routing.permutation or plan_permutation(routing.topk_ids, self._num_experts)
        permuted = permute(x, permutation, num_permuted=routing.topk_ids.numel())
        permuted = run_experts(permuted, permutation.offs)
        return unpermute(permuted, permutation, topk_weights=routing.topk_weights)


class AllToAllTokenDispatcher:
    """Experts are on several ranks; rank i of `ep` holds the i-th equal shard of them."""

    keeps_dropped = False

    def __init__(self, num_experts: int, *, ep: Group, etp: Group) -> None:
        assert num_experts % ep.size == 0, "every rank of ep holds the same number of experts"
        self._num_experts, self._ep, self._etp = num_experts, ep, etp

    def __call__(self, x: Tensor, routing: Routing, *, run_experts: RunExperts) -> Tensor:
        """[T, H] -> [T, H], as `LocalTokenDispatcher`."""
        permutation = routing.permutation or plan_permutation(routing.topk_ids, self._num_experts)
        splits = self._exchange_counts(permutation.tokens_per_expert)
        permuted = permute(x, permutation, num_permuted=sum(splits.ep_inputs))
        permuted = all_to_all(permuted, self._ep, input_splits=splits.ep_inputs, output_splits=splits.ep_outputs)
        permuted = _all_gather(permuted, self._etp, splits=splits.etp)
        order = _expert_order(splits.tokens_per_expert, num_permuted=sum(splits.etp))
        inverse = inverse_of(order)
        permuted = reorder(permuted, order, inverse=inverse)
        permuted = run_experts(permuted, _offs(splits.tokens_per_expert.sum(0)))
        permuted = reorder(permuted, inverse, inverse=order)
        permuted = _reduce_scatter(permuted, self._etp, splits=splits.etp)
        permuted = all_to_all(permuted, self._ep, input_splits=splits.ep_outputs, output_splits=splits.ep_inputs)
        return unpermute(permuted, permutation, topk_weights=routing.topk_weights)

    def _exchange_counts(self, tokens_per_expert: Tensor) -> "_Splits":
        """The split sizes of all collectives, from the token counts of this rank [E] int64."""
        sent = tokens_per_expert.view(self._ep.size, -1)
        received, ones = torch.zeros_like(sent), [1] * self._ep.size
        start_all_to_all(received, sent, input_splits=ones, output_splits=ones, group=self._ep).wait()
        gathered = received.new_zeros((self._etp.size, *received.shape))
        all_gather_into(gathered, received, group=self._etp)
        numbers = on_host(torch.cat([sent.sum(1), received.sum(1), gathered.sum((1, 2))]))
        size = self._ep.size
        return _Splits(numbers[:size], numbers[size : 2 * size], numbers[2 * size :], gathered.flatten(0, 1))


def on_host(counts: Tensor) -> list[int]:
    """Token counts on the host, which waits for the device."""
    numbers: list[int] = counts.tolist()
    return numbers


@dataclass(frozen=True)
class _Splits:
    """Split sizes, in permuted tokens."""

    ep_inputs: list[int]  # sent to each rank of ep
    ep_outputs: list[int]  # received from each rank of ep
    etp: list[int]  # received by each rank of etp over its ep group
    tokens_per_expert: Tensor  # [etp * ep, local experts] int64, by source rank


def _all_gather(permuted: Tensor, group: Group, *, splits: list[int]) -> Tensor:
    """[local split, H] -> [sum(splits), H], in the order of the group; backward sums the gradients of all ranks."""
    if group.size == 1:
        return permuted
    copies = permuted.repeat(group.size, 1)  # torch has no all-gather of uneven sizes; this sends the same bytes
    return all_to_all(copies, group, input_splits=[len(permuted)] * group.size, output_splits=splits)


def _reduce_scatter(permuted: Tensor, group: Group, *, splits: list[int]) -> Tensor:
    """[sum(splits), H], partial sums -> [local split, H], their sum over the group."""
    if group.size == 1:
        return permuted
    num_permuted = splits[group.index]
    partials = all_to_all(permuted, group, input_splits=splits, output_splits=[num_permuted] * group.size)
    return partials.view(group.size, num_permuted, permuted.shape[1]).sum(0)


def _expert_order(tokens_per_expert: Tensor, *, num_permuted: int) -> Tensor:
    """The order [P] int64 that sorts by expert what is sorted by source rank, then expert."""
    blocks = torch.repeat_interleave(tokens_per_expert.flatten(), output_size=num_permuted)
    return (blocks % tokens_per_expert.shape[1]).argsort(stable=True)


def _offs(tokens_per_expert: Tensor) -> Tensor:
    return tokens_per_expert.cumsum(0, dtype=torch.int32)
