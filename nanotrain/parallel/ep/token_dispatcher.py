"""Token dispatchers: tokens to their experts and back, as `MoEAlltoAllTokenDispatcher` of
Megatron-LM.

    LocalTokenDispatcher      all experts are on this rank: permute, experts, unpermute
    HierarchicalTokenDispatcher   a token crosses to each node once
    PaddedTokenDispatcher     all-to-alls of fixed sizes: the host waits for nothing
    AllToAllTokenDispatcher   experts are sharded over ep, their matrices over etp (Lepikhin et al. 2020, section 3):

    permute      (token, expert) pairs sorted by expert, so those for one rank are adjacent
    all-to-all   of the token counts, beside the permutation; the host waits for their copy, as splits are host numbers
    all-to-all   over ep: permuted tokens to the ranks of their experts, beside what the caller computes until `Finish`
    all-gather   over etp: of the permuted tokens of all ranks that share an expert
    reorder      from source rank order to expert order
    experts      grouped matrix products
    ... and back in reverse, with a reduce-scatter over etp

kernels/permute.py has the permutations.

T tokens of this rank   K experts per token   E experts   P permuted tokens   H hidden
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from nanotrain.comm.all_to_all import all_to_all, start_all_to_all, start_differentiable_all_to_all
from nanotrain.comm.collectives import start_all_gather_into
from nanotrain.comm.device import HostCopy
from nanotrain.comm.group import Group
from nanotrain.comm.work import Work
from nanotrain.config.config import Config
from nanotrain.kernels.permute import (
    Permutation,
    inverse_of,
    permute,
    plan_permutation,
    reorder,
    unpermute,
)
from nanotrain.memory.recompute import Recompute

# Runs the local experts: permuted tokens [P, H], and offs [local experts] int32, the end of each
# expert's tokens.
RunExperts = Callable[[Tensor, Tensor], Tensor]
# Waits for tokens on their way, runs the experts and brings their outputs back: [T, H], the
# weighted sum of each token.
Finish = Callable[[RunExperts], Tensor]


@dataclass(frozen=True)
class Routing:
    """The experts of each token, as chosen by a router."""

    topk_ids: Tensor  # [T, K] int64; the number of experts marks a dropped pair
    topk_weights: Tensor  # [T, K] fp32, the factors of the expert outputs
    permutation: Permutation | None = None  # of the pairs; None: not planned yet

    def of_experts(self, num_experts: int) -> Self:
        """The pairs of the first experts; those of the others count as dropped."""
        permutation = self.permutation and replace(
            self.permutation, bounds=self.permutation.bounds[: num_experts + 1]
        )
        return replace(self, topk_ids=self.topk_ids.clamp(max=num_experts), permutation=permutation)


@dataclass(frozen=True)
class DispatchOptions:
    """Options of a token dispatcher."""

    may_drop: bool = False  # whether there can be dropped pairs
    routed_share: float = 1.0  # of pairs, on average, are those of experts with weights
    # tokens are sent to every so many ranks of ep once; None: to every expert
    ranks_per_node: int | None = None
    # pairs for one rank of ep, relative to an even share; None: any number
    rank_capacity_factor: float | None = None
    # a recomputed forward has the counts of its first run
    recompute: Recompute = field(default_factory=Recompute)

    @classmethod
    def of(cls, config: Config) -> Self:
        """The options of a run."""
        parallel, moe = config.parallel, config.model.moe
        may_drop, share = (
            (False, 1.0) if moe is None else (moe.may_drop, moe.mean_topk / moe.router_topk)
        )
        return cls(
            may_drop,
            share,
            parallel.moe_hierarchical_dispatch,
            parallel.moe_expert_rank_capacity_factor,
        )

    def padded_split(
        self, num_tokens: int, topk: int, *, num_experts: int, ep: int
    ) -> tuple[int, int]:
        """The most pairs that `PaddedTokenDispatcher` sends to one rank of ep, and the rows that it
        sends them in.

        There is a row more where a pair may not be sent: the last row of all is then padding.

        >>> DispatchOptions(rank_capacity_factor=1.5).padded_split(16, 2, num_experts=8, ep=4)
        (12, 13)
        """
        capacity, most = (
            int((self.rank_capacity_factor or ep) * num_tokens * topk / ep),
            num_tokens * topk,
        )
        most = min(most, num_tokens * num_experts // ep)  # a token goes to an expert once
        return min(capacity, most), min(capacity, most) + (self.may_drop or capacity < most)

    def num_rows(self, num_tokens: int, topk: int, *, num_experts: int, ep: int) -> int:
        """Rows that a rank sends to all ranks of ep, itself among them; as many arrive, where not
        padded on average.
        """
        if self.rank_capacity_factor is None and ep > 1:
            return int(num_tokens * topk * self.routed_share)
        return ep * self.padded_split(num_tokens, topk, num_experts=num_experts, ep=ep)[1]


def build_token_dispatcher(
    num_experts: int, *, ep: Group, etp: Group, options: DispatchOptions | None = None
) -> "LocalTokenDispatcher | AllToAllTokenDispatcher | HierarchicalTokenDispatcher":
    """The dispatcher for experts sharded over `ep`, with matrices sharded over `etp`."""
    options = options or DispatchOptions()
    if ep.size * etp.size == 1:
        return LocalTokenDispatcher(num_experts, may_drop=options.may_drop)
    if options.rank_capacity_factor is not None or ep.size == 1:
        return PaddedTokenDispatcher(num_experts, ep=ep, etp=etp, options=options)
    if options.ranks_per_node is not None and options.ranks_per_node < ep.size:
        return HierarchicalTokenDispatcher(num_experts, ep=ep, etp=etp, options=options)
    return AllToAllTokenDispatcher(num_experts, ep=ep, etp=etp, options=options)


class LocalTokenDispatcher:
    """All experts are on this rank; dropped pairs stay among the permuted tokens, so no host sync
    is needed.
    """

    def __init__(self, num_experts: int, *, may_drop: bool = False) -> None:
        self._num_experts = num_experts
        # rows of no expert are passed to `RunExperts`, after those of the last one
        self.has_padding = may_drop

    def __call__(self, x: Tensor, routing: Routing, *, kept: "KeptSplits | None" = None) -> Finish:
        """Permute tokens [T, H]."""
        permutation = routing.permutation or plan_permutation(routing.topk_ids, self._num_experts)
        permuted = permute(x, permutation, num_permuted=routing.topk_ids.numel())

        def finish(run_experts: RunExperts) -> Tensor:
            outputs = run_experts(permuted, permutation.offs)
            return unpermute(outputs, permutation, topk_weights=routing.topk_weights)

        return finish


class AllToAllTokenDispatcher:
    """Experts are on several ranks; rank i of `ep` holds the i-th equal shard of them."""

    has_padding = False

    def __init__(
        self, num_experts: int, *, ep: Group, etp: Group, options: DispatchOptions
    ) -> None:
        assert num_experts % ep.size == 0, "every rank of ep holds the same number of experts"
        self._num_experts, self._ep, self._etp, self._options = num_experts, ep, etp, options

    def __call__(self, x: Tensor, routing: Routing, *, kept: "KeptSplits | None" = None) -> Finish:
        """Send tokens [T, H]; `kept` takes the split sizes, and has them in a recomputed forward."""
        return self.send(x, routing, kept={} if kept is None else kept)[0]

    def send(
        self, x: Tensor, routing: Routing, *, kept: "KeptSplits"
    ) -> tuple[Finish, Callable[[Tensor], Work[Tensor]]]:
        """Permute and send tokens [T, H]; also returns a function that sends further rows [T, ...]
        the same way.
        """
        permutation = routing.permutation or plan_permutation(routing.topk_ids, self._num_experts)
        routing, permutation, num_sent = self._plan(routing, permutation, kept=kept)
        permuted = permute(x, permutation, num_permuted=num_sent)
        splits = kept[self].wait()
        back = {"input_splits": splits.ep_outputs, "output_splits": splits.ep_inputs}
        there = {"input_splits": splits.ep_inputs, "output_splits": splits.ep_outputs}
        # taken out, so that rows are freed
        arriving = [start_differentiable_all_to_all(permuted, self._ep, **there)]

        def send(rows: Tensor) -> Work[Tensor]:
            permuted = permute(rows, permutation, num_permuted=num_sent)
            return start_differentiable_all_to_all(permuted, self._ep, **there)

        def finish(run_experts: RunExperts) -> Tensor:
            permuted = _all_gather(arriving.pop().wait(), self._etp, splits=splits.etp)
            permuted = _in_expert_order(permuted, splits, run_experts=run_experts)
            permuted = _reduce_scatter(permuted, self._etp, splits=splits.etp)
            permuted = start_differentiable_all_to_all(permuted, self._ep, **back).wait()
            return unpermute(permuted, permutation, topk_weights=routing.topk_weights)

        return finish, send

    def _plan(
        self, routing: Routing, permutation: Permutation, *, kept: "KeptSplits"
    ) -> tuple[Routing, Permutation, int]:
        """Start the exchange of the counts; returns weights and positions of the pairs, and the
        number of rows sent.
        """
        if not (self._options.recompute.is_recomputing and self in kept):
            kept[self] = self._start_splits(permutation.tokens_per_expert)
        # Without dropped pairs the permutation is launched before the host waits for the counts.
        num_sent = (
            sum(kept[self].wait().ep_inputs) if self._options.may_drop else routing.topk_ids.numel()
        )
        return routing, permutation, num_sent

    def _start_splits(self, sent: Tensor) -> "Work[_Splits]":
        """From the token counts of this rank [E] int32; the host waits for the copy of all, not for
        the device.
        """
        counts, work = self._start_counts(sent)
        copy = HostCopy.after(work, counts.flatten())
        arrived = Work(
            lambda: on_host(copy, counts, ep=self._ep),
            op="all_to_all",
            group=self._ep,
            keep=[counts],
        )
        return arrived.then(lambda numbers: _Splits.of(numbers, counts, ep=self._ep, etp=self._etp))

    def _start_counts(self, sent: Tensor) -> tuple[Tensor, Work[Tensor]]:
        """Exchange the token counts of this rank [E] int32; counts [1 + etp, E] once the work is
        done.
        """
        # sent, and received by each rank of etp
        counts = sent.new_empty(1 + self._etp.size, len(sent))
        counts[0].copy_(sent)
        received, shares = counts[1 + self._etp.index], [len(sent) // self._ep.size] * self._ep.size
        work = start_all_to_all(
            received, counts[0], input_splits=shares, output_splits=shares, group=self._ep
        )
        if self._etp.size > 1:
            work.wait()
            work = start_all_gather_into(counts[1:], received, group=self._etp)
        return counts, work


class PaddedTokenDispatcher(AllToAllTokenDispatcher):
    """As many rows between any two ranks of ep, however many tokens there are: the counts stay on
    the device.

        sent to a rank   [its pairs, sorted by expert | padding]         one size, see `padded_split`
        for its experts  [pairs of all ranks, sorted by expert | padding]

    A rank that has more pairs for another one than that returns NaN for all its tokens, so that the
    step is skipped. Without gradients, as in validation, sizes are exact and the host waits for
    them.

    Attributes:
        peak: int32 scalar, the most pairs for one rank in a microbatch; None before the first one.
        num_pairs: pairs of this rank in a microbatch.
    """

    def __init__(
        self, num_experts: int, *, ep: Group, etp: Group, options: DispatchOptions
    ) -> None:
        super().__init__(num_experts, ep=ep, etp=etp, options=options)
        self.has_padding = options.may_drop or ep.size > 1
        self.peak: Tensor | None = None
        self.num_pairs = 0

    def _plan(
        self, routing: Routing, permutation: Permutation, *, kept: "KeptSplits"
    ) -> tuple[Routing, Permutation, int]:
        if not torch.is_grad_enabled():
            return super()._plan(routing, permutation, kept=kept)
        ids, bounds, size = routing.topk_ids, permutation.bounds, self._ep.size
        num_local, (num_tokens, topk) = self._num_experts // size, ids.shape
        capacity, rows = self._options.padded_split(
            num_tokens, topk, num_experts=self._num_experts, ep=size
        )
        starts = bounds[::num_local]  # of the pairs for each rank, and of those that are dropped
        largest = starts.diff().max()
        self.peak, self.num_pairs = (
            largest if self.peak is None else largest.maximum(self.peak),
            ids.numel(),
        )
        is_over = largest > capacity
        if not (self._options.recompute.is_recomputing and self in kept):
            counts, work = self._start_counts(permutation.tokens_per_expert.masked_fill(is_over, 0))
            kept[self] = work.then(
                lambda _: _Splits.padded(counts, rows, ep=self._ep, etp=self._etp)
            )
        weights = routing.topk_weights.masked_fill(is_over, torch.nan)
        shifts = torch.arange(0, (size + 1) * rows, rows, device=ids.device) - starts
        # Dropped pairs come after those of all ranks: they share the last row, padding for which
        # experts return zeros.
        inverse = (permutation.inverse + shifts[ids // num_local]).clamp_(max=size * rows - 1)
        order = torch.zeros(size * rows, dtype=torch.int64, device=ids.device)
        order.scatter_(0, inverse.flatten(), torch.arange(ids.numel(), device=ids.device))
        return (
            replace(routing, topk_weights=weights),
            Permutation(order, inverse, bounds),
            size * rows,
        )


class HierarchicalTokenDispatcher:
    """A token is sent once to every node of its experts, and copied to their ranks there (DeepEP,
    HybridEP).

    across   token --> the rank with the same index in each node that it goes to, with its experts and weights
    inside   that rank --> the ranks of its experts; the outputs of a node are summed there and sent back as one row

    Consecutive ranks of `ep` form a node; with nodes of one rank a token is sent to every rank
    once, however many of its experts are there. The sum of a node is rounded to the dtype of the
    tokens, and the host waits twice per layer.
    """

    has_padding = False

    def __init__(
        self, num_experts: int, *, ep: Group, etp: Group, options: DispatchOptions
    ) -> None:
        size = options.ranks_per_node or 1
        assert ep.size % size == 0, "checked by the rules of layouts"
        self._num_nodes, options = ep.size // size, replace(options, may_drop=True)
        node, index = divmod(ep.index, size)
        self._experts = range(
            node * num_experts // self._num_nodes, (node + 1) * num_experts // self._num_nodes
        )
        rail = ep.part(range(index, ep.size, size), "all_to_all_across")
        inside = ep.part(range(node * size, (node + 1) * size), "all_to_all")
        single = Group.single_rank("etp")
        self._across = AllToAllTokenDispatcher(
            self._num_nodes, ep=rail, etp=single, options=options
        )
        self._inside = AllToAllTokenDispatcher(
            len(self._experts), ep=inside, etp=etp, options=options
        )

    def __call__(self, x: Tensor, routing: Routing, *, kept: "KeptSplits | None" = None) -> Finish:
        """Send tokens [T, H]."""
        kept, experts, num_nodes = {} if kept is None else kept, self._experts, self._num_nodes
        ids, weights = routing.topk_ids, routing.topk_weights
        is_reached = torch.zeros(len(ids), num_nodes + 1, dtype=torch.bool, device=ids.device)
        is_reached.scatter_(1, ids // len(experts), True)  # the last column: dropped pairs
        numbers = torch.arange(num_nodes, device=ids.device)
        is_reached = is_reached[:, :-1]
        to_nodes = Routing(torch.where(is_reached, numbers, num_nodes), is_reached.float())
        finish_across, send = self._across.send(x, to_nodes, kept=kept)
        # expert numbers are exact in fp32
        chosen = send(torch.cat([ids.to(weights.dtype), weights], 1))

        def finish(run_experts: RunExperts) -> Tensor:
            def run_node(rows: Tensor, _: Tensor) -> Tensor:
                ids, weights = chosen.wait().tensor_split(2, 1)
                local = ids.detach().long() - experts.start
                local = torch.where((local >= 0) & (local < len(experts)), local, len(experts))
                return self._inside(rows, Routing(local, weights), kept=kept)(run_experts)

            return finish_across(run_node)

        return finish


def on_host(copy: HostCopy, counts: Tensor, *, ep: Group) -> list[int]:
    """Token counts [1 + etp, E] on the host, which waits until they are copied."""
    return [int(count) for count in copy.read()]


@dataclass(frozen=True)
class _Splits:
    """Split sizes, in permuted tokens."""

    ep_inputs: list[int]  # sent to each rank of ep
    ep_outputs: list[int]  # received from each rank of ep
    etp: list[int]  # received by each rank of etp over its ep group
    # [etp * ep, local experts] int32, by source rank; a further column counts padding
    tokens_per_expert: Tensor
    num_experts: int  # local ones

    @classmethod
    def of(cls, numbers: list[int], counts: Tensor, *, ep: Group, etp: Group) -> "_Splits":
        """From the counts [1 + etp, E] on the host and on the device."""
        size = counts.shape[1] // ep.size
        sums = [sum(numbers[start : start + size]) for start in range(0, len(numbers), size)]
        inputs, *outputs = (sums[start : start + ep.size] for start in range(0, len(sums), ep.size))
        return cls(
            inputs, outputs[etp.index], list(map(sum, outputs)), counts[1:].reshape(-1, size), size
        )

    @classmethod
    def padded(cls, counts: Tensor, rows: int, *, ep: Group, etp: Group) -> "_Splits":
        """As many rows between all ranks; counts [1 + etp, E] are on the device."""
        sizes, received = [rows] * ep.size, counts[1:].reshape(etp.size * ep.size, -1)
        padding = rows - received.sum(1, keepdim=True, dtype=received.dtype)
        return cls(
            sizes,
            sizes,
            [sum(sizes)] * etp.size,
            torch.cat([received, padding], 1),
            received.shape[1],
        )


# The split sizes of the dispatchers of a stage in one microbatch, for its recomputation.
KeptSplits = dict[AllToAllTokenDispatcher, "Work[_Splits]"]


def _all_gather(permuted: Tensor, group: Group, *, splits: list[int]) -> Tensor:
    """[local split, H] -> [sum(splits), H], in the order of the group; backward sums the gradients
    of all ranks.
    """
    if group.size == 1:
        return permuted
    # torch has no all-gather of uneven sizes; this sends the same bytes
    copies = permuted.repeat(group.size, 1)
    return all_to_all(
        copies, group, input_splits=[len(permuted)] * group.size, output_splits=splits
    )


def _reduce_scatter(permuted: Tensor, group: Group, *, splits: list[int]) -> Tensor:
    """[sum(splits), H], partial sums -> [local split, H], their sum over the group."""
    if group.size == 1:
        return permuted
    num_permuted = splits[group.index]
    partials = all_to_all(
        permuted, group, input_splits=splits, output_splits=[num_permuted] * group.size
    )
    return partials.view(group.size, num_permuted, permuted.shape[1]).sum(0)


def _in_expert_order(permuted: Tensor, splits: _Splits, *, run_experts: RunExperts) -> Tensor:
    """The outputs of the experts for tokens in the order of their source ranks."""
    offs = splits.tokens_per_expert.sum(0).cumsum(0, dtype=torch.int32)[: splits.num_experts]
    if splits.tokens_per_expert.shape[1] == 1:
        return run_experts(permuted, offs)
    order = _expert_order(splits.tokens_per_expert, num_permuted=sum(splits.etp))
    inverse = inverse_of(order)
    permuted = run_experts(reorder(permuted, order, inverse=inverse), offs)
    return reorder(permuted, inverse, inverse=order)


def _expert_order(tokens_per_expert: Tensor, *, num_permuted: int) -> Tensor:
    """The order [P] int64 that sorts by expert what is sorted by source rank, then expert."""
    blocks = torch.repeat_interleave(tokens_per_expert.flatten(), output_size=num_permuted)
    return (blocks % tokens_per_expert.shape[1]).argsort(stable=True)
