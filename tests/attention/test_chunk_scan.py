"""Decays as the Triton kernels want them; their values are tested in tests/kernels."""

import torch

from nanotrain.attention.chunk_scan import cumulative_decay


def test_decays_are_sums_from_the_start_of_each_chunk() -> None:
    decay = torch.arange(1.0, 7.0).view(1, 6, 1, 1)
    assert cumulative_decay(decay, 4).flatten().tolist() == [1, 3, 6, 10, 5, 11, 11, 11]
    assert cumulative_decay(decay, 3).flatten().tolist() == [1, 3, 6, 4, 9, 15]
