"""The schedules of a checkpoint of Megatron-LM are ours, in samples."""

from typing import Any

import pytest

from nanotrain.config.config import Config
from nanotrain.errors import CheckpointError
from nanotrain.interop.megatron.import_run import with_schedule
from nanotrain.optim.lr import LRSchedule
from tests.interop.megatron.test_arguments import config_of

SCHEDULER = {"max_lr": 1e-2, "min_lr": 1e-3, "lr_decay_style": "linear", "lr_decay_steps": 160}


def imported(**changes: Any) -> Config:
    return with_schedule(config_of(), SCHEDULER | changes)


@pytest.mark.parametrize("warmup", [16, 16.0])
def test_a_whole_warmup_is_in_samples(warmup: float) -> None:
    optim = imported(lr_warmup_steps=warmup).optim
    assert optim.lr_warmup_samples == 16 and type(optim.lr_warmup_samples) is int
    assert optim.lr_warmup_fraction is None


def test_a_fraction_of_the_schedule_remains_one() -> None:
    warmup = 0.03 * 160  # as --lr-warmup-fraction 0.03 stores it
    optim = imported(lr_warmup_steps=warmup).optim
    assert optim.lr_warmup_samples is None
    schedule = LRSchedule(optim, samples_per_step=8, train_samples=160)
    assert schedule.warmup_samples == pytest.approx(warmup, rel=1e-15)
    # Megatron-LM: max_lr * step / warmup, and the rest of the decay in proportion
    assert schedule.lr_at(4) == pytest.approx(1e-2 * 4 / 4.8, rel=1e-12)
    assert schedule.lr_at(80) == pytest.approx(1e-3 + 9e-3 * (1 - 75.2 / 155.2), rel=1e-12)


def test_a_decay_in_whole_floats_is_read() -> None:
    assert imported(lr_decay_steps=160.0, lr_warmup_steps=0).optim.lr_decay_samples == 160


@pytest.mark.parametrize(
    "changes",
    [
        {"lr_warmup_steps": "many"},
        {"lr_warmup_steps": float("nan")},
        {"lr_warmup_steps": -1},
        {"lr_warmup_steps": 200.5},
        {"lr_warmup_steps": 1, "lr_decay_steps": 160.5},
        {"lr_warmup_steps": 1, "lr_decay_style": "${oc.env:HOME}"},
    ],
)
def test_what_is_no_schedule_is_one_error(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        imported(**changes)
