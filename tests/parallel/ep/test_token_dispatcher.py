"""Token dispatch gives the same on any number of ranks and sends no more bytes than needed."""

from dataclasses import replace

import pytest
import torch

from nanotrain.comm.group import Group
from nanotrain.config.load import load
from nanotrain.parallel.ep.dispatchers import build_token_dispatcher
from nanotrain.parallel.ep.hierarchical import HierarchicalTokenDispatcher
from nanotrain.parallel.ep.token_dispatcher import (
    AllToAllTokenDispatcher,
    DispatchOptions,
    LocalTokenDispatcher,
    PaddedTokenDispatcher,
    Routing,
)
from nanotrain.plan.plan import plan_run
from nanotrain.plan.traffic import COUNT_BYTES, EXPERT_BYTES, TOKEN_TRANSFERS, sent_bytes
from tests.harness import run_ranks

E, H, T, K = 8, 4, 12, 3
DROPS = DispatchOptions(may_drop=True)


def tokens_of(rank, *, is_even=False):
    """The tokens of a rank: as many on all ranks, or uneven counts and none on rank 2; some pairs
    dropped.
    """
    generator = torch.Generator().manual_seed(rank)
    num_tokens = T if is_even else 0 if rank == 2 else T + rank
    x = torch.randn(num_tokens, H, generator=generator).requires_grad_()
    scores = torch.rand(num_tokens, E, generator=generator)
    scores[:, 5] = -1.0  # no token uses expert 5
    experts = scores.topk(K, dim=-1).indices
    experts[::4, 0] = E
    weights = torch.rand(num_tokens, K, generator=generator).requires_grad_()
    return x, Routing(experts, weights), torch.randn(num_tokens, H, generator=generator)


def outcome(dispatch, x, routing, grad, *, run_experts):
    out = dispatch(x, routing)(run_experts)
    return out.detach(), *torch.autograd.grad(out, (x, routing.topk_weights), grad)


def times_expert(first, last, share=1.0):
    """Experts that multiply by their index + 1, or by a share of it; zero for dropped tokens."""

    def run(rows, offs):
        numbers = torch.arange(first, last) + 1.0
        each = numbers.repeat_interleave(offs.diff(prepend=offs.new_zeros(1)))
        factors = torch.cat([each, torch.zeros(len(rows) - len(each))])
        return rows * factors[:, None] * share

    return run


def equals_local(ctx, ranks_per_node=None):
    ep, etp = ctx.group("ep"), ctx.group("etp")
    x, routing, grad = tokens_of(ctx.rank, is_even=ep.size == 1)
    expected = outcome(LocalTokenDispatcher(E), x, routing, grad, run_experts=times_expert(0, E))
    size = E // ep.size
    mine = times_expert(ep.index * size, (ep.index + 1) * size, share=1 / etp.size)
    dispatch = build_token_dispatcher(
        E, ep=ep, etp=etp, options=replace(DROPS, ranks_per_node=ranks_per_node)
    )
    assert isinstance(
        dispatch, HierarchicalTokenDispatcher if ranks_per_node else AllToAllTokenDispatcher
    )
    for actual, wanted in zip(
        outcome(dispatch, x, routing, grad, run_experts=mine), expected, strict=True
    ):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)
    return [
        (routing.topk_ids // size == rank).sum().item() for rank in range(ep.size)
    ], ctx.traffic.bytes(op="all_to_all")


def padded_and_exact(ctx, factor, may_drop, ids=None):
    """Outcomes of both dispatchers, the bytes that the padded one sent and the plan of them, and
    its peak.
    """
    ep, etp = ctx.group("ep"), ctx.group("etp")
    x, routing, grad = tokens_of(ctx.rank, is_even=True)
    if not may_drop:
        routing = replace(routing, topk_ids=routing.topk_ids.where(routing.topk_ids < E, 5))
    routing = routing if ids is None else replace(routing, topk_ids=torch.tensor(ids))
    size, options = E // ep.size, DispatchOptions(may_drop)
    mine = times_expert(ep.index * size, (ep.index + 1) * size, share=1 / etp.size)
    exact = outcome(
        AllToAllTokenDispatcher(E, ep=ep, etp=etp, options=options),
        x,
        routing,
        grad,
        run_experts=mine,
    )
    before = {op: ctx.traffic.bytes(*op) for op in EXPERT_BYTES}
    options = replace(options, rank_capacity_factor=factor)
    dispatch = build_token_dispatcher(E, ep=ep, etp=etp, options=options)
    assert isinstance(dispatch, PaddedTokenDispatcher) and dispatch.has_padding == (
        may_drop or ep.size > 1
    )
    padded = outcome(dispatch, x, routing, grad, run_experts=mine)
    _, rows = options.padded_split(T, K, num_experts=E, ep=ep.size)
    tokens, counts = TOKEN_TRANSFERS * ep.size * rows * H * 4, E * COUNT_BYTES
    planned = {
        op: count(tokens, counts, ctx.group(op[0]).size) for op, count in EXPERT_BYTES.items()
    }
    assert {op: ctx.traffic.bytes(*op) - before[op] for op in EXPERT_BYTES} == planned
    with torch.no_grad():  # exact again
        out = dispatch(x, routing)(mine)
    assert torch.equal(out, exact[0])
    most = max((routing.topk_ids // size == rank).sum().item() for rank in range(ep.size))
    assert (dispatch.peak.item(), dispatch.num_pairs) == (most, T * K)
    return exact, padded, most


SHARDINGS = [
    (2, {"ep": 2}),
    (2, {"etp": 2}),
    (4, {"ep": 4}),
    (4, {"ep": 2}),
    (4, {"ep": 2, "etp": 2}),
]


@pytest.mark.parametrize(("num_ranks", "sizes"), SHARDINGS)
def test_any_sharding_of_the_experts_equals_one_rank(num_ranks, sizes):
    run_ranks(num_ranks, equals_local, **sizes, shares=True)


@pytest.mark.parametrize("may_drop", [False, True])
@pytest.mark.parametrize(("num_ranks", "sizes"), SHARDINGS)
def test_padded_all_to_alls_return_the_same_bits(num_ranks, sizes, may_drop):
    for factor in (2.0, 1e9):
        for exact, padded, _ in run_ranks(
            num_ranks, padded_and_exact, factor, may_drop, **sizes, shares=True
        ):
            assert all(map(torch.equal, exact, padded))


def test_dropped_pairs_are_in_the_row_of_no_other_where_the_last_rank_has_as_many_as_it_can():
    ids = [[4, 5, 7]] * (T // 2) + [[0, 1, E]] * (T // 2)
    for exact, padded, most in run_ranks(2, padded_and_exact, 1.0, True, ids, ep=2, shares=True):
        assert most == T * K / 2 and all(map(torch.equal, exact, padded))


def test_more_tokens_than_the_padded_size_are_no_numbers():
    for _, (out, grad_x, _), most in run_ranks(2, padded_and_exact, 1.0, False, ep=2, shares=True):
        assert most > T * K / 2 and out.isnan().all() and grad_x.isnan().all()


@pytest.mark.parametrize("ranks_per_node", [1, 2])
@pytest.mark.parametrize("sizes", [{"ep": 4}, {"ep": 4, "etp": 2}])
def test_tokens_that_cross_to_a_node_once_give_the_same(sizes, ranks_per_node):
    run_ranks(4 * sizes.get("etp", 1), equals_local, ranks_per_node, **sizes)


def send_to_every_node(ctx, ranks_per_node):
    """Every token chooses the same number of experts of every node; bytes across nodes and inside
    of one.
    """
    experts = (torch.arange(16)[:, None] + torch.arange(4) * 2) % E
    x, weights = torch.ones(16, 32, requires_grad=True), torch.ones(16, 4, requires_grad=True)
    options = DispatchOptions(ranks_per_node=ranks_per_node)
    dispatch = build_token_dispatcher(E, ep=ctx.group("ep"), etp=ctx.group("etp"), options=options)
    dispatch(x, Routing(experts, weights))(lambda rows, offs: rows * 2).sum().backward()
    return {("ep", op): ctx.traffic.bytes("ep", op) for op in ("all_to_all_across", "all_to_all")}


MODEL = [
    "--mock-data",
    "--num-layers=1",
    "--hidden-size=32",
    "--num-attention-heads=2",
    "--vocab-size=64",
]
MODEL += ["--seq-length=16", "--num-experts=8", "--moe-router-topk=4", "--moe-ffn-hidden-size=16"]
MODEL += ["--micro-batch-size=1", "--global-batch-size=4"]


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_bytes_across_nodes_are_those_of_the_plan(ranks_per_node):
    flags = [
        *MODEL,
        "--expert-model-parallel-size=4",
        f"--moe-hierarchical-dispatch={ranks_per_node}",
    ]
    planned = sent_bytes(plan_run(load(flags).config, 4, rank=0))
    for sent in run_ranks(4, send_to_every_node, ranks_per_node, ep=4):
        assert sent == {key: planned.get(key, 0) for key in sent}
        assert sent["ep", "all_to_all_across"] > 0 and (sent["ep", "all_to_all"] > 0) == (
            ranks_per_node > 1
        )


def send_all_to_the_first_experts(ctx):
    """Every token uses experts of ep rank 0, so the other ranks receive nothing."""
    ep, etp = ctx.group("ep"), ctx.group("etp")
    x = torch.ones(3, H, requires_grad=True)
    routing = Routing(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    out = build_token_dispatcher(E, ep=ep, etp=etp, options=DROPS)(x, routing)(
        lambda rows, offs: rows / etp.size
    )
    out.sum().backward()
    assert torch.equal(out, x) and torch.equal(x.grad, torch.ones(3, H))


@pytest.mark.parametrize(("num_ranks", "sizes"), [(4, {"ep": 2, "etp": 2}), (4, {"ep": 4})])
def test_a_rank_may_receive_no_tokens(num_ranks, sizes):
    run_ranks(num_ranks, send_all_to_the_first_experts, **sizes, shares=True)


def test_every_token_is_sent_four_times_and_only_to_other_ranks():
    results = run_ranks(4, equals_local, ep=4, shares=True)
    counts = torch.tensor([leaving for leaving, _ in results])  # [from, to] rows
    leaving, arriving = counts.sum(1) - counts.diag(), counts.sum(0) - counts.diag()
    row_bytes, count_bytes = H * 4, 3 * (E // 4) * COUNT_BYTES
    # there, back; the gradient of the way back, and of the way there
    expected = 2 * (leaving + arriving) * row_bytes + count_bytes
    assert [sent for _, sent in results] == expected.tolist()


def send_evenly(ctx):
    """Every rank's tokens choose every expert equally often; bytes over ep and etp, sent and
    predicted.
    """
    ep, etp = ctx.group("ep"), ctx.group("etp")
    experts = (torch.arange(2 * E)[:, None] + torch.arange(K) * 3) % E
    x = torch.ones(2 * E, H, requires_grad=True)
    dispatch = build_token_dispatcher(E, ep=ep, etp=etp)
    out = dispatch(x, Routing(experts, torch.ones(2 * E, K)))(lambda rows, offs: rows * 2)
    out.sum().backward()
    tokens, counts = TOKEN_TRANSFERS * 2 * E * K * H * 4, E * COUNT_BYTES
    predicted = {
        key: count(tokens, counts, ctx.group(key[0]).size) for key, count in EXPERT_BYTES.items()
    }
    return {key: ctx.traffic.bytes(*key) for key in predicted}, predicted


@pytest.mark.parametrize(("num_ranks", "sizes"), SHARDINGS)
def test_the_closed_form_predicts_the_bytes_of_even_routing(num_ranks, sizes):
    for sent, predicted in run_ranks(num_ranks, send_evenly, **sizes, shares=True):
        assert sent == predicted


def test_on_one_rank_the_dispatcher_is_local():
    assert isinstance(
        build_token_dispatcher(E, ep=Group.single_rank("ep"), etp=Group.single_rank("etp")),
        LocalTokenDispatcher,
    )


def test_without_tokens_nothing_happens():
    x = torch.zeros(0, H, requires_grad=True)
    routing = Routing(torch.zeros(0, K, dtype=torch.int64), torch.zeros(0, K))
    out = LocalTokenDispatcher(E)(x, routing)(times_expert(0, E))
    assert out.shape == (0, H)
