"""Sums over heads around the Triton kernels of scans; their values are tested in tests/kernels."""

import torch

from nanotrain.attention.chunk_scan import _sum_heads


def test_gradients_of_keys_are_summed_over_the_heads_that_share_them() -> None:
    grad = torch.arange(1.0, 9.0).view(1, 1, 4, 2)
    assert _sum_heads(grad, 2).tolist() == [[[[1 + 3, 2 + 4], [5 + 7, 6 + 8]]]]
    assert _sum_heads(grad, 4) is grad
