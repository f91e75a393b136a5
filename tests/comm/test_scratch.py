"""Receive buffers are reused and never handed out twice at a time."""

import torch

from nanotrain.comm.scratch import Scratch


def test_a_returned_block_is_reused():
    scratch = Scratch()
    first = scratch.take(100, torch.float32)
    address = first.data_ptr()
    scratch.give(first)
    assert scratch.take(150, torch.bfloat16).data_ptr() == address


def test_two_blocks_in_use_never_overlap():
    scratch = Scratch()
    one, two = scratch.take(100, torch.float32), scratch.take(100, torch.float32)
    one.fill_(1)
    two.fill_(2)
    assert bool((one == 1).all())


def test_a_larger_block_replaces_the_smallest_free_one():
    scratch = Scratch()
    for numel in (10, 20, 40, 80):
        scratch.give(scratch.take(numel, torch.float32))
    blocks = [scratch.take(80, torch.float32)]
    assert blocks[0].untyped_storage().nbytes() == 320
    assert scratch._free == []


def test_a_large_free_block_is_not_used_for_a_small_request():
    scratch = Scratch()
    small, large = scratch.take(10, torch.float32), scratch.take(1000, torch.float32)
    scratch.give(small)
    scratch.give(large)
    assert scratch.take(10, torch.float32).untyped_storage().nbytes() == 40
    assert scratch.take(900, torch.float32).data_ptr() == large.data_ptr()
