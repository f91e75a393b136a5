"""Counters of optimizers in the forms in which megatron-core stores them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanotrain.errors import CheckpointError
from nanotrain.interop.megatron.folder import CommonState
from nanotrain.interop.megatron.optimizer_state import find_state, read_counters, refuse_other_forms


def counters_of(optimizer: Any, **state: Any) -> Any:
    folder: Any = SimpleNamespace(folder=Path("iter_0000009"), objects={}, tensors={})
    return read_counters(folder, CommonState({}, 9, {"optimizer": optimizer} | state))


SCALER = {
    "scale": torch.tensor([4096.0]),
    "growth_tracker": 3,
    "hysteresis_tracker": 2,
}


@pytest.mark.parametrize(
    "optimizer",
    [
        {"state": {"common_step": torch.tensor(7.0)}, "param_groups": [{"lr": 0.1}]},
        {"optimizer": {"state": {"common_step": 7}, "param_groups": []}},
        {"optimizer": {"param_groups": [{"step": 7}, {"step": 7.0}]}},
        {"state": {"common_step": 7}, "param_groups": [{"step": 2}]},  # of an earlier load
        {0: {"optimizer": {"param_groups": [{"step": 7}]}}, 1: {"optimizer": {}}},
        [{"optimizer": {"param_groups": [{"step": 7}]}}],
    ],
)
def test_the_number_of_updates(optimizer: Any) -> None:
    assert counters_of(optimizer).num_updates == 7


def test_the_loss_scale() -> None:
    scale = counters_of({"optimizer": {}, "grad_scaler": SCALER}).loss_scale
    assert scale == {"scale": 4096.0, "is_dynamic": True, "clean_steps": 3, "overflows_left": 2}
    below = counters_of({"grad_scaler": SCALER | {"hysteresis_tracker": -3}}).loss_scale
    assert below is not None and below["overflows_left"] == -3
    assert counters_of({}).loss_scale is None
    assert counters_of({"optimizer": {}, "grad_scaler": {}}).loss_scale is None  # a constant one
    assert counters_of({}).num_updates == 9  # the step


@pytest.mark.parametrize(
    "optimizer",
    [
        {"param_groups": [{"step": 7}, {"step": 8}]},
        {"param_groups": [{"step": -1}]},
        {"grad_scaler": {"scale": float("nan")}},
        {"grad_scaler": 3},
        {"grad_scaler": {"scale": torch.ones(2)}},
        {"param_groups": [{"step": torch.ones(2)}]},
    ],
)
def test_what_is_no_counter_is_one_error(optimizer: Any) -> None:
    with pytest.raises(CheckpointError, match="counters of the optimizer in iter_0000009"):
        counters_of(optimizer)


@pytest.mark.parametrize("position", [None, "far", 1.5])
def test_the_position_of_the_schedules_is_checked_before_anything_is_written(position: Any) -> None:
    with pytest.raises(CheckpointError, match="num_steps of opt_param_scheduler"):
        counters_of({}, opt_param_scheduler={"num_steps": position})


def test_a_moment_has_the_shape_of_its_weight() -> None:
    key = "decoder.weight"
    tensors = {
        key: SimpleNamespace(shape=(4, 2)),
        f"optimizer.state.exp_avg.{key}": SimpleNamespace(shape=(4, 3)),
        f"optimizer.state.exp_avg_sq.{key}": SimpleNamespace(shape=(4, 2)),
    }
    folder: Any = SimpleNamespace(folder=Path("iter"), tensors=tensors, objects={})
    placement: Any = SimpleNamespace(stored_keys=[key])
    with pytest.raises(CheckpointError, match=r"exp_avg.decoder.weight in iter has the shape"):
        find_state(folder, placement, arguments={})


def test_buffers_of_a_layout_are_refused_by_name() -> None:
    key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.param"
    folder: Any = SimpleNamespace(folder=Path("iter"), objects={}, tensors={key: None})
    with pytest.raises(CheckpointError, match="fully-reshardable"):
        refuse_other_forms(folder)
