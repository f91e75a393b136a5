"""Point-to-point messages: order, both directions at once, rings, counted bytes."""

import pytest
import torch

from nanotrain.comm.group import Group
from nanotrain.comm.send_recv import Message, start_ring_send_recv, start_send_recv
from tests.harness import ranks

LARGE = 1 << 20  # elements; more than any buffer of a backend takes without a receiver


@ranks(2, threads=False, pp=2)
def test_two_ranks_send_to_each_other_at_once(ctx):
    group, peer = ctx.group("pp"), 1 - ctx.rank
    buffers = torch.empty(LARGE)

    sent = torch.full((LARGE,), float(ctx.rank))
    started = start_send_recv([Message(sent, peer)], [Message(buffers, peer)], group=group)
    started.sent.wait()
    (received,) = started.received

    assert received.wait() is buffers
    assert torch.equal(buffers, torch.full((LARGE,), float(peer)))


@ranks(2, threads=False, pp=2)
def test_messages_of_a_pair_arrive_in_the_order_in_which_they_were_sent(ctx):
    group, peer = ctx.group("pp"), 1 - ctx.rank
    if ctx.rank == 0:
        sends = [
            start_send_recv([Message(torch.tensor([n]), peer)], [], group=group) for n in range(20)
        ]
        for started in sends:
            started.sent.wait()
        return
    buffers = [torch.empty(1, dtype=torch.int64) for _ in range(20)]
    receives = [start_send_recv([], [Message(tensor, peer)], group=group) for tensor in buffers]
    for started in reversed(receives):
        started.received[0].wait()

    assert [tensor.item() for tensor in buffers] == list(range(20))


@ranks(4, threads=False, pp=4)
def test_a_batch_has_several_peers(ctx):
    # given: a ring in which each rank sends to both neighbours
    group, size = ctx.group("pp"), 4
    neighbours = [(ctx.rank - 1) % size, (ctx.rank + 1) % size]
    buffers = [torch.empty(3, dtype=torch.bfloat16) for _ in neighbours]
    sent = torch.full((3,), ctx.rank, dtype=torch.bfloat16)

    started = start_send_recv(
        [Message(sent, peer) for peer in neighbours],
        [Message(tensor, peer) for tensor, peer in zip(buffers, neighbours, strict=True)],
        group=group,
    )
    for work in started.received:
        work.wait()
    started.sent.wait()

    assert [tensor[0].item() for tensor in buffers] == neighbours
    # then: each has sent six bytes twice, and receives are not counted
    assert ctx.traffic.bytes("pp", "p2p") == 12 and ctx.traffic.calls("pp", "p2p") == 2


@ranks(3, threads=False, pp=3)
def test_a_receive_completes_before_the_sends_of_its_batch(ctx):
    # given: rank 2 receives from rank 0 only after rank 0 has replied to rank 1; gloo waits one by
    # one
    group, large, small = ctx.group("pp"), torch.zeros(LARGE), torch.ones(1)
    if ctx.rank == 0:
        started = start_send_recv([Message(large, 2)], [Message(small, 1)], group=group)
        started.received[0].wait()
        start_send_recv([Message(small, 1)], [], group=group).sent.wait()
        started.sent.wait()
    elif ctx.rank == 1:
        start_send_recv([Message(small, 0)], [], group=group).sent.wait()
        start_send_recv([], [Message(small, 0)], group=group).received[0].wait()
        start_send_recv([Message(small, 2)], [], group=group).sent.wait()
    else:
        start_send_recv([], [Message(small, 1)], group=group).received[0].wait()
        start_send_recv([], [Message(large, 0)], group=group).received[0].wait()


def test_an_empty_batch_needs_no_process_group():
    started = start_send_recv([], [], group=Group.single_rank("pp"))
    started.sent.wait()
    assert started.received == ()


def test_a_message_to_the_same_rank_or_with_strides_raises():
    with pytest.raises(AssertionError, match="to the same rank"):
        start_send_recv([Message(torch.ones(2), 0)], [], group=Group.single_rank("pp"))
    with pytest.raises(AssertionError, match="memory order"):
        start_send_recv([Message(torch.ones(2, 2).T, 1)], [], group=Group.single_rank("pp"))


@ranks(3, threads=False)
def test_a_ring_receives_from_the_previous_rank_and_counts_sent_bytes(ctx):
    world = ctx.group("world")
    tensors = (torch.full((2, 3), float(ctx.rank)), torch.full((4,), ctx.rank, dtype=torch.int64))
    numbers, integers = start_ring_send_recv(tensors, world).wait()
    previous = (ctx.rank - 1) % 3
    assert torch.equal(numbers, torch.full((2, 3), float(previous)))
    assert integers.tolist() == [previous] * 4
    assert ctx.traffic.bytes("world", "p2p") == 24 + 32


@ranks(4, threads=False, tp=2)
def test_a_ring_stays_inside_its_group_also_of_two(ctx):
    (received,) = start_ring_send_recv([torch.tensor([ctx.rank])], ctx.group("dp")).wait()
    assert received.item() == (ctx.rank + 2) % 4


@ranks(2, threads=False)
def test_ring_messages_in_flight_together_arrive_in_order(ctx):
    first, second = (
        start_ring_send_recv([torch.tensor([10 * n + ctx.rank])], ctx.group("world"))
        for n in (1, 2)
    )
    assert second.wait()[0].item() == 20 + 1 - ctx.rank
    assert first.wait()[0].item() == 10 + 1 - ctx.rank


def test_in_a_ring_of_one_rank_the_output_is_the_input():
    tensor = torch.arange(3)
    assert start_ring_send_recv([tensor], Group.single_rank("cp")).wait()[0] is tensor
