"""Roll back to a checkpoint after a spike of the loss, and skip the data since then.

    checkpoint              spike
    step 8 ................ step 11      samples 64 .. 87 are skipped:
    8 x 8 samples consumed               the run continues with step 9 on samples 88 ..

The learning rate follows the consumed samples, which exclude the skipped ones. If the loss spikes
again before the run has passed the step of the last spike, it rolls back to an older checkpoint
than before, so this cannot repeat forever.
"""

import math
from dataclasses import fields, replace
from pathlib import Path
from statistics import median

from nanotrain.checkpoint.store import step_of
from nanotrain.errors import TrainingFault
from nanotrain.log import get_logger
from nanotrain.train.resume.restore import restore
from nanotrain.train.run import Run, TrainState

log = get_logger(__name__)

WINDOW = 32  # recent losses at most, over which the median is taken
MIN_LOSSES = 8  # recent losses that a decision needs


def count_loss(state: TrainState, loss: float, *, factor: float) -> bool:
    """Whether a loss is a spike; a finite loss that is not one is added to the recent losses.

    Args:
        state: counters with the recent losses.
        loss: loss of a step; the same on all ranks.
        factor: multiple of the median of the recent losses above which a loss is a spike.

    >>> state = TrainState(recent_losses=[2.0] * 8)
    >>> count_loss(state, 3.1, factor=1.5), count_loss(state, 2.9, factor=1.5)
    (True, False)
    """
    if not math.isfinite(loss):  # the step was skipped, which `SkippedSteps` counts
        return False
    recent = state.recent_losses
    if len(recent) >= MIN_LOSSES and loss > factor * median(recent):
        return True
    state.recent_losses = [*recent, loss][-WINDOW:]
    return False


def checkpoint_before_spike(run: Run) -> Path | None:
    """The checkpoint to go back to, the same on every rank; None if there is none.

    Raises:
        TrainingFault: the run spikes again and again, and no older checkpoint is left.
    """
    state = run.state
    newest = run.checkpointer.latest(below=state.step)
    if newest is None or state.step > state.spike_step:
        return newest
    # The newest checkpoint may be one that was saved after the last rollback.
    older = run.checkpointer.latest(below=state.rollback_step or step_of(newest))
    if older is None:
        raise TrainingFault(
            f"the loss of step {state.step} is a spike again, "
            f"after going back from step {state.spike_step}",
            why="no older checkpoint is left to go back to",
            fix="lower --lr, raise --rollback-on-spike, or keep more checkpoints with --keep-last",
        )
    return older


def leave_spike(run: Run, loss: float) -> bool:
    """Roll back after a step with a spike; False if there is no checkpoint. Every rank calls this.

    Raises:
        TrainingFault: as `checkpoint_before_spike`.
    """
    checkpoint = checkpoint_before_spike(run)
    ratio = loss / median(run.state.recent_losses)
    spike = f"step {run.state.step}: the loss {loss:.4f} is {ratio:.2f} times its median"
    # only one rank warns: all ranks have the same loss
    warn = log.warning if run.context.control.is_first else log.debug
    if checkpoint is None:
        warn("%s; there is no checkpoint to go back to", spike)
        return False
    roll_back(run, checkpoint)
    warn(
        "%s; back to step %d, %d samples skipped so far",
        spike,
        run.state.step,
        run.state.skipped_samples,
    )
    return True


def roll_back(run: Run, checkpoint: Path) -> None:
    """Load a checkpoint into a running run, and skip the samples read since. Every rank calls this.

    Raises:
        DamagedCheckpoint: it is damaged, and no older one can be used.
    """
    run.wait_for_params()
    spike_step = max(run.state.step, run.state.spike_step)
    next_sample = run.state.consumed_samples + run.state.skipped_samples
    # --finetune and --no-load-optim apply to the first start, not to the run's own checkpoints.
    options = replace(run.config.checkpoint, finetune=False, load_optim=True)
    loaded = restore(
        checkpoint,
        run.checkpointer,
        model=run,
        parts=run.parts,
        may_fall_back=True,
        config=replace(run.config, checkpoint=options),
    )
    loaded.skipped_samples = next_sample - loaded.consumed_samples
    loaded.spike_step = spike_step
    loaded.rollback_step = loaded.step
    for field in fields(TrainState):
        setattr(run.state, field.name, getattr(loaded, field.name))
    run.batch_iterator.discard()
    run.batches.restart(
        consumed_samples=loaded.consumed_samples, skipped_samples=loaded.skipped_samples
    )
