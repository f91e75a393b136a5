"""Chunked state space duality is the recurrence token by token, and the scan of transformers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mamba2 import modeling_mamba2

from nanotrain.attention.ssd import span_map, ssd
from tests.attention.delta_inputs import (
    BATCH,
    HEADS,
    KEY_DIM,
    VALUE_DIM,
    random_inputs,
    tensors,
)
from tests.attention.delta_inputs import ssd_recurrence as recurrence


def assert_same(
    found: tuple[Tensor, ...], expected: tuple[Tensor, ...], of: tuple[Tensor, ...], what: str
) -> None:
    """Assert that tensors and their gradients are the same."""
    draw = torch.Generator().manual_seed(9)
    weights = [torch.randn(x.shape, dtype=torch.float64, generator=draw) for x in expected]
    grads = [
        torch.autograd.grad(side, of, weights, retain_graph=True) for side in (found, expected)
    ]
    for a, b in zip((*found, *grads[0]), (*expected, *grads[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("has_documents", [False, True])
def test_any_chunks_are_the_recurrence(has_documents: bool) -> None:
    start = torch.randn(BATCH, HEADS, VALUE_DIM, KEY_DIM, dtype=torch.float64, requires_grad=True)
    for length, size in ((1, 64), (17, 1), (17, 4), (16, 16), (33, 64), (40, 8)):
        inputs = random_inputs(length, by_channel=False, documents=has_documents)
        for state in (None, start):
            of = tensors(inputs) + (() if state is None else (state,))
            assert_same(
                ssd(inputs, state, chunk_size=size),
                recurrence(inputs, state),
                of,
                f"{length} by {size}",
            )


@pytest.mark.parametrize("has_documents", [False, True])
def test_a_span_is_an_affine_map_of_the_state(has_documents: bool) -> None:
    start = torch.randn(BATCH, HEADS, VALUE_DIM, KEY_DIM, dtype=torch.float64, requires_grad=True)
    inputs = random_inputs(13, by_channel=False, documents=has_documents)
    factor, offset = span_map(inputs)
    of = (inputs.key, inputs.value, inputs.decay, inputs.beta, start)
    assert_same((factor * start + offset,), recurrence(inputs, start)[1:], of, "final state")


def test_strong_decays_do_not_overflow() -> None:
    inputs = random_inputs(24, by_channel=False, dtype=torch.float32)
    out, _ = ssd(replace(inputs, decay=inputs.decay * 1e4), chunk_size=8)
    grads = torch.autograd.grad(out.sum(), tensors(inputs))
    assert all(x.isfinite().all() for x in (out, *grads))


def test_the_scan_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64, which its casts to fp32 would round."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    scan: Any = modeling_mamba2.mamba2_chunk_scan
    inputs = random_inputs(21, by_channel=False)
    start = torch.randn(BATCH, HEADS, VALUE_DIM, KEY_DIM, dtype=torch.float64, requires_grad=True)
    rates = -torch.rand(HEADS, dtype=torch.float64) - 0.5
    inputs = replace(inputs, decay=inputs.beta * rates[:, None])
    theirs = getattr(scan, "__wrapped__", scan)(
        *(inputs.value, inputs.beta[..., 0], rates, inputs.key, inputs.query),
        chunk_size=8, initial_states=start, return_final_states=True,
    )  # fmt: skip
    of = (inputs.query, inputs.key, inputs.value, inputs.beta, start)
    assert_same(ssd(inputs, start, chunk_size=4), theirs, of, "transformers")
