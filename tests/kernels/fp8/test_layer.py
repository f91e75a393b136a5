"""The amax history of delayed scaling: what is recorded, which scale follows, and how it is updated."""

from dataclasses import replace

import pytest
import torch

from nanotrain.kernels.fp8.layer import ExpertRange, Fp8Layer, Fp8Options, Operand
from nanotrain.precision.fp8 import FP8_FORMATS, RECIPES

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


@pytest.mark.parametrize(("uses_largest", "margin", "expected"), [(False, 0, 4.0), (True, 0, 7.0), (True, 2, 28.0)])
def test_scales_follow_from_the_history(uses_largest: bool, margin: int, expected: float) -> None:
    layer = layer_after(7.0, 4.0, options=replace(OPTIONS, uses_largest=uses_largest, margin=margin))
    for current in (1.0, 100.0):
        assert layer.inverse_scales(Operand.INPUT, of(current)).item() == pytest.approx(expected / 448)


def test_an_empty_history_scales_by_the_current_amax() -> None:
    layer = Fp8Layer(replace(OPTIONS, reduce_amax=lambda amax: amax))
    assert layer.shares_amax
    assert layer.inverse_scales(Operand.GRAD, of(3.0)).item() == pytest.approx(3.0 / 57344)
    layer.update(torch.ones(3, 1))
    assert not layer.shares_amax


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
    found = layer.inverse_scales(Operand.INPUT, of(1.0, 1.0))
    torch.testing.assert_close(found, of(2.0, 3.0) / 448)
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
