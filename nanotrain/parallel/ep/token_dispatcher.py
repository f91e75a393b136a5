"""Token dispatchers: tokens to their experts and back, as in Megatron-LM.

    LocalTokenDispatcher          all experts are on this rank: permute, experts, unpermute
    PaddedTokenDispatcher         all-to-alls of fixed sizes: the host waits for nothing
    AllToAllTokenDispatcher       experts are sharded over ep, their matrices over etp (Lepikhin et
                                  al. 2020, section 3):

    permute      (token, expert) pairs sorted by expert, so pairs for one rank are adjacent
    all-to-all   of the token counts, during the permutation; the host waits for their copy, as
                 split sizes are host numbers
    all-to-all   over ep: permuted tokens to the ranks of their experts, while the caller computes
                 until it calls `Finish`
    all-gather   over etp: permuted tokens of all ranks that share an expert
    reorder      from source rank order to expert order
    experts      grouped matrix products
    ... and back in reverse, with a reduce-scatter over etp

kernels/permute.py has the permutations, splits.py the split sizes, dispatchers.py the choice among
these and two that send a token once per node (hierarchical.py) or by DeepEP's kernels (deep_ep.py).

T tokens of this rank   K experts per token   E experts   P permuted tokens   H hidden
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from nanotrain.comm.all_to_all import (
    Encoding,
    start_all_to_all,
    start_differentiable_all_to_all,
)
from nanotrain.comm.collectives import start_all_gather_into
from nanotrain.comm.device import HostCopy
from nanotrain.comm.group import Group
from nanotrain.comm.work import Work
from nanotrain.config.config import Config
from nanotrain.config.model import MoEConfig
from nanotrain.kernels.permute import Permutation, permute, plan_permutation, unpermute
from nanotrain.memory.recompute import Recompute
from nanotrain.parallel.ep.splits import (
    RunExperts,
    Splits,
    all_gather_tokens,
    reduce_scatter_tokens,
    run_in_expert_order,
)

# Waits for tokens on their way, runs the experts and brings their outputs back: [T, H], the
# weighted sum of each token.
Finish = Callable[[RunExperts], Tensor]


@dataclass(frozen=True)
class Routing:
    """The experts of each token, as chosen by a router."""

    topk_ids: Tensor  # [T, K] int64; the number of experts marks a dropped pair
    topk_weights: Tensor  # [T, K] fp32, the factors of the expert outputs
    permutation: Permutation | None = None  # the order of the pairs; None: not planned yet

    def restrict_to(self, num_experts: int) -> Self:
        """The pairs of the first experts; pairs of other experts count as dropped."""
        permutation = self.permutation
        if permutation is not None:
            permutation = replace(permutation, bounds=permutation.bounds[: num_experts + 1])
        topk_ids = self.topk_ids.clamp(max=num_experts)
        return replace(self, topk_ids=topk_ids, permutation=permutation)


class PaddedSplit(NamedTuple):
    """Sizes of a message of `PaddedTokenDispatcher` to one rank of ep."""

    num_pairs: int  # the most pairs
    num_rows: int  # rows that they are sent in


@dataclass(frozen=True)
class DispatchOptions:
    """Options of a token dispatcher."""

    may_drop: bool = False  # whether there can be dropped pairs
    routed_share: float = 1.0  # share of pairs, on average, that use experts with weights
    # ranks of a node, to which a token is sent once; None: tokens are sent to every expert
    ranks_per_node: int | None = None
    most_nodes: int | None = None  # nodes that a token is sent to, at most; None: any number
    uses_deep_ep: bool = False  # DeepEP's kernels send the tokens
    # pairs for one rank of ep, relative to an even share; None: any number
    rank_capacity_factor: float | None = None
    encoding: Encoding | None = None  # tokens in fp8 while they are sent; None: in their own dtype
    # a recomputed forward has the counts of its first run
    recompute: Recompute = field(default_factory=Recompute)

    @classmethod
    def of(cls, config: Config) -> Self:
        """The options of a run."""
        parallel = config.parallel
        moe = config.model.moe
        ranks_per_node = parallel.dispatch_ranks_per_node
        most_nodes = None
        if moe is not None and ranks_per_node is not None:
            num_nodes = parallel.expert_model_parallel_size // ranks_per_node
            most_nodes = reached_nodes(moe, num_nodes)
        return cls(
            may_drop=moe is not None and moe.may_drop,
            routed_share=1.0 if moe is None else moe.mean_topk / moe.router_topk,
            ranks_per_node=ranks_per_node,
            most_nodes=most_nodes,
            rank_capacity_factor=parallel.moe_expert_rank_capacity_factor,
        )

    def padded_split(self, num_tokens: int, topk: int, *, num_experts: int, ep: int) -> PaddedSplit:
        """The pairs and rows that `PaddedTokenDispatcher` sends to one rank of ep.

        If pairs can be dropped, one row more than pairs is sent: the target of dropped pairs.

        >>> DispatchOptions(rank_capacity_factor=1.5).padded_split(16, 2, num_experts=8, ep=4)
        PaddedSplit(num_pairs=12, num_rows=13)
        """
        # a token goes to an expert once
        most = min(num_tokens * topk, num_tokens * num_experts // ep)
        factor = self.rank_capacity_factor or ep
        capacity = int(factor * num_tokens * topk / ep)
        num_sent = min(capacity, most)
        needs_padding = self.may_drop or capacity < most
        return PaddedSplit(num_sent, num_sent + 1 if needs_padding else num_sent)

    def num_rows(self, num_tokens: int, topk: int, *, num_experts: int, ep: int) -> int:
        """Rows that a rank sends to all ranks of ep, itself among them.

        As many arrive, on average where they are not padded.
        """
        if self.rank_capacity_factor is None and ep > 1:
            return int(num_tokens * topk * self.routed_share)
        split = self.padded_split(num_tokens, topk, num_experts=num_experts, ep=ep)
        return ep * split.num_rows


def reached_nodes(moe: MoEConfig, num_nodes: int) -> int:
    """The most nodes that hold experts of one token, which may be chosen from a few groups.

    >>> moe = MoEConfig(num_experts=64, router_topk=8, router_num_groups=8, router_group_topk=4)
    >>> reached_nodes(moe, 8)
    4
    """
    num_groups = moe.router_num_groups or 1
    most = min(num_nodes, moe.router_topk)
    if num_groups % num_nodes == 0:  # every group is on one node
        return min(most, moe.router_group_topk or 1)
    return most


class LocalTokenDispatcher:
    """The dispatcher without communication: all experts are on this rank.

    Dropped pairs stay among the permuted tokens, so no host sync is needed.
    """

    def __init__(self, num_experts: int, *, may_drop: bool = False) -> None:
        self._num_experts = num_experts
        self.permute = permute  # recomputation may replace it
        # rows of no expert are passed to `RunExperts`, after the rows of the last expert
        self.has_padding = may_drop

    def __call__(self, x: Tensor, routing: Routing, *, kept: "KeptSplits | None" = None) -> Finish:
        """Permute tokens [T, H]; the result runs the experts and unpermutes to [T, H]."""
        permutation = planned_permutation(routing, self._num_experts)
        permuted = self.permute(x, permutation, num_permuted=routing.topk_ids.numel())

        def finish(run_experts: RunExperts) -> Tensor:
            outputs = run_experts(permuted, permutation.offs)
            return unpermute(outputs, permutation, topk_weights=routing.topk_weights)

        return finish


def planned_permutation(routing: Routing, num_experts: int) -> Permutation:
    """The permutation of a routing, planned now unless the router did."""
    if routing.permutation is not None:
        return routing.permutation
    return plan_permutation(routing.topk_ids, num_experts)


class SendPlan(NamedTuple):
    """The rows that a rank sends for its pairs."""

    weights: Tensor  # [T, K] fp32, the factors of the expert outputs
    permutation: Permutation
    num_rows: int


class Dispatched(NamedTuple):
    """Tokens on their way to their experts."""

    finish: Finish
    send_more: Callable[[Tensor], Work[Tensor]]  # sends further rows [T, ...] the same way


class AllToAllTokenDispatcher:
    """All-to-all with uneven splits; rank i of `ep` holds the i-th equal shard of the experts."""

    has_padding = False

    def __init__(
        self, num_experts: int, *, ep: Group, etp: Group, options: DispatchOptions
    ) -> None:
        assert num_experts % ep.size == 0, "every rank of ep holds the same number of experts"
        self._num_experts = num_experts
        self._num_local = num_experts // ep.size
        self.ep = ep
        self.etp = etp
        self._options = options

    def __call__(self, x: Tensor, routing: Routing, *, kept: "KeptSplits | None" = None) -> Finish:
        """Send tokens [T, H]; the result runs the experts and returns [T, H].

        `kept` stores the split sizes, which a recomputed forward reads.
        """
        return self.send(x, routing, kept={} if kept is None else kept).finish

    def send(
        self,
        x: Tensor,
        routing: Routing,
        *,
        kept: "KeptSplits",
        counted: "Work[Splits] | None" = None,
        ahead: Tensor | None = None,
    ) -> Dispatched:
        """Permute and send tokens [T, H].

        Args:
            x: tokens.
            routing: their experts.
            kept: see `__call__`.
            counted: split sizes that the caller has started to count; None: counted here.
            ahead: rows of `permute_ahead`, of which the first are sent; None: none.
        """
        if counted is not None:
            kept[self] = counted
        permutation = planned_permutation(routing, self._num_experts)
        has_splits = counted is not None or self.has_splits(kept)
        weights, permutation, num_rows = self._plan(
            routing, permutation, kept=kept, has_splits=has_splits
        )
        if ahead is not None and len(ahead) < num_rows:
            ahead = None
        permuted = permute(x, permutation, num_permuted=num_rows, ahead=ahead)
        splits = kept[self].wait()
        there: dict[str, Any] = {
            "input_splits": splits.ep_inputs,
            "output_splits": splits.ep_outputs,
        }
        back: dict[str, Any] = {
            "input_splits": splits.ep_outputs,
            "output_splits": splits.ep_inputs,
        }
        # taken out, so that rows are freed
        encoding = self._options.encoding
        arriving = [start_differentiable_all_to_all(permuted, self.ep, **there, encoding=encoding)]

        def send_more(rows: Tensor) -> Work[Tensor]:
            permuted = permute(rows, permutation, num_permuted=num_rows)
            return start_differentiable_all_to_all(permuted, self.ep, **there)

        def finish(run_experts: RunExperts) -> Tensor:
            permuted = all_gather_tokens(arriving.pop().wait(), self.etp, splits=splits.etp)
            permuted = run_in_expert_order(permuted, splits, run_experts=run_experts)
            permuted = reduce_scatter_tokens(permuted, self.etp, splits=splits.etp)
            permuted = start_differentiable_all_to_all(permuted, self.ep, **back).wait()
            return unpermute(permuted, permutation, topk_weights=weights)

        return Dispatched(finish, send_more)

    def _plan(
        self, routing: Routing, permutation: Permutation, *, kept: "KeptSplits", has_splits: bool
    ) -> SendPlan:
        """Start the all-to-all of the token counts unless `kept` has them, and plan the rows."""
        if not has_splits:
            kept[self] = self._start_splits(permutation.tokens_per_expert)
        # Without dropped pairs the permutation is launched before the host waits for the counts.
        if self._options.may_drop:
            num_rows = sum(kept[self].wait().ep_inputs)
        else:
            num_rows = routing.topk_ids.numel()
        return SendPlan(routing.topk_weights, permutation, num_rows)

    def has_splits(self, kept: "KeptSplits") -> bool:
        """Whether this is a recomputed forward, which has the split sizes of the first run."""
        return self._options.recompute.is_recomputing and self in kept

    def _start_splits(self, sent: Tensor) -> "Work[Splits]":
        """Start an all-to-all of the token counts of this rank [E] int32.

        The host waits for the copy of all counts, not for the device.
        """
        counts = self.empty_counts(sent)
        work = self.start_counts(sent, counts)
        copy = HostCopy.after(work, counts.flatten())
        arrived = Work(
            lambda: on_host(copy, [(counts, self.ep)]),
            op="all_to_all",
            group=self.ep,
            keep=[counts],
        )
        return arrived.then(lambda lists: self.splits(lists[0], counts))

    def splits(self, numbers: list[int], counts: Tensor) -> Splits:
        """Split sizes from the counts of `start_counts`; `numbers` are the same on the host."""
        return Splits.exact(numbers, counts, ep=self.ep, etp=self.etp)

    def empty_counts(self, sent: Tensor) -> Tensor:
        """[1 + etp, E] int32: counts sent, and received by each rank of etp."""
        return sent.new_empty(1 + self.etp.size, self._num_experts)

    def start_counts(self, sent: Tensor, counts: Tensor) -> Work[Tensor]:
        """Start an all-to-all of the token counts of this rank [E], which fills `counts`."""
        counts[0].copy_(sent)
        received = counts[1 + self.etp.index]
        shares = [self._num_local] * self.ep.size
        work = start_all_to_all(
            received, counts[0], input_splits=shares, output_splits=shares, group=self.ep
        )
        if self.etp.size > 1:
            work.wait()
            work = start_all_gather_into(counts[1:], received, group=self.etp)
        return work


# The split sizes of the dispatchers of a stage in one microbatch, for its recomputation.
KeptSplits = dict[AllToAllTokenDispatcher, "Work[Splits]"]


class PaddedTokenDispatcher(AllToAllTokenDispatcher):
    """Padded all-to-all: equal split sizes, so the token counts stay on the device.

        sent to a rank   [its pairs, sorted by expert | padding]   one size, see `padded_split`
        for its experts  [pairs of all ranks, sorted by expert | padding]

    A rank with more pairs for another rank than that returns NaN for all its tokens, so that the
    step is skipped, and repeated with `is_exact`. Then, and without gradients, as in validation,
    sizes are exact and the host waits for them.

    Attributes:
        is_exact: whether sizes are exact.
        peak: int32 scalar, the most pairs for one rank in a microbatch; None before the first one.
        num_pairs: pairs of this rank in a microbatch.
    """

    def __init__(
        self, num_experts: int, *, ep: Group, etp: Group, options: DispatchOptions
    ) -> None:
        super().__init__(num_experts, ep=ep, etp=etp, options=options)
        self.has_padding = options.may_drop or ep.size > 1
        self.is_exact = False
        self.peak: Tensor | None = None
        self.num_pairs = 0

    def _plan(
        self, routing: Routing, permutation: Permutation, *, kept: "KeptSplits", has_splits: bool
    ) -> SendPlan:
        """Plan one padded split per rank; the weights are NaN if a split is too small."""
        if not torch.is_grad_enabled():
            return super()._plan(routing, permutation, kept=kept, has_splits=has_splits)
        num_tokens, topk = routing.topk_ids.shape
        split = self._options.padded_split(
            num_tokens, topk, num_experts=self._num_experts, ep=self.ep.size
        )
        # the first pair for each rank, and the first dropped pair
        starts = permutation.bounds[:: self._num_local]
        largest = starts.diff().max()
        self.peak = largest if self.peak is None else largest.maximum(self.peak)
        self.num_pairs = routing.topk_ids.numel()
        if self.is_exact:
            return super()._plan(routing, permutation, kept=kept, has_splits=has_splits)
        is_over = largest > split.num_pairs
        if not has_splits:
            sent = permutation.tokens_per_expert.masked_fill(is_over, 0)
            kept[self] = self._start_padded_splits(sent, split.num_rows)
        weights = routing.topk_weights.masked_fill(is_over, torch.nan)
        num_rows = self.ep.size * split.num_rows
        inverse = self._padded_inverse(
            routing.topk_ids, permutation, starts=starts, rows_per_rank=split.num_rows
        )
        order = torch.zeros(num_rows, dtype=torch.int64, device=inverse.device)
        pairs = torch.arange(inverse.numel(), device=inverse.device)
        order.scatter_(0, inverse.flatten(), pairs)
        return SendPlan(weights, Permutation(order, inverse, permutation.bounds), num_rows)

    def _start_padded_splits(self, sent: Tensor, num_rows: int) -> "Work[Splits]":
        """Start an all-to-all of the token counts; the host does not wait for them."""
        counts = self.empty_counts(sent)
        work = self.start_counts(sent, counts)
        return work.then(lambda _: Splits.padded(counts, num_rows, ep=self.ep, etp=self.etp))

    def _padded_inverse(
        self, topk_ids: Tensor, permutation: Permutation, *, starts: Tensor, rows_per_rank: int
    ) -> Tensor:
        """The row [T, K] of each pair when every rank gets the same number of rows.

        Dropped pairs come after the pairs of all ranks: they share the last row, padding for which
        experts return zeros.
        """
        num_rows = self.ep.size * rows_per_rank
        first_rows = torch.arange(0, num_rows + rows_per_rank, rows_per_rank, device=starts.device)
        shifts = first_rows - starts
        inverse = permutation.inverse + shifts[topk_ids // self._num_local]
        return inverse.clamp_(max=num_rows - 1)


def on_host(copy: HostCopy, parts: Sequence[tuple[Tensor, Group]]) -> list[list[int]]:
    """Token counts on the host, which waits until they are copied.

    Args:
        copy: copy of the elements of all counts.
        parts: counts [1 + etp, E] of each dispatch, and the group it sends over.
    """
    numbers = [int(count) for count in copy.read()]
    lists = []
    start = 0
    for counts, _ in parts:
        lists.append(numbers[start : start + counts.numel()])
        start += counts.numel()
    return lists
