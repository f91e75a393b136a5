"""`PartState`: ranges with equal hyperparameters, chunks, and the conversion of what is not stored in fp32."""

from dataclasses import replace

import pytest
import torch

from nanotrain.optim import part_state
from nanotrain.optim.part_state import PartState
from nanotrain.optim.parts import ShardPart
from nanotrain.optim.stored import SCALE_BLOCK, StoredTensor
from nanotrain.parallel.dp.layout import ShardRange
from nanotrain.spec.boxes import Box
from nanotrain.spec.params import LocalParam, Normal, ParamSpec

CPU = torch.device("cpu")
NUMEL, FIRST = 3 * SCALE_BLOCK, 100


def build(dtype: torch.dtype) -> PartState:
    """Three params in elements [100, 100 + NUMEL) of a shard, with gaps: decayed, embedding, not decayed."""
    spec = ParamSpec("a", (5000,), dtype="fp32", init=Normal(1.0), weight_decay=True)
    specs = (spec, replace(spec, is_embedding_or_output=True), replace(spec, weight_decay=False))
    starts = (FIRST + 10, FIRST + 2000, FIRST + 4000)
    ranges = [ShardRange(LocalParam.unsharded(s), at, 0, 1500) for s, at in zip(specs, starts, strict=True)]
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    tensors = [StoredTensor.zeros(NUMEL, dtype, device=CPU) for _ in range(2)]
    for tensor in tensors:
        tensor.write(values)
    return PartState(
        ShardPart(FIRST, FIRST + NUMEL, tuple(ranges)),
        main=tensors[0],
        state={"exp_avg": tensors[1]},
        grad=torch.zeros(NUMEL),
        model_params=torch.zeros(NUMEL, dtype=torch.bfloat16),
    )


def test_ranges_cover_the_part_and_begin_after_the_param_before():
    ranges = build(torch.float32).ranges()
    assert [len(r.main_param) for r in ranges] == [1510, 1990, NUMEL - 3500]
    assert [(r.weight_decay, r.is_decoupled) for r in ranges] == [(True, False), (True, True), (False, False)]


def test_fp32_ranges_are_views():
    state = build(torch.float32)
    state.ranges()[1].main_param.fill_(5.0)
    assert (state.main.values[1510:3500] == 5.0).all() and not (state.main.values[:1510] == 5.0).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunks_are_converted_and_stored_again(dtype, monkeypatch):
    monkeypatch.setattr(part_state, "CHUNK_NUMEL", SCALE_BLOCK)
    state, one = build(dtype), build(dtype)
    assert list(state.chunks()) == [(i * SCALE_BLOCK, (i + 1) * SCALE_BLOCK) for i in range(3)]
    before = {name: stored.read().clone() for name, stored in state.stored.items()}
    for start, stop in state.chunks():
        with state.loaded(start, stop) as ranges:
            assert sum(len(r.main_param) for r in ranges) == SCALE_BLOCK
            for r in ranges:
                r.main_param.mul_(2.0)
                r.state["exp_avg"].mul_(-4.0)
    assert torch.equal(state.main.read(), 2 * before["model"])
    assert torch.equal(state.state["exp_avg"].read(), -4 * before["optimizer/exp_avg"])
    state.copy_main_to_model_params()
    assert torch.equal(state.model_params, (2 * before["model"]).bfloat16())
    with pytest.raises(AssertionError, match="changes of copies"):
        one.ranges()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_are_scaled_in_every_chunk(dtype, monkeypatch):
    monkeypatch.setattr(part_state, "CHUNK_NUMEL", SCALE_BLOCK)
    state = build(dtype)
    spec = replace(state.part.ranges[1].param.spec, name="b", shape=(40, 50))
    # local rows 5 to 34 of 40, of which elements 7 to 1506 are here
    local = LocalParam(spec, Box((5, 0), (35, 50)))
    state.part = replace(state.part, ranges=(state.part.ranges[0], ShardRange(local, FIRST + 2000, 7, 1493)))
    expected, rows = state.main.read().clone(), 2.0 ** -torch.arange(40)
    expected[2000:3493] *= rows[5:35].repeat_interleave(50)[7:]
    assert state.scale_rows({"b": rows}) and not state.scale_rows({"c": rows})
    torch.testing.assert_close(state.main.read(), expected, rtol=0, atol=1e-3 if dtype is torch.float16 else 0)


def test_a_part_of_padding_is_one_range_without_weight_decay():
    state = build(torch.float32)
    state.part = ShardPart(FIRST, FIRST + NUMEL, ())
    (only,) = state.ranges()
    assert len(only.main_param) == NUMEL and not only.weight_decay and not only.is_decoupled
