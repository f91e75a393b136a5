"""Phases of a run, each built anew in the same process.

    stages of the data that train other parameters   goes on from a checkpoint that it saves
        (`--train-only STAGE=PATTERN`)
    another layout (`run.stop.successor`)            goes on from the memory of the ranks

A phase does what a stop and a resume would do. Without such stages and requests a run is one phase.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from nanotrain.checkpoint.all_ranks import run_on_first
from nanotrain.checkpoint.store import read_manifest
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.config.data_stages import read_stages, stage_bounds
from nanotrain.config.optim import has_trained_stages
from nanotrain.log import get_logger
from nanotrain.plan.memory_plan import MemoryPlan, worst_memory
from nanotrain.plan.plan import Plan, plan_run
from nanotrain.spec.trainable import TrainableSet
from nanotrain.train.fit import fit
from nanotrain.train.open_run import open_run
from nanotrain.train.resume.in_place import HeldRun, go_on, hold_state, record
from nanotrain.train.resume.restore import parse_train_state
from nanotrain.train.run import RunInputs, TrainState
from nanotrain.train.same_start import require_same_start

log = get_logger(__name__)


@dataclass(frozen=True)
class Phase:
    """Consecutive stages of the data that train the same parameters."""

    stage: str  # the stage of its first sample
    end: int | None  # the first sample of the next phase; None for the last one


@dataclass
class EarlyEnd:
    """Reasons to end a run before its last step, kept where the run is built again."""

    # monotonic time from which `exit_duration_in_mins` counts; None: no phase has begun
    started: float | None = None
    signal: int | None = None  # received by this rank


def largest_memory(config: Config, plan_memory: Callable[[Config], MemoryPlan]) -> MemoryPlan:
    """The memory of the phase that needs the most.

    Args:
        config: configuration of the run.
        plan_memory: memory of a configuration whose patterns apply to all stages.
    """
    if not has_trained_stages(config.optim):
        return plan_memory(config)
    sets = {
        TrainableSet.of(config.optim, stage=stage.name) for stage in read_stages(config.data.stages)
    }
    plans = []
    for trainable in sets:
        optim = replace(
            config.optim, freeze=[*trainable.freeze], train_only=[*trainable.train_only]
        )
        plans.append(plan_memory(replace(config, optim=optim)))
    return max(plans, key=lambda plan: plan.total)


def train_in_phases(
    plan: Plan,
    inputs: RunInputs,
    *,
    context: ParallelContext,
    planned: MemoryPlan | None = None,
    early_end: EarlyEnd | None = None,
) -> None:
    """Train a run to its end, or until this rank is left out of its layout.

    Args:
        plan: plan of this rank, for any stage of the data.
        inputs: open datasets, run folder and checkpoint.
        context: device and process groups of this rank.
        planned: memory of the worst rank, for the summary.
        early_end: kept by a caller that calls this again after an error; None: not kept.
    """
    early_end = early_end or EarlyEnd()
    if early_end.started is None:
        early_end.started = time.monotonic()
    held: HeldRun | None = None
    while True:
        plan, inputs, end = _begin_phase(plan, inputs, context=context)
        with open_run(plan, inputs, context=context, planned=planned) as (run, hooks):
            if held is not None:
                record(run, held)
            run.stop.signal = early_end.signal
            try:
                goes_on = fit(run, hooks, end=end, started=early_end.started)
            finally:
                early_end.signal = run.stop.signal
            held = hold_state(run) if goes_on and run.stop.successor is not None else None
            checkpoint = run.checkpointer.latest() if goes_on and held is None else None
        del run, hooks  # their memory is free before the next phase is built
        gc.collect()  # hooks and buffers of the phase refer to each other
        if held is not None:
            following = go_on(held, inputs, context=context)
            if following is None:
                return
            plan, inputs = following
            planned = worst_memory(
                plan.config, plan.topology.world_size, device=context.device.type
            )
        elif checkpoint is not None:
            log.info("the next stage of the data trains other parameters, from %s", checkpoint.name)
            inputs = replace(inputs, checkpoint=checkpoint, is_resumed=True, begins_phase=True)
        else:
            return
        plan = replace(plan, config=_config_to_go_on(plan.config))


def _begin_phase(
    plan: Plan, inputs: RunInputs, *, context: ParallelContext
) -> tuple[Plan, RunInputs, int | None]:
    """Plan and inputs of the phase that begins, and the first sample of the next one."""
    if not has_trained_stages(plan.config.optim):
        return plan, inputs, None
    inputs = require_same_start(plan, inputs, context=context)
    state = run_on_first(context.control, partial(_saved_state, plan.config, inputs))
    phase = phase_at(plan, state)
    world_size = plan.topology.world_size
    plan = plan_run(plan.config, world_size, rank=plan.rank, stage=phase.stage)
    return plan, inputs, phase.end


def phase_at(plan: Plan, state: TrainState) -> Phase:
    """The phase of the next step, from the counters of the run."""
    config = plan.config
    stages = read_stages(config.data.stages)
    samples_of = partial(plan.samples_of, batch_size=state.curve_batch_size or None)
    starts = [start for start, _ in stage_bounds(stages, samples_of)]
    sets = [TrainableSet.of(config.optim, stage=stage.name) for stage in stages]
    current = _last_begun(starts, state.consumed_samples)
    for later in range(current + 1, len(stages)):
        if sets[later] != sets[current]:
            return Phase(stages[current].name, starts[later])
    return Phase(stages[current].name, None)


def _last_begun(starts: Sequence[int], sample: int) -> int:
    """The index of the last stage that begins at or before a sample."""
    return max(index for index, start in enumerate(starts) if start <= sample)


def _saved_state(config: Config, inputs: RunInputs) -> TrainState:
    """The counters that the run starts with."""
    if inputs.live is not None:
        return parse_train_state(inputs.live.manifest)
    if inputs.checkpoint is None or config.checkpoint.finetune:
        return TrainState()
    try:
        return parse_train_state(read_manifest(inputs.checkpoint))
    except ValueError:  # reported where the checkpoint is loaded
        return TrainState()


def _config_to_go_on(config: Config) -> Config:
    """The configuration of a phase that begins with a checkpoint of the run."""
    options = replace(config.checkpoint, load=None, finetune=False, load_optim=True)
    return replace(config, checkpoint=options)
