"""The ring visits every visible pair once, sends ahead of computing, and takes gradients of any layout."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.parallel.cp import ring
from nanotrain.parallel.cp.attention import build_core_attention
from nanotrain.parallel.cp.ring import plan_steps
from nanotrain.parallel.cp.split import own_chunks
from tests.harness import ranks
from tests.parallel.cp.sequences import Shape, part, run, sequences


@given(st.integers(1, 6), st.integers(1, 3))
def test_the_steps_of_all_ranks_cover_the_causal_triangle_once(size, chunk):
    length = 2 * chunk
    positions = torch.arange(size * length)[None]
    own = [own_chunks(positions, index=index, size=size)[0] for index in range(size)]
    visits = torch.zeros(size * length, size * length, dtype=torch.int64)
    for index in range(size):
        for step in plan_steps(index, size, length=length):
            rows, columns = own[index][step.rows], own[step.source][step.columns]
            block = torch.ones(len(rows), len(columns), dtype=torch.int64)
            visits[rows[:, None], columns] += block.tril() if step.is_causal else block
    assert torch.equal(visits, torch.ones_like(visits).tril())


@given(st.integers(2, 6))
def test_steps_are_equally_long_and_sources_come_from_the_rank_before(size):
    for index in range(size):
        steps = plan_steps(index, size, length=4)
        assert [step.source for step in steps] == [(index - hop) % size for hop in range(size)]
        areas = {(step.rows.stop - step.rows.start) * (step.columns.stop - step.columns.start) for step in steps[1:]}
        assert areas == {8}


@ranks(4, cp=4)
def test_every_transfer_starts_before_the_computation_that_hides_it(ctx, monkeypatch):
    events: list[str] = []

    def noting(name, function):
        def call(*args, **kwargs):
            events.append(name)
            return function(*args, **kwargs)

        return call

    for name in ("start_ring_send_recv", "attend_block", "block_gradients"):
        monkeypatch.setattr(ring, name, noting(name, getattr(ring, name)))
    group = ctx.group("cp")
    run(build_core_attention("p2p", group), part(sequences(Shape(), dtype=torch.float32), group))
    keys, sums = "start_ring_send_recv", "start_ring_send_recv"
    forward = [keys, "attend_block"] * 3 + ["attend_block"]
    backward = [keys, "block_gradients", sums] * 3 + ["block_gradients", sums]
    assert events == forward + backward


@ranks(2, cp=2)
def test_inputs_and_gradients_may_have_any_strides(ctx):
    group = ctx.group("cp")
    given_here = part(sequences(Shape(groups=2), dtype=torch.float64), group)
    expected = run(build_core_attention("p2p", group), given_here)
    strided = type(given_here)(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in given_here))
    for found, value in zip(run(build_core_attention("p2p", group), strided), expected, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-13, atol=1e-13)
    # the gradient of a sum is one number, expanded
    query, key, value = (x.requires_grad_() for x in (given_here.query, given_here.key, given_here.value))
    build_core_attention("p2p", group)(query, key=key, value=value, mask=None).sum().backward()
    ones = type(given_here)(torch.ones_like(given_here.out), *(x.detach() for x in (query, key, value)))
    torch.testing.assert_close(value.grad, run(build_core_attention("p2p", group), ones).value, rtol=1e-13, atol=1e-13)
