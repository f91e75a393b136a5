"""From a plan and a context to the end of training: builds the run, chooses the hooks, fits, tidies up."""

import zlib

from nanotrain.comm.collectives import all_gather_object
from nanotrain.comm.device import device_name, manual_seed, reset_peak_memory
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.config.load import to_yaml
from nanotrain.errors import EnvironmentFault
from nanotrain.log import get_logger
from nanotrain.train.build import build_run
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.hooks.evaluate import EvaluateHook
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.hooks.log import LogHook
from nanotrain.train.hooks.profile import ProfileHook
from nanotrain.train.hooks.sample import SampleHook, SummaryHook
from nanotrain.train.hooks.track import TrackHook
from nanotrain.train.resolve import Plan
from nanotrain.train.trainer import Trainer

log = get_logger(__name__)


def run_plan(plan: Plan, context: ParallelContext) -> None:
    """Train as planned, on this rank.

    Args:
        plan: what was asked for, complete.
        context: this rank's device and groups.
    """
    require_same_start(plan, context)
    config = plan.config
    manual_seed(config.train.seed, context.device)
    reset_peak_memory(context.device)
    run = build_run(plan, context)
    try:
        if context.rank == 0:
            facts = {"device": device_name(context.device), "world_size": context.topology.world_size}
            plan.folder.write_description(to_yaml(config), facts)
            _announce(plan, context)
        if run.state.step >= config.train.train_iters:
            log.info("nothing to do: step %d of %d is done", run.state.step, config.train.train_iters)
        Trainer(run, choose_hooks(config, plan.tokenizer)).fit()
    finally:
        run.batches.close()


def require_same_start(plan: Plan, context: ParallelContext) -> None:
    """Every rank resolved the plan for itself; where machines see different files, one would wait for ever.

    Raises:
        EnvironmentFault: ranks start from different checkpoints or with different settings; on every rank alike.
    """
    found = plan.checkpoint.name if plan.checkpoint else "no checkpoint"
    starts = all_gather_object((found, zlib.crc32(to_yaml(plan.config).encode())), context.control)
    other = next((rank for rank, start in enumerate(starts) if start != starts[0]), None)
    if other is None:
        return
    if starts[other][0] != starts[0][0]:
        raise EnvironmentFault(
            f"rank 0 starts from {starts[0][0]}, rank {other} from {starts[other][0]}",
            why=f"their machines see different files in {plan.folder.path} or behind --load",
            fix="put them on a file system that all machines share",
        )
    raise EnvironmentFault(
        f"rank {other} was started with other settings than rank 0",
        why="all ranks must run the same command line over the same files",
        fix="compare `nanotrain config` with the same words on both machines",
    )


def choose_hooks(config: Config, tokenizer: str | None) -> list[Hook]:
    """The hooks of a run in the order in which they are called: a validation belongs to the step it is logged with."""
    train = config.train
    chosen: list[tuple[bool, Hook]] = [
        (train.eval_interval > 0, EvaluateHook()),
        (True, LogHook()),
        (train.tensorboard or train.wandb, TrackHook()),
        (config.checkpoint.save, CheckpointHook()),
        (train.profile, ProfileHook()),
        (train.generate_tokens > 0, SampleHook(tokenizer)),
        (True, SummaryHook()),
    ]
    return [hook for wanted, hook in chosen if wanted]


def _announce(plan: Plan, context: ParallelContext) -> None:
    config, topology = plan.config, plan.topology
    log.info(
        "%s: %s on %s, %s, %s",
        plan.folder.path,
        "1 rank" if topology.world_size == 1 else f"{topology.world_size} ranks",
        device_name(context.device),
        config.precision.params_dtype.value,
        config.parallel.data_parallel_sharding_strategy.value,
    )
    if plan.is_resumed:
        log.info("resuming; --no-auto-resume starts anew")
