"""Tokens reach their experts wherever these are, and no byte more than needed is sent."""

import pytest
import torch

from nanotrain.comm.group import Group
from nanotrain.parallel.ep.dispatch import Choice, LocalDispatch, RemoteDispatch, build_dispatch
from nanotrain.parallel.ep.traffic import ExpertTraffic, ep_bytes, etp_bytes
from tests.harness import run_ranks

E, H, T, K = 8, 4, 12, 3


def tokens_of(rank):
    """What a rank brings: more tokens on some than on others, one with none; some choices dropped."""
    generator = torch.Generator().manual_seed(rank)
    num_tokens = 0 if rank == 2 else T + rank
    x = torch.randn(num_tokens, H, generator=generator).requires_grad_()
    scores = torch.rand(num_tokens, E, generator=generator)
    scores[:, 5] = -1.0  # nobody chooses expert 5
    experts = scores.topk(K, dim=-1).indices
    experts[::4, 0] = E
    weights = torch.rand(num_tokens, K, generator=generator).requires_grad_()
    return x, Choice(experts, weights), torch.randn(num_tokens, H, generator=generator)


def outcome(dispatch, x, choice, grad, *, run):
    out = dispatch(x, choice, run=run)
    return out.detach(), *torch.autograd.grad(out, (x, choice.weights), grad)


def times_expert(first, last, share=1.0):
    """Experts that multiply by their number, or by a share of it; zero where no expert is asked."""

    def run(rows, ends):
        numbers = torch.arange(first, last) + 1.0
        each = numbers.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)))
        factors = torch.cat([each, torch.zeros(len(rows) - len(each))])
        return rows * factors[:, None] * share

    return run


def equals_local(ctx):
    ep, etp = ctx.group("ep"), ctx.group("etp")
    x, choice, grad = tokens_of(ctx.rank)
    expected = outcome(LocalDispatch(E), x, choice, grad, run=times_expert(0, E))
    size = E // ep.size
    mine = times_expert(ep.index * size, (ep.index + 1) * size, share=1 / etp.size)
    dispatch = build_dispatch(E, ep=ep, etp=etp)
    assert isinstance(dispatch, RemoteDispatch)
    for found, wanted in zip(outcome(dispatch, x, choice, grad, run=mine), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    return [(choice.experts // size == other).sum().item() for other in range(ep.size)], ctx.traffic.bytes(
        op="all_to_all"
    )


SPREADS = [(2, {"ep": 2}), (2, {"etp": 2}), (4, {"ep": 4}), (4, {"ep": 2}), (4, {"ep": 2, "etp": 2})]


@pytest.mark.parametrize(("num_ranks", "sizes"), SPREADS)
def test_any_spread_of_the_experts_gives_what_one_rank_gives(num_ranks, sizes):
    run_ranks(num_ranks, equals_local, **sizes)


def test_every_row_travels_four_times_and_only_to_other_ranks():
    answers = run_ranks(4, equals_local, ep=4)
    counts = torch.tensor([leaving for leaving, _ in answers])  # [from, to] rows
    leaving, arriving = counts.sum(1) - counts.diag(), counts.sum(0) - counts.diag()
    row_bytes, count_bytes = H * 4, 3 * (E // 4) * 8
    # there, back; the gradient of the way back, and of the way there
    expected = 2 * (leaving + arriving) * row_bytes + count_bytes
    assert [sent for _, sent in answers] == expected.tolist()


def send_evenly(ctx):
    """Every rank's tokens choose every expert equally often; bytes over ep and etp, sent and as foretold."""
    ep, etp = ctx.group("ep"), ctx.group("etp")
    experts = (torch.arange(2 * E)[:, None] + torch.arange(K) * 3) % E
    x = torch.ones(2 * E, H, requires_grad=True)
    dispatch = build_dispatch(E, ep=ep, etp=etp)
    out = dispatch(x, Choice(experts, torch.ones(2 * E, K)), run=lambda rows, ends: rows * 2)
    out.sum().backward()
    traffic = ExpertTraffic(2 * E, K, num_experts=E, hidden=H, itemsize=4)
    foretold = {"ep": ep_bytes(traffic, ep.size), "etp": etp_bytes(traffic, etp.size)}
    return {name: ctx.traffic.bytes(name) for name in foretold}, foretold


@pytest.mark.parametrize(("num_ranks", "sizes"), SPREADS)
def test_the_closed_form_foretells_the_bytes_of_an_even_choice(num_ranks, sizes):
    for sent, foretold in run_ranks(num_ranks, send_evenly, **sizes):
        assert sent == foretold


def test_alone_the_experts_are_local():
    assert isinstance(build_dispatch(E, ep=Group.single_rank("ep"), etp=Group.single_rank("etp")), LocalDispatch)


def test_without_tokens_nothing_happens():
    x = torch.zeros(0, H, requires_grad=True)
    choice = Choice(torch.zeros(0, K, dtype=torch.int64), torch.zeros(0, K))
    out = LocalDispatch(E)(x, choice, run=times_expert(0, E))
    assert out.shape == (0, H)
