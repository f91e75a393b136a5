"""`--inprocess-restart`: a run goes on in the same processes after a fault of one rank.

A fault ends the generation of the process groups (`comm/generations.py`). The ranks that live leave
their groups and drop model and optimizer; imports and compiled kernels stay. The launcher starts a
rank that died again, alone. All meet in the next generation, and open the run as a start does: from
the newest checkpoint, in the memory of the hosts or on the disk.

With `--inprocess-min-ranks` the launcher may let a rank leave. The next generation then has fewer
data-parallel ranks, which load the checkpoint as any other number of ranks does.
"""

import gc
import traceback
from collections.abc import Callable
from datetime import timedelta

from nanotrain.checkpoint.background import cancel_all
from nanotrain.comm.generations import Generation, Generations
from nanotrain.comm.parallel_context import Launch
from nanotrain.comm.process_groups import leave_world
from nanotrain.config.config import Config
from nanotrain.log import get_logger
from nanotrain.waiting import named_wait

log = get_logger(__name__)


def train_with_restarts(
    config: Config,
    launch: Launch,
    *,
    train: Callable[[Generation | None], object],
    become_first: Callable[[], object],
) -> None:
    """Train to the end of the run, again after every fault that a restart in place may cure.

    Args:
        config: configuration of the run.
        launch: place of this rank in the job.
        train: opens the run from its newest checkpoint, and trains to the end; None where the run
            has no generations.
        become_first: called once this rank is the first of those that are left.
    """
    if not config.train.inprocess_restart or not launch.is_distributed:
        train(None)
        return
    generations = Generations(
        launch.rank,
        launch.world_size,
        timeout=timedelta(minutes=config.parallel.distributed_timeout_minutes),
        max_restarts=config.train.inprocess_max_iterations,
        become_first=become_first,
    )
    if not generations.is_supervised:
        log.info(
            "restart in place: after an error of a rank; torchrun ends all ranks where one dies, "
            "so that no rank leaves; `nanotrain train --nproc-per-node` starts that one again"
        )
    while not _finishes(generations, train):
        gc.collect()  # hooks and buffers of the generation refer to each other


def _finishes(generations: Generations, train: Callable[[Generation | None], object]) -> bool:
    """Train in the next generation; returns whether that was the last one of this rank."""
    generation = generations.join()
    if generation is None:
        return True
    try:
        with generation.watched():
            train(generation)
    except Exception as error:
        generations.leave(generation, error)
        if generations.has_own_error:
            log.error("%s", "".join(traceback.format_exception(error)).rstrip())
        _clear_frames(error)
        leave_world()
        with named_wait("a save that was given up still writes"):
            cancel_all()  # the next generation saves the same step in the same folder
        return False
    return True


def _clear_frames(error: BaseException | None) -> None:
    """Drop the variables of the frames of an error and of its causes, which hold the model."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
