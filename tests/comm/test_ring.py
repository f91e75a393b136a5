"""Passing tensors around a group."""

import torch

from nanotrain.comm.group import Group
from nanotrain.comm.ring import start_rotate
from tests.harness import ranks


@ranks(3)
def test_everyone_receives_from_the_member_before_and_books_what_it_sent(ctx):
    world = ctx.group("world")
    tensors = (torch.full((2, 3), float(ctx.rank)), torch.full((4,), ctx.rank, dtype=torch.int64))
    numbers, integers = start_rotate(tensors, world).wait()
    before = (ctx.rank - 1) % 3
    assert torch.equal(numbers, torch.full((2, 3), float(before)))
    assert integers.tolist() == [before] * 4
    assert ctx.traffic.bytes("world", "p2p") == 24 + 32


@ranks(4, tp=2)
def test_a_ring_stays_inside_its_group_also_of_two(ctx):
    (received,) = start_rotate([torch.tensor([ctx.rank])], ctx.group("dp")).wait()
    assert received.item() == (ctx.rank + 2) % 4


@ranks(2)
def test_rotations_in_flight_together_arrive_in_the_order_they_were_started(ctx):
    first, second = (start_rotate([torch.tensor([10 * n + ctx.rank])], ctx.group("world")) for n in (1, 2))
    assert second.wait()[0].item() == 20 + 1 - ctx.rank
    assert first.wait()[0].item() == 10 + 1 - ctx.rank


def test_a_group_of_one_gets_its_own_tensors_back():
    tensor = torch.arange(3)
    assert start_rotate([tensor], Group.single_rank("cp")).wait()[0] is tensor
