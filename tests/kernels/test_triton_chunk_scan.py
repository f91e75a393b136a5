"""Outputs and states of the Triton kernels of scans against fp64, in Triton's interpreter."""

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from nanotrain.kernels import triton_chunk_scan
from tests.kernels.scan_shapes import (
    CHUNK,
    KINDS,
    LENGTH,
    computed,
    distance,
    expected,
    in_dtype,
    small_inputs,
)

# the interpreter multiplies bf16 as integers, so the 16-bit dtype is fp16
BOUNDS = {torch.float32: 1e-6, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_chunk_scan, "CHUNK_SIZE", CHUNK)
    monkeypatch.setattr(triton_chunk_scan, "VALUE_BLOCK", 16)  # two blocks, one not full
    monkeypatch.setattr(triton_chunk_scan, "CHANNEL_BLOCK", 16)
    monkeypatch.setattr(triton_chunk_scan, "DELTA_BLOCK", 16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "has_documents"), [(torch.float32, True), (torch.float16, False)]
)
def test_chunks_are_the_recurrence(kind: str, dtype: torch.dtype, has_documents: bool) -> None:
    inputs, state = small_inputs(kind, has_documents=has_documents)
    with torch.no_grad():
        found = computed(kind, in_dtype(inputs, dtype), state.float())
        exact = expected(kind, inputs, state)
    for ours, theirs in zip(found, exact, strict=True):
        assert distance(ours, theirs) < BOUNDS[dtype]
    assert found[0].dtype == (torch.float32 if kind == "mamba2" else dtype)
    assert found[1].dtype == torch.float32


def test_states_are_kept_in_the_low_dtype_and_start_at_zero() -> None:
    inputs, _ = small_inputs("gated_delta_net", has_documents=False)
    low = in_dtype(inputs, torch.float16)
    given = triton_chunk_scan.Inputs(
        low.query,
        low.key,
        low.value,
        torch.zeros(1, 2 * CHUNK, low.value.shape[2], 1),
        low.beta[..., 0],
        None,
    )
    sizes = triton_chunk_scan.scan_sizes(given, corrects=True)
    prepared = triton_chunk_scan.prepare(given, sizes)
    kept = triton_chunk_scan.keep_states(given, prepared, initial=None, sizes=sizes)
    assert kept.states.dtype == torch.float16
    assert kept.states.shape[2] == -(-LENGTH // CHUNK)
    assert not kept.states[:, :, 0].any() and kept.states[:, :, 1].any()
    assert torch.equal(prepared.pairs, prepared.pairs.tril())


@pytest.mark.parametrize("kind", ["gated_delta_net", "kda"])
def test_decays_are_summed_from_the_start_of_each_chunk(kind: str) -> None:
    inputs, _ = small_inputs(kind, has_documents=False)
    low = in_dtype(inputs, torch.float32)
    sums = triton_chunk_scan.empty_sums(low.decay)
    given = triton_chunk_scan.Inputs(
        low.query, low.key, low.value, sums, low.beta[..., 0].contiguous(), None
    )
    sizes = triton_chunk_scan.scan_sizes(given, corrects=True)
    with torch.no_grad():
        triton_chunk_scan.prepare(given, sizes, decay=low.decay)
    chunks = low.decay.detach().split(CHUNK, dim=1)
    expected_sums = torch.cat([chunk.cumsum(1) for chunk in chunks], dim=1)
    torch.testing.assert_close(sums[:, :LENGTH], expected_sums)
    last = expected_sums[:, -1:].expand_as(sums[:, LENGTH:])
    torch.testing.assert_close(sums[:, LENGTH:], last)
