"""Attention in tiles gives output and gradients of the formula, and keeps no mask for the backward."""

from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from nanotrain.attention import tiles
from nanotrain.attention.scores import ScoreOptions, add_sink
from nanotrain.attention.sdpa import DenseKernel, LayerKernels, SDPAttention
from nanotrain.attention.tile_attention import attend_tiles, backward_tiles, forward_tiles
from nanotrain.attention.tiles import LocalChunk, Spans, plan_chunks
from tests.parallel.cp.sequences import Shape, full_mask, random_inputs, run, run_dense, segments

BOUNDS = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("queries_per_mask", [1, 5, 128])
def test_output_and_gradients_are_those_of_the_formula(queries_per_mask, window, monkeypatch):
    monkeypatch.setattr(tiles, "QUERIES_PER_MASK", queries_per_mask)
    for shape in (Shape(heads=4, groups=2, batch=3), Shape(head_dim=12, value_head_dim=8)):
        expected = run_dense(
            random_inputs(shape, dtype=torch.float64), full_mask(segments(shape), length=shape.length, window=window)
        )
        for dtype, bound in BOUNDS.items():
            found = run(SDPAttention(), random_inputs(shape, dtype=dtype), segments(shape), window=window)
            for ours, theirs in zip(found, expected, strict=True):
                assert (ours.double() - theirs).abs().max() <= bound * theirs.abs().max(), dtype


def kept(core, *, window=None) -> int:
    """Bytes that autograd keeps of attention to 1,024 tokens in four documents."""
    shape = Shape(batch=1, length=1024, heads=1, groups=1)
    inputs = random_inputs(shape, dtype=torch.float32)
    ids, storages = torch.arange(1024)[None] // 256, {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    query, key, value = (x.clone().requires_grad_() for x in (inputs.query, inputs.key, inputs.value))
    mask = core.plan_mask(ids, tokens=query[..., 0, 0], window=window)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = core(query, key=key, value=value, mask=mask)
    assert out.shape == value.shape
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def test_no_tensor_of_queries_by_keys_is_kept():
    tensor = 1024 * 8 * 4
    linear = 4 * tensor + 1024 * 4  # query, key, value, output; log-sum-exp
    assert kept(SDPAttention()) == kept(SDPAttention(), window=100) == linear
    assert kept(SDPAttention(LayerKernels(DenseKernel()))) >= linear + 1024 * 1024, "a dense mask is kept"


@pytest.mark.parametrize("groups", [4, 2])
def test_what_several_tiles_contribute_to_is_accumulated_in_fp32(groups):
    given = random_inputs(Shape(groups=groups), dtype=torch.bfloat16)
    query, key, value, grad = (x.transpose(1, 2) for x in (given.query, given.key, given.value, given.out))
    positions, spans = torch.arange(24), Spans.of(None, length=24)
    # the second half of the queries: keys before them, and their own
    pairs = [(LocalChunk(range(12, 24)), LocalChunk(range(24)), True)]
    plan, inputs = plan_chunks(spans, pairs, queries=positions[12:], keys=positions), (query[:, :, 12:], key, value)
    merged = forward_tiles(plan, inputs, scores=None)
    assert merged.out.dtype is merged.lse.dtype is torch.float32
    merged = replace(merged, out=merged.out.bfloat16())
    gradients = backward_tiles(plan, inputs, merged=merged, scores=None, grad=grad[:, :, 12:])
    assert (gradients.query.dtype, gradients.key.dtype) == (torch.float32, torch.bfloat16)


def test_a_sink_is_added_before_the_output_is_rounded():
    given, sink = random_inputs(Shape(), dtype=torch.bfloat16), torch.tensor([0.3, -1.0, 2.0, 0.7])
    positions, chunk = torch.arange(24), LocalChunk(range(24))
    plan = plan_chunks(Spans.of(None, length=24), [(chunk, chunk, True)], queries=positions, keys=positions)
    total = forward_tiles(plan, tuple(x.transpose(1, 2) for x in (given.query, given.key, given.value)), scores=None)
    lse = torch.logaddexp(total.lse, sink[:, None])
    expected = (total.out.float() * (total.lse - lse).exp()[..., None]).bfloat16()
    out = attend_tiles(given.query, key=given.key, value=given.value, plan=plan, scores=ScoreOptions(sink))
    assert torch.equal(out.transpose(1, 2), expected)
    assert not torch.equal(add_sink(total, sink).out, expected), "rounding before would differ"
