"""Open a planned run on this rank: the same start on all ranks, the built run, its header, its hooks, the watchdog."""

import shutil
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from nanotrain.attention.backends import AttentionChoice, AttentionDevice
from nanotrain.checkpoint.all_ranks import run_on_all
from nanotrain.comm.device import device_name, manual_seed, peak_memory, reset_peak_memory
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.config.derive import validates
from nanotrain.config.load import to_yaml
from nanotrain.errors import EnvironmentFault
from nanotrain.log import get_logger
from nanotrain.train.build import build_run
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.hooks.debug_nan import DebugNanHook
from nanotrain.train.hooks.evaluate import EvaluateHook
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.hooks.log import MAX_WIDTH, MIN_WIDTH, LogHook
from nanotrain.train.hooks.notify import NotifyHook
from nanotrain.train.hooks.profile import ProfileHook
from nanotrain.train.hooks.prometheus import PrometheusHook
from nanotrain.train.hooks.replicas import ReplicasHook
from nanotrain.train.hooks.report import ReportHook
from nanotrain.train.hooks.sample import PlannedPeak, SampleHook, SummaryHook
from nanotrain.train.hooks.timeout import TimeoutHook
from nanotrain.train.hooks.track import TrackHook
from nanotrain.train.plans.memory_plan import MemoryPlan
from nanotrain.train.plans.plan import Plan
from nanotrain.train.run import Run, RunInputs
from nanotrain.train.start.header import header
from nanotrain.watch.out_of_memory import explaining_memory_errors
from nanotrain.watch.watchdog import watch_ranks

log = get_logger(__name__)


@contextmanager
def open_run(
    plan: Plan, inputs: RunInputs, *, context: ParallelContext, planned: MemoryPlan | None = None
) -> Iterator[tuple[Run, list[Hook]]]:
    """Build a run and its hooks, and watch its ranks until the block ends.

    Args:
        plan: plan of this rank.
        inputs: open datasets, run folder and checkpoint.
        context: device and process groups of this rank.
        planned: memory of the worst rank, for the summary.
    """
    inputs, config, device = require_same_start(plan, inputs, context=context), plan.config, context.device
    coords = f" ({context.coords_text})" if context.coords_text else ""
    with (
        watch_ranks(context, inputs.folder.path, timeout_s=config.train.hang_timeout_s),
        explaining_memory_errors(f"rank {context.rank}{coords}"),
    ):
        manual_seed(config.train.seed, device)
        reset_peak_memory(device)
        peak = PlannedPeak(planned.total, before=peak_memory(device)) if planned else None
        run = build_run(plan, inputs, context=context)
        try:
            if context.rank == 0:
                describe(run, planned=planned)
            yield run, choose_hooks(config, inputs.tokenizer, planned=peak)
        finally:
            run.batches.close()


def describe(run: Run, *, planned: MemoryPlan | None) -> None:
    """Write the configuration of the run and facts about it into its folder, and log its header."""
    config, inputs, context = run.config, run.inputs, run.context
    name = device_name(context.device)
    facts = {
        "device": name,
        "world_size": context.topology.world_size,
        "memory": asdict(planned) if planned else None,
        "origins": dict(inputs.origins),
    }
    secrets = [config.train.notify] if config.train.notify else []
    inputs.folder.write_description(to_yaml(config), facts, secrets=secrets)
    width = max(shutil.get_terminal_size().columns if sys.stderr.isatty() else MAX_WIDTH, MIN_WIDTH)
    attention = str(AttentionChoice.of(config, AttentionDevice.of(context.device)))
    log.info("%s", header(run.plan, inputs, device=name, attention=attention, width=width))
    if inputs.is_resumed:
        log.info("resuming; --no-auto-resume starts a new run")
    done, steps = run.state.step, config.train.train_iters
    if steps == 0:
        log.info("--train-iters 0: everything is built, nothing is trained")
    elif done >= steps:
        log.info("nothing to do: step %d of %d is done; a larger --train-iters goes on from there", done, steps)


def require_same_start(plan: Plan, inputs: RunInputs, *, context: ParallelContext) -> RunInputs:
    """Check that all ranks have the same configuration and start from the same checkpoint.

    Each machine opens its own inputs; if their files differ, the collectives of the ranks would not match.

    Returns:
        The inputs with the first rank's checkpoint, also on ranks that have not read one.

    Raises:
        EnvironmentFault: ranks differ; on every rank.
    """
    checkpoint = inputs.checkpoint.name if inputs.checkpoint else "no checkpoint"
    start = checkpoint if inputs.reads_checkpoint else None, zlib.crc32(repr(plan.config).encode())

    def merge(gathered: list[tuple[str | None, int, Path | None]]) -> Path | None:
        """The checkpoint of the first rank, after a check that all ranks start from it; runs on the first rank."""
        (first_name, first_config, first), *_ = gathered
        for rank, (name, config, _) in enumerate(gathered):
            if (name or first_name) != first_name:
                raise EnvironmentFault(
                    f"rank 0 starts from {first_name}, rank {rank} from {name}",
                    why=f"their machines have different files in {inputs.folder.path} or behind --load",
                    fix="put them on a file system that all machines share",
                )
            if config != first_config:
                raise EnvironmentFault(
                    f"rank {rank} has a different configuration from rank 0",
                    why="all ranks must run the same command line on the same files",
                    fix="compare the output of `nanotrain config` on both machines",
                )
        return first

    # Only the first rank receives the values of all ranks, so the cost of the others does not grow with the world.
    first = run_on_all(context.control, lambda: (*start, inputs.checkpoint), merge=merge)
    return replace(inputs, checkpoint=first, is_resumed=first is not None and plan.config.checkpoint.load is None)


def choose_hooks(config: Config, tokenizer: str | None, *, planned: PlannedPeak | None = None) -> list[Hook]:
    """The hooks of a run in call order; validation comes before logging, which reports its loss."""
    train, later_timeout_s = config.train, config.parallel.distributed_timeout_seconds_after_init
    hooks: list[tuple[bool, Hook]] = [
        (later_timeout_s is not None, TimeoutHook(later_timeout_s or 0.0)),
        (validates(config), EvaluateHook(tokenizer)),
        (True, LogHook()),
        (train.debug_nan, DebugNanHook()),
        (train.check_weight_hash_across_dp_replicas_interval > 0, ReplicasHook()),
        (train.tensorboard or train.wandb, TrackHook()),
        (config.checkpoint.save, CheckpointHook()),
        (train.profile, ProfileHook()),
        (train.generate_tokens > 0, SampleHook(tokenizer)),
        (train.report, ReportHook()),
        (train.prometheus_port is not None, PrometheusHook()),
        (train.notify is not None, NotifyHook()),
        (True, SummaryHook(planned)),
    ]
    return [hook for is_enabled, hook in hooks if is_enabled]
