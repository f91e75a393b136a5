"""The default of `--overlap-moe-expert-parallel-comm`: on where its prediction is faster and fits.

Unset, it is decided before the plan of a run on GPUs, and by `nanotrain plan`. Losses are the same
with it and without it.
"""

from dataclasses import dataclass, replace

from nanotrain.config.config import Config
from nanotrain.config.rules.check import check_rules
from nanotrain.errors import ErrorCollector
from nanotrain.planner.hardware import GPU
from nanotrain.planner.prediction import Prediction, predict
from nanotrain.planner.scenario import scenario_of

KEY = "parallel.overlap_moe_expert_parallel_comm"
MIN_GAIN = 1.01  # a smaller gain is no reason for the memory of further microbatches


@dataclass(frozen=True)
class OverlapChoice:
    """A configuration with the setting decided, and a line that says why."""

    config: Config
    text: str  # empty where there is nothing to decide


def decide_expert_overlap(config: Config, world_size: int, *, gpu: GPU) -> OverlapChoice:
    """Decide `overlap_moe_expert_parallel_comm` where it is unset.

    Args:
        config: a complete configuration.
        world_size: ranks of the run.
        gpu: GPU of every rank, with the memory for it.
    """
    if not config.parallel.may_overlap_experts or gpu.is_cpu:
        return OverlapChoice(config, "")
    without = _with_overlap(config, is_on=False)
    overlapped = _with_overlap(config, is_on=True)
    errors = ErrorCollector()
    check_rules(overlapped, "layout", errors=errors)
    if errors.errors:
        reason, _, _ = str(errors.errors[0]).rpartition("; ")  # without the cure
        return OverlapChoice(without, f"off: {reason}")
    off = predict(scenario_of(without, world_size, gpu=gpu))
    on = predict(scenario_of(overlapped, world_size, gpu=gpu))
    if off.time.total < MIN_GAIN * on.time.total:
        return OverlapChoice(without, f"off: {_times(off, on)}")
    if on.headroom < 0:
        missing = f"{-on.headroom / 1e9:.1f} GB more than the GPU has"
        return OverlapChoice(without, f"off: {_times(off, on)}, with it {missing}")
    return OverlapChoice(overlapped, f"on: {_times(off, on)}")


def _with_overlap(config: Config, *, is_on: bool) -> Config:
    parallel = replace(config.parallel, overlap_moe_expert_parallel_comm=is_on)
    return replace(config, parallel=parallel)


def _times(off: Prediction, on: Prediction) -> str:
    """The planned times of both."""
    return f"{on.time.total:.3g} s per step planned with it, {off.time.total:.3g} s without"
