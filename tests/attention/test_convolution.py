"""The package causal_conv1d is called with what it documents; torch computes the same."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.attention import convolution
from nanotrain.attention.convolution import causal_conv, short_convolution


def their_conv(
    x: Tensor, weight: Tensor, bias: Tensor, *, seq_idx: Tensor | None, activation: str | None
) -> Tensor:
    """causal_conv1d_fn: [B, D, S], tokens of other sequences are zeros."""
    total = bias[:, None].expand_as(x)
    size = weight.shape[1]
    for k in range(size):
        shift = size - 1 - k
        tokens = F.pad(x, (shift, 0))[..., : x.shape[2]]
        if seq_idx is not None:
            assert seq_idx.dtype == torch.int32
            earlier = F.pad(seq_idx, (shift, 0), value=-7)[:, : x.shape[2]]
            tokens = tokens * (earlier == seq_idx)[:, None]
        total = total + tokens * weight[:, k, None]
    return F.silu(total) if activation == "silu" else total


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("activation", [None, F.silu])
def test_the_package_computes_what_torch_does(has_documents, activation, monkeypatch) -> None:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    window, weight, bias = normal(2, 3 + 9, 5), normal(5, 4), normal(5)
    segments = None
    if has_documents:
        segments = torch.tensor([[-1] * 3 + [0] * 4 + [1] * 5, [3] * 7 + [4] * 5])
    exact = causal_conv(window, weight, bias=bias, segment_ids=segments)
    exact = exact if activation is None else activation(exact)
    monkeypatch.setattr(convolution, "kernel_for", lambda *_: "causal_conv1d")
    package = SimpleNamespace(causal_conv1d_fn=their_conv)
    monkeypatch.setitem(sys.modules, "causal_conv1d", package)
    options = {"bias": bias, "segment_ids": segments, "activation": activation}
    found = short_convolution(window, weight, **options)
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)


def test_other_activations_are_applied_after_the_convolution(monkeypatch) -> None:
    monkeypatch.setattr(convolution, "kernel_for", lambda *_: "causal_conv1d")
    monkeypatch.setitem(sys.modules, "causal_conv1d", None)  # an import would raise
    window, weight = torch.ones(1, 4, 2), torch.ones(2, 3)
    options = {"bias": None, "segment_ids": None, "activation": torch.neg}
    assert torch.equal(short_convolution(window, weight, **options), -3 * torch.ones(1, 2, 2))
