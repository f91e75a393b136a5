"""Tokens that cross to a node once: host waits and copies of a rank. Values are in
test_token_dispatcher.py.
"""

from dataclasses import replace

import pytest
import torch

from nanotrain.comm.device import HostCopy
from nanotrain.kernels import permute
from nanotrain.parallel.ep import splits
from nanotrain.parallel.ep.hierarchical import HierarchicalTokenDispatcher
from nanotrain.parallel.ep.token_dispatcher import DispatchOptions, Routing
from nanotrain.topology.topology import Topology
from tests.fake_world import fake_context
from tests.harness import parallel_config

E, T, K, H = 8, 12, 3, 4


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_the_host_waits_once_and_tokens_of_one_source_are_not_reordered(
    ranks_per_node, monkeypatch
):
    reads = []
    reordered = []
    read = HostCopy.read
    reorder = splits.reorder
    monkeypatch.setattr(HostCopy, "read", lambda copy: reads.append(copy) or read(copy))
    monkeypatch.setattr(
        splits, "reorder", lambda *args, **given: reordered.append(args) or reorder(*args, **given)
    )
    x = torch.randn(T, H, requires_grad=True)
    experts = torch.rand(T, E).topk(K, dim=-1).indices
    with fake_context(Topology.of(parallel_config(ep=4), 4), 0) as ctx:
        dispatch = HierarchicalTokenDispatcher(
            E,
            ep=ctx.group("ep"),
            etp=ctx.group("etp"),
            options=DispatchOptions(ranks_per_node=ranks_per_node),
        )
        out = dispatch(x, Routing(experts, torch.ones(T, K)))(lambda rows, offs: 2 * rows)
        out.sum().backward()
    assert out.shape == x.shape
    assert len(reads) == 1
    # there and back, where several ranks of a node send tokens to its experts
    assert len(reordered) == (2 if ranks_per_node > 1 else 0)


@pytest.mark.parametrize("most_nodes", [1, 3])
def test_tokens_are_permuted_before_the_host_waits(most_nodes, monkeypatch):
    # with room for one node per token the rows are permuted again, and nothing is lost
    events = []
    read = HostCopy.read
    spread = permute.TORCH_FORM.spread

    def logged_spread(x, order, *, inverse):
        events.append(("permute", len(order)))
        return spread(x, order, inverse=inverse)

    form = replace(permute.TORCH_FORM, spread=logged_spread)
    monkeypatch.setattr(HostCopy, "read", lambda copy: events.append("wait") or read(copy))
    monkeypatch.setattr(permute, "form_of", lambda _: form)
    experts = torch.arange(K).expand(T, K) * 2  # of the first three ranks
    with fake_context(Topology.of(parallel_config(ep=4), 4), 0) as ctx:
        dispatch = HierarchicalTokenDispatcher(
            E,
            ep=ctx.group("ep"),
            etp=ctx.group("etp"),
            options=DispatchOptions(ranks_per_node=1, most_nodes=most_nodes),
        )
        dispatch(torch.randn(T, H, requires_grad=True), Routing(experts, torch.ones(T, K)))
    assert events[:2] == [("permute", T * most_nodes), "wait"]
    permuted_again = [("permute", 3 * T)] * (2 if most_nodes == 1 else 1)  # and the weights
    assert events[2:] == permuted_again
