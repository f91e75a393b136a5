"""The amax history of delayed scaling: what is recorded, which scale follows, and how it is
updated.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from nanotrain.comm.group import Group
from nanotrain.config.config import Fp8Config
from nanotrain.kernels.fp8.layer import (
    ExpertRange,
    Fp8Layer,
    Fp8Options,
    Operand,
    SharedAmax,
    expert_fp8_options,
    fp8_options,
    layers_in_bf16,
)
from nanotrain.precision.fp8 import FP8_FORMATS, RECIPES
from nanotrain.train.parts.fp8_amaxes import fp8_layers, update_amax_histories
from tests.harness import ranks

OPTIONS = Fp8Options(RECIPES["delayed"], FP8_FORMATS["hybrid"], history_length=3)


def of(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def layer_after(*steps: float, options: Fp8Options = OPTIONS) -> Fp8Layer:
    """A layer that saw one input amax per step."""
    layer = Fp8Layer(options)
    for amax in steps:
        layer.record(Operand.INPUT, of(amax))
        assert layer.step_amax is not None
        layer.update(layer.step_amax.clone())
    return layer


def test_the_history_is_newest_first_and_of_limited_length() -> None:
    layer = layer_after(1.0, 2.0, 3.0, 4.0)
    assert layer.history is not None
    assert layer.history[Operand.INPUT].tolist() == [[4.0, 3.0, 2.0]]
    assert not layer.history[Operand.WEIGHT].any() and not layer.history[Operand.GRAD].any()


def test_a_step_counts_its_largest_microbatch_and_recomputation_changes_nothing() -> None:
    layer = Fp8Layer(OPTIONS)
    for amax in (2.0, 5.0, 3.0, 5.0, 2.0):
        layer.record(Operand.GRAD, of(amax))
    assert layer.step_amax is not None
    assert layer.step_amax[:, 0].tolist() == [0.0, 0.0, 5.0]
    layer.update(layer.step_amax.clone())
    assert not layer.step_amax.any()


@pytest.mark.parametrize(
    ("uses_largest", "margin", "expected"), [(False, 0, 4.0), (True, 0, 7.0), (True, 2, 28.0)]
)
def test_scales_follow_from_the_history(uses_largest: bool, margin: int, expected: float) -> None:
    layer = layer_after(
        7.0, 4.0, options=replace(OPTIONS, uses_largest=uses_largest, margin=margin)
    )
    for current in (1.0, 100.0):
        assert layer.inverse_scales(Operand.INPUT, of(current)).item() == pytest.approx(
            expected / 448
        )


def test_an_empty_history_scales_by_the_current_amax() -> None:
    layer = Fp8Layer(replace(OPTIONS, reduce_amax=lambda amax: amax))
    assert not layer.has_history
    assert layer.inverse_scales(Operand.GRAD, of(3.0)).item() == pytest.approx(3.0 / 57344)
    layer.update(torch.ones(3, 1))
    assert layer.has_history


def test_an_overflow_makes_scales_nan_and_leaves_the_history() -> None:
    layer = layer_after(4.0)
    for amax in (float("inf"),):
        assert layer.inverse_scales(Operand.INPUT, of(amax)).isnan().all()
        layer.record(Operand.INPUT, of(amax))
        assert layer.step_amax is not None and layer.history is not None
        layer.update(layer.step_amax.clone())
        assert layer.history[Operand.INPUT].tolist() == [[4.0, 4.0, 0.0]]


def test_experts_of_a_rank_have_their_rows_of_the_history() -> None:
    layer = Fp8Layer(OPTIONS, ExpertRange(first=2, num_local=2, num_global=6))
    layer.record(Operand.INPUT, of(3.0, 5.0))
    assert layer.step_amax is not None and layer.history is not None
    assert layer.step_amax[Operand.INPUT].tolist() == [0, 0, 3, 5, 0, 0]
    layer.update(torch.arange(18.0).view(3, 6))
    actual = layer.inverse_scales(Operand.INPUT, of(1.0, 1.0))
    torch.testing.assert_close(actual, of(2.0, 3.0) / 448)
    # an expert without tokens in the last step is scaled by its own amax
    layer.update(torch.zeros(3, 6))
    assert layer.inverse_scales(Operand.INPUT, of(7.0, 0.0))[0].item() == pytest.approx(7 / 448)


def test_a_restored_history_is_used() -> None:
    layer = Fp8Layer(OPTIONS)
    layer.restored()
    assert not layer.has_history
    assert layer.history is not None
    layer.history += 1
    layer.restored()
    assert layer.has_history


def test_other_recipes_keep_nothing() -> None:
    layer = Fp8Layer(replace(OPTIONS, recipe=RECIPES["tensorwise"]))
    layer.record(Operand.INPUT, of(1.0))
    assert not list(layer.buffers())


SEQUENCE, ETP = Group.single_rank("tp_cp"), Group.single_rank("etp")
DELAYED = Fp8Config(format="hybrid", amax_history_len=4)


def test_options_are_those_of_the_configuration() -> None:
    assert fp8_options(None, sequence=SEQUENCE) is None
    options = fp8_options(replace(DELAYED, margin=1, amax_compute_algo="max"), sequence=SEQUENCE)
    assert options is not None
    assert (options.margin, options.history_length, options.uses_largest) == (1, 4, True)
    assert options.dtypes.backward is torch.float8_e5m2
    assert options.reduce_amax is None  # of one rank
    experts = ExpertRange(0, 2, 2)
    assert expert_fp8_options(options, experts, etp=ETP, sequence=SEQUENCE).reduce_amax is None


@pytest.mark.parametrize(
    ("start", "end", "expected"), [(1, 1, {0, 5}), (0, 2, {4, 5}), (2, 0, {0, 1})]
)
def test_first_and_last_layers(start: int, end: int, expected: set[int]) -> None:
    config = replace(DELAYED, num_layers_at_start_in_bf16=start, num_layers_at_end_in_bf16=end)
    assert layers_in_bf16(config, 6) == frozenset()
    assert layers_in_bf16(replace(config, first_last_layers_bf16=True), 6) == expected


@ranks(4, tp=2, cp=2)
def test_dense_amaxes_are_the_largest_of_the_ranks_of_a_sequence(ctx):
    amax = torch.tensor([[float(ctx.rank)], [-float(ctx.rank)]])
    assert SharedAmax(ctx.group("tp_cp"), ETP, ExpertRange(0, 1, 1))(amax).tolist() == [
        [3.0],
        [0.0],
    ]


@ranks(4, tp=2, cp=2, ep=2, etp=2)
def test_amaxes_of_experts_are_the_largest_of_their_shards_and_sequences(ctx):
    experts = ExpertRange(2 * ctx.group("ep").index, 2, 4)
    reduce = SharedAmax(ctx.group("tp_cp"), ctx.group("etp"), experts)
    actual = reduce(torch.tensor([[ctx.rank + 0.5, 10.0 + experts.first]]))
    members = max(rank for rank in ctx.group("etp").ranks)
    assert actual.tolist() == [[members + 0.5, 10.0 + experts.first]]


@ranks(2, etp=2)
def test_amaxes_of_experts_that_ranks_with_other_sequences_share_are_the_largest_of_both(ctx):
    actual = SharedAmax(ctx.group("tp_cp"), ctx.group("etp"), ExpertRange(0, 1, 1))(
        torch.tensor([[ctx.rank + 0.5]])
    )
    assert actual.tolist() == [[1.5]]


@ranks(4, cp=2, ep=1)
def test_amaxes_of_replicated_experts_are_the_largest_of_a_sequence(ctx):
    reduce = SharedAmax(ctx.group("tp_cp"), ctx.group("etp"), ExpertRange(0, 2, 2))
    actual = reduce(torch.tensor([[float(ctx.rank), 1.0]]))
    assert actual.tolist() == [[float(max(ctx.group("tp_cp").ranks)), 1.0]]


@ranks(4, tp=2)
def test_a_step_appends_the_largest_amaxes_of_all_ranks(ctx):
    options = fp8_options(DELAYED, sequence=ctx.group("tp_cp"))
    assert options is not None
    stage = nn.ModuleDict(
        {"dense": Fp8Layer(options), "experts": Fp8Layer(options, ExpertRange(0, 3, 3))}
    )
    for layer in fp8_layers(stage).values():
        layer.step_amax += 1 + ctx.rank
    stage["experts"].step_amax[1, 2] += 7 * (ctx.rank == 2)
    update_amax_histories(stage, (ctx.group("tp"), ctx.group("dp_cp")))
    expected = torch.full((3, 3), 4.0)
    expected[1, 2] = 10.0
    assert torch.equal(stage["experts"].history[..., 0], expected)
    assert torch.equal(stage["dense"].history[..., 0], torch.full((3, 1), 4.0))
    assert not stage["dense"].history[..., 1:].any() and not stage["dense"].step_amax.any()
