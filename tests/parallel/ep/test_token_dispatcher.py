"""Token dispatch gives the same on any number of ranks and sends no more bytes than needed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.comm.group import Group
from nanotrain.parallel.ep.token_dispatcher import (
    AllToAllTokenDispatcher,
    LocalTokenDispatcher,
    Routing,
    build_token_dispatcher,
    inverse_of,
    permute,
    plan_permutation,
    reorder,
    unpermute,
)
from nanotrain.train.plans.traffic import COUNT_BYTES, EXPERT_BYTES, TOKEN_TRIPS
from tests.harness import run_ranks

E, H, T, K = 8, 4, 12, 3


def tokens_of(rank):
    """The tokens of a rank: uneven counts, none on rank 2; some pairs dropped."""
    generator = torch.Generator().manual_seed(rank)
    num_tokens = 0 if rank == 2 else T + rank
    x = torch.randn(num_tokens, H, generator=generator).requires_grad_()
    scores = torch.rand(num_tokens, E, generator=generator)
    scores[:, 5] = -1.0  # no token uses expert 5
    experts = scores.topk(K, dim=-1).indices
    experts[::4, 0] = E
    weights = torch.rand(num_tokens, K, generator=generator).requires_grad_()
    return x, Routing(experts, weights), torch.randn(num_tokens, H, generator=generator)


def outcome(dispatch, x, routing, grad, *, run_experts):
    out = dispatch(x, routing, run_experts=run_experts)
    return out.detach(), *torch.autograd.grad(out, (x, routing.topk_weights), grad)


def times_expert(first, last, share=1.0):
    """Experts that multiply by their index + 1, or by a share of it; zero for dropped tokens."""

    def run(rows, offs):
        numbers = torch.arange(first, last) + 1.0
        each = numbers.repeat_interleave(offs.diff(prepend=offs.new_zeros(1)))
        factors = torch.cat([each, torch.zeros(len(rows) - len(each))])
        return rows * factors[:, None] * share

    return run


def equals_local(ctx):
    ep, etp = ctx.group("ep"), ctx.group("etp")
    x, routing, grad = tokens_of(ctx.rank)
    expected = outcome(LocalTokenDispatcher(E), x, routing, grad, run_experts=times_expert(0, E))
    size = E // ep.size
    mine = times_expert(ep.index * size, (ep.index + 1) * size, share=1 / etp.size)
    dispatch = build_token_dispatcher(E, ep=ep, etp=etp)
    assert isinstance(dispatch, AllToAllTokenDispatcher)
    for actual, wanted in zip(outcome(dispatch, x, routing, grad, run_experts=mine), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)
    return [(routing.topk_ids // size == rank).sum().item() for rank in range(ep.size)], ctx.traffic.bytes(
        op="all_to_all"
    )


SHARDINGS = [(2, {"ep": 2}), (2, {"etp": 2}), (4, {"ep": 4}), (4, {"ep": 2}), (4, {"ep": 2, "etp": 2})]


@pytest.mark.parametrize(("num_ranks", "sizes"), SHARDINGS)
def test_any_sharding_of_the_experts_equals_one_rank(num_ranks, sizes):
    run_ranks(num_ranks, equals_local, **sizes)


def send_all_to_the_first_experts(ctx):
    """Every token uses experts of ep rank 0, so the other ranks receive nothing."""
    ep, etp = ctx.group("ep"), ctx.group("etp")
    x = torch.ones(3, H, requires_grad=True)
    routing = Routing(torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    out = build_token_dispatcher(E, ep=ep, etp=etp)(x, routing, run_experts=lambda rows, offs: rows / etp.size)
    out.sum().backward()
    assert torch.equal(out, x) and torch.equal(x.grad, torch.ones(3, H))


@pytest.mark.parametrize(("num_ranks", "sizes"), [(4, {"ep": 2, "etp": 2}), (4, {"ep": 4})])
def test_a_rank_may_receive_no_tokens(num_ranks, sizes):
    run_ranks(num_ranks, send_all_to_the_first_experts, **sizes)


def test_every_token_is_sent_four_times_and_only_to_other_ranks():
    results = run_ranks(4, equals_local, ep=4)
    counts = torch.tensor([leaving for leaving, _ in results])  # [from, to] rows
    leaving, arriving = counts.sum(1) - counts.diag(), counts.sum(0) - counts.diag()
    row_bytes, count_bytes = H * 4, 3 * (E // 4) * 8
    # there, back; the gradient of the way back, and of the way there
    expected = 2 * (leaving + arriving) * row_bytes + count_bytes
    assert [sent for _, sent in results] == expected.tolist()


def send_evenly(ctx):
    """Every rank's tokens choose every expert equally often; bytes over ep and etp, sent and predicted."""
    ep, etp = ctx.group("ep"), ctx.group("etp")
    experts = (torch.arange(2 * E)[:, None] + torch.arange(K) * 3) % E
    x = torch.ones(2 * E, H, requires_grad=True)
    dispatch = build_token_dispatcher(E, ep=ep, etp=etp)
    out = dispatch(x, Routing(experts, torch.ones(2 * E, K)), run_experts=lambda rows, offs: rows * 2)
    out.sum().backward()
    tokens, counts = TOKEN_TRIPS * 2 * E * K * H * 4, E * COUNT_BYTES
    predicted = {key: count(tokens, counts, ctx.group(key[0]).size) for key, count in EXPERT_BYTES.items()}
    return {key: ctx.traffic.bytes(*key) for key in predicted}, predicted


@pytest.mark.parametrize(("num_ranks", "sizes"), SHARDINGS)
def test_the_closed_form_predicts_the_bytes_of_even_routing(num_ranks, sizes):
    for sent, predicted in run_ranks(num_ranks, send_evenly, **sizes):
        assert sent == predicted


def test_on_one_rank_the_dispatcher_is_local():
    assert isinstance(
        build_token_dispatcher(E, ep=Group.single_rank("ep"), etp=Group.single_rank("etp")), LocalTokenDispatcher
    )


def test_without_tokens_nothing_happens():
    x = torch.zeros(0, H, requires_grad=True)
    routing = Routing(torch.zeros(0, K, dtype=torch.int64), torch.zeros(0, K))
    out = LocalTokenDispatcher(E)(x, routing, run_experts=times_expert(0, E))
    assert out.shape == (0, H)


H = 5


@st.composite
def routings(draw):
    """[T, K] experts with E in place of dropped ones, and E."""
    num_experts, topk = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    rows = draw(st.lists(st.lists(st.integers(0, num_experts), min_size=topk, max_size=topk), min_size=1, max_size=12))
    return torch.tensor(rows), num_experts


@given(routings())
def test_permuted_tokens_are_sorted_by_expert_and_every_pair_has_its_position(drawn):
    experts, num_experts = drawn
    plan = plan_permutation(experts, num_experts)
    in_rows = experts.flatten()[plan.order]
    assert in_rows.tolist() == sorted(experts.flatten().tolist())
    assert torch.equal(plan.order[plan.inverse.flatten()], torch.arange(experts.numel()))
    assert plan.tokens_per_expert.tolist() == [(experts == expert).sum().item() for expert in range(num_experts)]


@given(routings(), st.booleans())
def test_permute_and_unpermute_have_the_gradients_of_plain_indexing(drawn, omits_dropped):
    # given: tokens, weights, and rows with or without those of dropped choices at their end
    experts, num_experts = drawn
    num_tokens, topk = experts.shape
    plan = plan_permutation(experts, num_experts)
    kept = int((experts < num_experts).sum())
    num_rows = kept if omits_dropped else experts.numel()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, H, generator=generator, dtype=torch.float64).requires_grad_()
    weights = torch.rand(num_tokens, topk, generator=generator, dtype=torch.float64).requires_grad_()
    grad = torch.randn(num_tokens, H, generator=generator, dtype=torch.float64)
    is_kept = (experts < num_experts).double()[..., None]
    factor = (experts + 1).double()[..., None]  # what "expert e" does: times e + 1

    # when
    rows = permute(x, plan, num_permuted=num_rows)
    in_rows = experts.flatten()[plan.order][:num_rows]
    outputs = rows * ((in_rows + 1) * (in_rows < num_experts)).double()[:, None]
    out = unpermute(outputs, plan, topk_weights=weights)
    actual = torch.autograd.grad(out, (x, weights), grad)

    # then
    expected = (x[:, None] * factor * is_kept * weights[..., None]).sum(1)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    for value, reference in zip(actual, torch.autograd.grad(expected, (x, weights), grad), strict=True):
        torch.testing.assert_close(value, reference, rtol=1e-6, atol=1e-6)


@given(st.permutations(range(7)))
def test_reorder_is_undone_by_the_inverse(numbers):
    order = torch.tensor(numbers)
    rows = torch.arange(14.0).view(7, 2).requires_grad_()
    there = reorder(rows, order)
    assert torch.equal(there, rows[order])
    assert torch.equal(reorder(there, inverse_of(order)), rows)
    (grad,) = torch.autograd.grad(there, rows, torch.arange(14.0).view(7, 2))
    assert torch.equal(grad[order], torch.arange(14.0).view(7, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_tokens_are_summed_in_fp32(dtype):
    plan = plan_permutation(torch.tensor([[0, 1, 2]]), 3)
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=dtype)  # one by one, bf16 would lose both ones
    out = unpermute(rows, plan, topk_weights=torch.ones(1, 3))
    assert out.dtype == dtype
    assert out.item() == 258.0


def test_a_gradient_in_bf16_is_summed_over_the_experts_in_fp32_and_rounded_once() -> None:
    torch.manual_seed(0)
    permutation = plan_permutation(torch.rand(40, 6).topk(4).indices, 6)
    x = torch.randn(40, 16, dtype=torch.bfloat16, requires_grad=True)
    out_grad = torch.randn(160, 16, dtype=torch.bfloat16)
    (grad,) = torch.autograd.grad(permute(x, permutation, num_permuted=160), x, out_grad)
    assert torch.equal(grad, sum(out_grad[permutation.inverse[:, k]].float() for k in range(4)).bfloat16())


def test_gradients_of_the_weights_are_products_in_fp32() -> None:
    torch.manual_seed(0)
    permutation = plan_permutation(torch.rand(20, 6).topk(3).indices, 6)
    rows, out_grad = torch.randn(60, 16, dtype=torch.bfloat16), torch.randn(20, 16, dtype=torch.bfloat16)
    weights = torch.rand(20, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(unpermute(rows, permutation, topk_weights=weights), weights, out_grad)
    expected = (rows.double()[permutation.inverse] * out_grad.double()[:, None]).sum(-1)
    torch.testing.assert_close(grad, expected.float())
