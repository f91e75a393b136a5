"""The ring covers every causal pair once, sends ahead of computing, and takes inputs and gradients
of any strides.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.attention import tiles
from nanotrain.attention.chunk_kernels import ChunkGradients
from nanotrain.attention.tiles import Tile, TilePlan
from nanotrain.comm.group import Group
from nanotrain.parallel.cp import build_core_attention, ring
from nanotrain.parallel.cp.ring import RingAttention, plan_ring
from nanotrain.parallel.cp.split import local_positions
from tests.harness import ranks
from tests.parallel.cp.sequences import Shape, Tensors, random_inputs, run, shard


@given(st.integers(1, 6), st.integers(1, 3))
def test_the_steps_of_all_ranks_cover_the_causal_triangle_once(size, chunk):
    length = 2 * chunk
    positions = [local_positions(size * length, index=index, size=size) for index in range(size)]
    count = torch.zeros(size * length, size * length, dtype=torch.int64)
    for index in range(size):
        for source, tile in plan_ring(index, size, length=length):
            queries, keys = positions[index][tile.queries], positions[source][tile.keys]
            pairs = torch.ones(len(queries), len(keys), dtype=torch.int64)
            count[queries[:, None], keys] += pairs.tril() if tile.is_causal else pairs
    assert torch.equal(count, torch.ones_like(count).tril())


@given(st.integers(2, 6))
def test_steps_cost_the_same_and_sources_come_in_ring_order(size):
    for index in range(size):
        steps = plan_ring(index, size, length=4)
        assert [source for source, _ in steps] == [
            (index - distance) % size for distance in range(size)
        ]
        costs = {
            (tile.queries.stop - tile.queries.start) * (tile.keys.stop - tile.keys.start)
            for _, tile in steps[1:]
        }
        assert costs == {8}


@ranks(4, cp=4, threads=False)
def test_every_transfer_starts_before_the_computation_that_hides_it(ctx, monkeypatch):
    events: list[str] = []

    def recorded(name, function):
        def call(*args, **kwargs):
            events.append(name)
            return function(*args, **kwargs)

        return call

    send = "start_ring_send_recv"
    monkeypatch.setattr(ring, send, recorded(send, getattr(ring, send)))
    for name in ("chunk_forward", "chunk_backward"):
        monkeypatch.setattr(tiles, name, recorded(name, getattr(tiles, name)))
    group = ctx.group("cp")
    run(
        build_core_attention("p2p", group),
        shard(random_inputs(Shape(), dtype=torch.float32), group),
    )
    forward = [send, "chunk_forward"] * 3 + ["chunk_forward"]
    # keys, computation, gradient sums
    backward = [send, "chunk_backward", send] * 3 + ["chunk_backward", send]
    assert events == forward + backward


@ranks(2, cp=2)
def test_inputs_and_gradients_may_have_any_strides(ctx):
    group = ctx.group("cp")
    inputs = shard(random_inputs(Shape(groups=2), dtype=torch.float64), group)
    expected = run(build_core_attention("p2p", group), inputs)
    strided = Tensors(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs))
    for result, value in zip(
        run(build_core_attention("p2p", group), strided), expected, strict=True
    ):
        torch.testing.assert_close(result, value, rtol=1e-13, atol=1e-13)
    # the gradient of a sum is one number, expanded
    query, key, value = (x.requires_grad_() for x in (inputs.query, inputs.key, inputs.value))
    core = build_core_attention("p2p", group)
    mask = core.plan_mask(None, tokens=query[..., 0, 0])
    core(query, key=key, value=value, mask=mask, scores=None).sum().backward()
    ones = Tensors(torch.ones_like(inputs.out), *(x.detach() for x in (query, key, value)))
    torch.testing.assert_close(
        value.grad, run(build_core_attention("p2p", group), ones).value, rtol=1e-13, atol=1e-13
    )


def test_results_and_gradients_of_the_steps_are_accumulated_in_fp32(monkeypatch):
    # Given four steps on one rank, whose gradients are 1 and three times 2^-9, which bf16 does not
    # add to 1,
    positions, everything = torch.arange(4), slice(None)
    plans = tuple(
        TilePlan((Tile(everything, everything, everything),), positions, positions)
        for _ in range(4)
    )
    forward_tiles, totals = ring.forward_tiles, []

    def forward(plan, inputs, *, total, **options):
        totals.append(None if total is None else total.out.dtype)
        return forward_tiles(plan, inputs, total=total, **options)

    def gradients(plan, inputs, **_):
        value = 1.0 if plan is plans[0] else 2.0**-9
        yield plan.tiles[0], ChunkGradients(*(torch.full(x.shape, value) for x in inputs))

    monkeypatch.setattr(ring, "forward_tiles", forward)
    monkeypatch.setattr(ring, "tile_gradients", gradients)
    query, key, value = (
        torch.ones(1, 4, 2, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )
    ring_attention = RingAttention(Group.single_rank("cp"))
    ring_attention(query, key=key, value=value, mask=plans, scores=None).sum().backward()
    assert totals == [None] + [torch.float32] * 3
    for tensor in (query, key, value):
        assert torch.equal(tensor.grad, torch.full_like(tensor, 1 + 3 * 2.0**-9))
