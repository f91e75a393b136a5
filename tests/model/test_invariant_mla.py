"""The rotary key that all heads of MLA share: plain values, and gradients in a fixed order."""

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from nanotrain.model.invariant_mla import use_ordered_heads
from nanotrain.model.mla import MultiLatentAttention
from nanotrain.parallel.tp.invariant import UnitBlocks
from nanotrain.parallel.tp.region import TensorParallel

NUM_HEADS = 6


def gradient(shared: Tensor, factors: Tensor, num_blocks: int) -> Tensor:
    """The gradient of a shared key [B, S, R] whose heads have other factors [B, S, N, R]."""
    layer: Any = SimpleNamespace(tensor_parallel=TensorParallel.single_rank(), forward=None)
    blocks = UnitBlocks(num_blocks, block_length=4, num_tokens=8)
    use_ordered_heads(cast(MultiLatentAttention, layer), blocks)
    keys = layer.share_key(shared, None, num_heads=factors.shape[2])
    assert torch.equal(keys, shared[:, :, None].expand_as(factors))
    (keys * factors).sum().backward()
    assert shared.grad is not None
    return shared.grad


def test_gradients_of_heads_are_added_by_blocks() -> None:
    draw = torch.Generator().manual_seed(1)
    values = torch.randn(2, 4, 3, generator=draw)
    factors = torch.randn(2, 4, NUM_HEADS, 3, generator=draw)
    together = gradient(values.clone().requires_grad_(), factors, num_blocks=2)
    torch.testing.assert_close(together, factors.sum(2))
    halves = []
    for part in factors.chunk(2, dim=2):  # two ranks with half of the heads each
        halves.append(gradient(values.clone().requires_grad_(), part, num_blocks=1))
    assert torch.equal(halves[0] + halves[1], together)
