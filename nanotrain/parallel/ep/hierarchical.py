"""A token dispatcher that sends a token to each node once.

    across   token --> the rank with the same index in each of its nodes, with experts and weights
    inside   that rank --> the ranks of its experts; the outputs of a node are summed there and sent
             back as one row

Consecutive ranks of `ep` form a node; with nodes of one rank a token is sent to every rank once,
however many of its experts are there. As DeepEP and HybridEP.

    counts across    a rank sends each node: its tokens, and the pairs of each expert of the node
    counts inside    their sums over the ranks that sent them
    host             waits once, for a copy of both, while the device permutes the tokens

T tokens of this rank   K experts per token   E experts   P permuted tokens   H hidden
"""

from dataclasses import replace

import torch
from torch import Tensor

from nanotrain.comm.all_to_all import start_all_to_all
from nanotrain.comm.device import HostCopy, on_side_stream
from nanotrain.comm.group import Group
from nanotrain.comm.work import Work
from nanotrain.kernels.permute import permute_ahead, plan_permutation
from nanotrain.parallel.ep import token_dispatcher
from nanotrain.parallel.ep.splits import RunExperts, Splits
from nanotrain.parallel.ep.token_dispatcher import (
    AllToAllTokenDispatcher,
    DispatchOptions,
    Finish,
    KeptSplits,
    Routing,
    planned_permutation,
)


class HierarchicalTokenDispatcher:
    """Two all-to-alls: a token goes once to each node with its experts, then to their ranks.

    The sum of a node is rounded to the dtype of the tokens.
    """

    has_padding = False

    def __init__(
        self, num_experts: int, *, ep: Group, etp: Group, options: DispatchOptions
    ) -> None:
        node_size = options.ranks_per_node or 1
        assert ep.size % node_size == 0, "checked by the rules of layouts"
        options = replace(options, may_drop=True)
        self._most_nodes = options.most_nodes or ep.size // node_size
        self._num_experts = num_experts
        self._num_nodes = ep.size // node_size
        self._experts_per_node = num_experts // self._num_nodes
        node, index = divmod(ep.index, node_size)
        self._first_expert = node * self._experts_per_node
        across = ep.part(range(index, ep.size, node_size), "all_to_all_across")
        inside = ep.part(range(node * node_size, (node + 1) * node_size), "all_to_all")
        self._across = AllToAllTokenDispatcher(
            self._num_nodes, ep=across, etp=Group.single_rank("etp"), options=options
        )
        self._inside = AllToAllTokenDispatcher(
            self._experts_per_node, ep=inside, etp=etp, options=options
        )

    def __call__(self, x: Tensor, routing: Routing, *, kept: KeptSplits | None = None) -> Finish:
        """Send tokens [T, H] to nodes, then to ranks; the result runs the experts: [T, H]."""
        splits = {} if kept is None else kept
        weights = routing.topk_weights
        to_nodes = self._node_routing(routing.topk_ids)
        if not self._across.has_splits(splits):
            counted = self._start_splits(to_nodes, routing)
            splits[self._across] = counted.then(lambda both: both[0])
            splits[self._inside] = counted.then(lambda both: both[1])
        # the device permutes while the host waits for the counts
        ahead = self._permute_ahead(x, to_nodes)
        dispatched = self._across.send(
            x, to_nodes, kept=splits, counted=splits[self._across], ahead=ahead
        )
        # expert numbers are exact in fp32
        ids_and_weights = torch.cat([routing.topk_ids.to(weights.dtype), weights], 1)
        arriving = dispatched.send_more(ids_and_weights)

        def finish(run_experts: RunExperts) -> Tensor:
            def run_node(rows: Tensor, _: Tensor) -> Tensor:
                ids, weights = arriving.wait().tensor_split(2, 1)
                local_routing = Routing(self._local_ids(ids.detach().long()), weights)
                inside = self._inside.send(
                    rows, local_routing, kept=splits, counted=splits[self._inside]
                )
                return inside.finish(run_experts)

            return dispatched.finish(run_node)

        return finish

    def _permute_ahead(self, x: Tensor, to_nodes: Routing) -> Tensor:
        """Rows for as many nodes as tokens are sent to at most; the kept ones come first."""
        assert to_nodes.permutation is not None, "planned with the nodes"
        most = len(x) * self._most_nodes
        return permute_ahead(x, to_nodes.permutation, most=most)

    def _start_splits(self, to_nodes: Routing, routing: Routing) -> Work[tuple[Splits, Splits]]:
        """Start to count what is sent across nodes and inside of this one.

        The tokens that arrive from other nodes are known by their senders, so the host waits once.
        """
        assert to_nodes.permutation is not None, "planned with the nodes"
        tokens = to_nodes.permutation.tokens_per_expert
        pairs = planned_permutation(routing, self._num_experts).tokens_per_expert
        pairs_of_nodes = pairs.view(self._num_nodes, -1)
        sent = torch.cat([tokens[:, None], pairs_of_nodes], 1)
        received = torch.empty_like(sent)
        shares = [1] * self._num_nodes
        across = self._across.ep
        work = start_all_to_all(
            received, sent, input_splits=shares, output_splits=shares, group=across
        )
        local_pairs = pairs.new_empty(self._experts_per_node)
        node_counts = tokens.new_empty(2, self._num_nodes)
        expert_counts = self._inside.empty_counts(local_pairs)
        with on_side_stream(sent, received, local_pairs, node_counts, expert_counts):
            work.wait()
            torch.stack([sent[:, 0], received[:, 0]], out=node_counts)
            torch.sum(received[:, 1:], 0, dtype=local_pairs.dtype, out=local_pairs)
            self._inside.start_counts(local_pairs, expert_counts).wait()
            counts = torch.cat([node_counts.flatten(), expert_counts.flatten()])
            copy = HostCopy(counts)
        parts = [(node_counts, across), (expert_counts, self._inside.ep)]

        def finish() -> tuple[Splits, Splits]:
            node_numbers, expert_numbers = token_dispatcher.on_host(copy, parts)
            across_splits = self._across.splits(node_numbers, node_counts)
            inside_splits = self._inside.splits(expert_numbers, expert_counts)
            return across_splits, inside_splits

        return Work(finish, op="all_to_all", group=across, keep=parts)

    def _node_routing(self, topk_ids: Tensor) -> Routing:
        """Routing to nodes in place of experts: [T, nodes], weight 1 for a node with an expert."""
        device = topk_ids.device
        shape = (len(topk_ids), self._num_nodes + 1)  # the last column: dropped pairs
        is_reached = torch.zeros(shape, dtype=torch.bool, device=device)
        is_reached.scatter_(1, topk_ids // self._experts_per_node, True)
        is_reached = is_reached[:, :-1]
        numbers = torch.arange(self._num_nodes, device=device)
        nodes = torch.where(is_reached, numbers, self._num_nodes)
        return Routing(nodes, is_reached.float(), plan_permutation(nodes, self._num_nodes))

    def _local_ids(self, ids: Tensor) -> Tensor:
        """Expert numbers inside this node; experts of other nodes count as dropped."""
        local = ids - self._first_expert
        is_local = (local >= 0) & (local < self._experts_per_node)
        return torch.where(is_local, local, self._experts_per_node)
