"""Rotary positions of the last channels, and windows that are planned once."""

from typing import Any

import torch

from nanotrain.attention.call import AttentionCall, TileKernel
from nanotrain.attention.tiles import Spans
from nanotrain.model.compressor import rotate_last, windows_of
from nanotrain.model.rope import Rotary


def test_neighbours_among_the_last_channels_are_rotated_and_rotated_back() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 3, 10, generator=generator, dtype=torch.float64)
    angles = torch.randn(5, 1, 2, generator=generator, dtype=torch.float64)
    rotary = Rotary(angles.cos(), angles.sin())
    rotated = rotate_last(x, rotary)
    assert torch.equal(rotated[..., :6], x[..., :6])
    pairs = torch.view_as_complex(x[..., 6:].unflatten(-1, (2, 2)).contiguous())
    expected = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles))
    torch.testing.assert_close(rotated[..., 6:], expected.flatten(-2), rtol=0, atol=1e-14)
    torch.testing.assert_close(rotate_last(rotated, rotary, back=True), x, rtol=0, atol=1e-14)


def test_the_windows_of_a_microbatch_are_planned_once_by_their_size() -> None:
    spans = Spans.of(torch.tensor([[0] * 5 + [1] * 7]), length=12)
    call: Any = AttentionCall(TileKernel(), spans, range(12), torch.device("cpu"))
    x = torch.zeros(1, 12, 4)
    windows = windows_of(call, x, size=3)
    assert windows is windows_of(call, x, size=3) is not windows_of(call, x, size=4)
    assert windows.last_tokens.tolist() == [[2, 7, 10, -1]]
    assert windows.has_previous.tolist() == [[False, False, True, False]]
