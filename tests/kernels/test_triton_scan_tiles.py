"""Tiles of the Triton kernels of scans, each in a small kernel of Triton's interpreter."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

import triton
import triton.language as tl

from nanotrain.kernels.triton_scan_inputs import Inputs, Sizes
from nanotrain.kernels.triton_scan_tiles import decayed_pairs, unit_lower_inverse

C, K = 16, 16


def sizes(*, by_channel: bool) -> Sizes:
    """One head of 16 channels in chunks of 16 tokens."""
    return Sizes(1, 1, K, K, K, K, C, 4, K if by_channel else 1, by_channel, True, 1.0, 1e-6)


@triton.jit
def invert(system, out, sizes) -> None:
    """The inverse of one matrix."""
    offsets = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out + offsets, unit_lower_inverse(tl.load(system + offsets), sizes))


@triton.jit
def multiply(x, keys, decay, out, data, sizes) -> None:
    """Pairs of one chunk, with decays per channel."""
    rows = tl.arange(0, 16)
    offsets = rows[:, None] * 16 + rows[None, :]
    given = tl.load(decay + offsets)
    pairs = decayed_pairs(
        tl.load(x + offsets), tl.load(keys + offsets), given, data, rows.to(tl.int64), 0, sizes
    )
    tl.store(out + offsets, pairs)


def test_the_inverse_of_a_system_of_equal_keys() -> None:
    system = torch.ones(C, C).tril(-1)  # far from the identity
    out = torch.empty(C, C)
    invert[(1,)](system, out, sizes(by_channel=False).constants())
    exact = torch.linalg.inv(torch.eye(C).double() + system.double())
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-6)


def test_pairs_with_decays_of_any_strength() -> None:
    draw = torch.Generator().manual_seed(0)
    x, keys = (torch.randn(C, K, generator=draw) for _ in range(2))
    strength = torch.logspace(-3, 3, K)
    decay = -(torch.rand(C, K, generator=draw) * strength).cumsum(0)
    data = Inputs(x, keys, x, decay, x, None)
    out = torch.empty(C, C)
    multiply[(1,)](x, keys, decay, out, data, sizes(by_channel=True).constants())
    logarithms = decay.double()[:, None] - decay.double()[None]
    exact = (x.double()[:, None] * keys.double()[None] * logarithms.clamp(max=0).exp()).sum(-1)
    torch.testing.assert_close(out.tril().double(), exact.tril(), rtol=1e-5, atol=1e-5)
