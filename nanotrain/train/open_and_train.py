"""`open_and_train`: from a checked start of this rank to the end of training.

    Loaded -> RunInputs   datasets, tokenizer, run folder, checkpoint; completes the config
           -> Plan        groups, parameters, buffers, pipeline schedule of this rank; pure
           -> Run         on the device, with process groups
           -> fit

All imports are at the top: `train/main.py` imports this file without garbage collection.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from nanotrain.comm.generations import Generation
from nanotrain.comm.parallel_context import Launch, ParallelContext
from nanotrain.config.config import Config
from nanotrain.config.load import Loaded
from nanotrain.config.rules.check import validate_for_world
from nanotrain.log import get_logger, start_logging
from nanotrain.plan.fitting import require_memory
from nanotrain.plan.plan import plan_run
from nanotrain.runs.failures import Reporter
from nanotrain.runs.folder import RunFolder
from nanotrain.runs.lock import lock_run
from nanotrain.train.checks import Start
from nanotrain.train.inputs import open_inputs
from nanotrain.train.phases import EarlyEnd, largest_memory, train_in_phases
from nanotrain.train.restart import train_with_restarts

log = get_logger("nanotrain.train")


def open_and_train(loaded: Loaded, *, start: Start, reporter: Reporter) -> None:
    """Train to the end of the run, opened again after a fault that this cures.

    Args:
        loaded: configuration of the run.
        start: checked start of this rank.
        reporter: reports errors from now on, once this rank is the first one.
    """
    train = partial(_open_once, loaded, start=start, early_end=EarlyEnd())
    train_with_restarts(loaded.config, start.launch, train=train, become_first=reporter.take_over)


def _open_once(
    loaded: Loaded, generation: Generation | None, *, start: Start, early_end: EarlyEnd
) -> None:
    """Open the inputs, plan the run, join the groups and train to the end."""
    if generation is not None:
        start = start.among(generation.members)
    with taking_over(loaded.config, start.launch):
        _open_planned(loaded, generation, start=start, early_end=early_end)


@contextmanager
def taking_over(config: Config, launch: Launch) -> Iterator[None]:
    """Log and lock the run on its first rank, if another process was the first rank before.

    Args:
        config: configuration of the run.
        launch: place of this process among the remaining ones.
    """
    if not launch.took_over:
        yield
        return
    start_logging(is_first=True)
    with lock_run(RunFolder.of(config).path):
        yield


def _open_planned(
    loaded: Loaded, generation: Generation | None, *, start: Start, early_end: EarlyEnd
) -> None:
    """Open, plan and train with the ranks that are left."""
    launch = start.launch
    world_size = launch.world_size
    config, inputs = open_inputs(loaded, reads_checkpoint=launch.is_first_local)
    if config.parallel.leaves_to_planner(start.device.type):
        from nanotrain.train.auto_layout import with_planned_settings

        config, inputs = with_planned_settings(
            config, inputs, start=start, explicit=loaded.explicit
        )
        expected_dp = loaded.data_parallel_size
        if generation is not None and generation.num_left:
            expected_dp = None  # the flag counts the ranks that were started
        validate_for_world(config, world_size, expected_dp=expected_dp)
    memory = largest_memory(
        config,
        lambda phase_config: require_memory(
            phase_config, world_size, device=start.device.type, available=start.available
        ),
    )
    log.info(
        "%s",
        memory.table(start.available, pp_size=config.parallel.pipeline_model_parallel_size),
    )
    plan = plan_run(config, world_size, rank=launch.rank)
    timeout_s = config.parallel.distributed_timeout_minutes * 60
    with ParallelContext.start(
        plan.topology, device=config.train.device, timeout_s=timeout_s, generation=generation
    ) as context:
        start_logging(coordinates=context.coords_text, is_first=launch.is_first)
        train_in_phases(plan, inputs, context=context, planned=memory, early_end=early_end)
