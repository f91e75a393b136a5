"""Packed documents: lengths, windows and chunks, with torch's operator replaced by what its
documentation says.
"""

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from nanotrain.attention.backends import BACKENDS, installed_torch
from nanotrain.attention.call import AttentionCall
from nanotrain.attention.sdpa import LayerKernels, SDPAttention
from nanotrain.attention.tiles import Spans
from nanotrain.attention.varlen import VarlenKernel, pack_lengths
from tests.parallel.cp.sequences import Shape, full_mask, random_inputs, run, run_dense, segments

SHAPE = Shape(heads=4, groups=2, batch=2)


def documented(
    query: Tensor, key: Tensor, value: Tensor, *rest, window_size, enable_gqa, **options
) -> Tensor:
    """`varlen_attn`: per document, aligned to its last key; the window is (left, right)."""
    cu_queries, cu_keys, max_queries, max_keys = rest
    assert (
        not options
        and cu_queries.dtype == cu_keys.dtype == torch.int32
        and len(cu_queries) == len(cu_keys)
    )
    assert enable_gqa == (query.shape[1] != key.shape[1]) and window_size[1] == 0
    assert cu_queries[-1] == len(query) and cu_keys[-1] == len(key) == len(value)
    assert cu_queries.diff().max() == max_queries and cu_keys.diff().max() == max_keys
    outputs = []
    for i in range(len(cu_queries) - 1):
        q = query[cu_queries[i] : cu_queries[i + 1]].transpose(0, 1)
        k, v = (
            x[cu_keys[i] : cu_keys[i + 1]].repeat_interleave(2, 1).transpose(0, 1)
            for x in (key, value)
        )
        positions = torch.arange(k.shape[1])
        rows = positions[k.shape[1] - q.shape[1] :, None]
        left = k.shape[1] if window_size[0] < 0 else window_size[0]
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(
            (positions > rows) | (positions < rows - left), -torch.inf
        )
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


@pytest.fixture(autouse=True)
def replaced(monkeypatch):
    monkeypatch.setattr(varlen, "varlen_attn", documented)


@pytest.mark.parametrize("window", [None, 4, 0])
def test_output_and_gradients_are_those_of_the_formula(window):
    core = SDPAttention(LayerKernels(VarlenKernel(), VarlenKernel()))
    inputs = random_inputs(SHAPE, dtype=torch.float64)
    for ids in (segments(SHAPE), None):
        expected = run_dense(inputs, full_mask(ids, length=SHAPE.length, window=window))
        for ours, theirs in zip(run(core, inputs, ids, window=window), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [None, 4])
def test_a_chunk_of_queries_has_the_keys_of_its_documents(window):
    inputs, ids = random_inputs(SHAPE, dtype=torch.float64), segments(SHAPE)
    expected = run_dense(inputs, full_mask(ids, length=SHAPE.length, window=window)).out
    spans = Spans.of(ids, length=SHAPE.length, window=window)
    for start in range(0, SHAPE.length, 6):
        call = AttentionCall(VarlenKernel(), spans, range(start, start + 6), torch.device("cpu"))
        keys, values = (x[:, : start + 6] for x in (inputs.key, inputs.value))
        out = call(inputs.query[:, start : start + 6], key=keys, value=values)
        torch.testing.assert_close(out, expected[:, start : start + 6], rtol=1e-12, atol=1e-12)
    lengths = pack_lengths(call, 2)
    assert (lengths.queries.tolist(), lengths.keys.tolist()) == ([0, 6, 12], [0, 7, 19])
    assert lengths.first_keys == (17, 12)


@pytest.mark.skipif(
    installed_torch() < BACKENDS["varlen flash"].torch_version, reason="not with this torch"
)
def test_the_operator_takes_the_arguments():
    """Its signature, by the registered function for fake tensors."""
    op = torch.ops.torch_attn._varlen_attn
    q, k = torch.empty(12, 4, 8, device="meta"), torch.empty(19, 2, 8, device="meta")
    lengths = torch.empty(3, dtype=torch.int32, device="meta")
    out, lse, _ = op(q, k, k, lengths, lengths, 6, 12, False, None, [4, 0], True)
    assert out.shape == q.shape and lse.shape == (4, 12)
