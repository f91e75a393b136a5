"""Say that the learning rate of the next step is another than with the settings of the checkpoint.

A finished cosine run that gets more steps is the usual case: its rate jumps from the minimum up.
"""

import math

from nanotrain.checkpoint.store import saved_config
from nanotrain.config.schedules import batch_schedule, samples_of_steps
from nanotrain.config.schema import config_from_dict
from nanotrain.log import get_logger
from nanotrain.optim.lr import LRSchedule
from nanotrain.train.run import Run

log = get_logger(__name__)
LR_TOLERANCE = 0.01  # relative change that is not worth a line


def log_changed_lr(run: Run) -> None:
    """Log the learning rate of the next step where it is another than with the saved settings."""
    state = run.state
    before = saved_lr(run)
    if before is None or state.step >= run.config.train.train_iters:
        return
    now = run.lr_schedule.lr_at(state.consumed_samples)
    if not math.isclose(now, before, rel_tol=LR_TOLERANCE):
        log.info(
            "the learning rate of step %d is %.2e; with the settings of step-%08d it was %.2e "
            "(see the changed settings above)",
            state.step + 1,
            now,
            state.step,
            before,
        )


def saved_lr(run: Run) -> float | None:
    """The learning rate of the next step by the settings in the checkpoint; None if unknown.

    After the last step of a run it is the last rate of its curve.
    """
    checkpoint = run.inputs.checkpoint
    settings = None if checkpoint is None else saved_config(checkpoint)
    if settings is None:
        return None
    config = config_from_dict(settings)
    steps = config.train.train_iters
    batch_size = run.state.curve_batch_size
    schedule = batch_schedule(config)
    samples = samples_of_steps(schedule, steps) if schedule else steps * batch_size
    return LRSchedule(config.optim, batch_size, samples).lr_at(run.state.consumed_samples)
