"""Gradients of the Triton kernels of scans against fp64, in Triton's interpreter."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from nanotrain.kernels import triton_chunk_scan
from tests.attention.delta_inputs import tensors
from tests.kernels.scan_shapes import (
    CHUNK,
    KINDS,
    computed,
    distance,
    expected,
    in_dtype,
    small_inputs,
)

BOUNDS = {torch.float32: 2e-6, torch.float16: 5e-3}


CASES = [(kind, torch.float32, True) for kind in KINDS] + [("kda", torch.float16, False)]


@pytest.mark.parametrize(("kind", "dtype", "has_documents"), CASES)
def test_gradients_are_those_of_the_recurrence(
    kind: str, dtype: torch.dtype, has_documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_chunk_scan, "CHUNK_SIZE", CHUNK)
    monkeypatch.setattr(triton_chunk_scan, "VALUE_BLOCK", 16)
    monkeypatch.setattr(triton_chunk_scan, "CHANNEL_BLOCK", 16)
    monkeypatch.setattr(triton_chunk_scan, "DELTA_BLOCK", 16)
    inputs, state = small_inputs(kind, has_documents=has_documents)
    low = in_dtype(inputs, dtype)
    low_state = state.detach().float().requires_grad_()
    exact = expected(kind, inputs, state)
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(x.shape, generator=draw).half() for x in exact]
    found = computed(kind, low, low_state)
    given = [weight.to(x.dtype) for weight, x in zip(weights, found, strict=True)]
    grads = torch.autograd.grad(found, (*tensors(low), low_state), given)
    exact_weights = [weight.double() for weight in weights]
    exact_grads = torch.autograd.grad(exact, (*tensors(inputs), state), exact_weights)
    for ours, theirs in zip(grads, exact_grads, strict=True):
        assert distance(ours, theirs) < BOUNDS[dtype]
