"""Go on in another layout from the state in the memory of the ranks, without a file.

    require_room   the check of the memory, before
    hold_state     the tensors and counters of a run that has ended, in place of a checkpoint
    go_on          the groups, the plan and the inputs of the run that follows
    record         what was moved, in the run folder

The old model, its gradients and its groups are gone before the new ones are built. What is held are
main params, optimizer state and the tensors of the step parts.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from nanotrain.checkpoint.all_ranks import reduce_on_all
from nanotrain.checkpoint.live import MEMORY_BYTES, LiveCheckpoint
from nanotrain.checkpoint.manifest import Manifest, plain_json
from nanotrain.comm.collectives import barrier
from nanotrain.comm.device import memory_per_rank
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.config.schema import to_dict
from nanotrain.data.build import build_data, fingerprints
from nanotrain.data.mix import recorded_stages, with_recorded_mix
from nanotrain.errors import ConfigError
from nanotrain.log import get_logger, start_logging
from nanotrain.plan.plan import Plan, plan_run
from nanotrain.quantities import count_of, describe_bytes
from nanotrain.runs.relayout import changed_keys, record_layout
from nanotrain.topology.topology import Topology
from nanotrain.train.run import Run, RunInputs, Successor

log = get_logger(__name__)


@dataclass(frozen=True)
class HeldRun:
    """The state of a run that has ended, and the run that follows it."""

    source: LiveCheckpoint
    successor: Successor
    config: Config  # of the run that has ended
    begun: float  # monotonic time


def hold_state(run: Run) -> HeldRun:
    """Keep the state of a run for its successor; its other tensors are freed with it."""
    begun = time.monotonic()
    successor = run.stop.successor
    assert successor is not None, "callers check it"
    run.wait_for_params()
    objects = {
        "train": run.state.to_dict(),
        "optimizer": run.optimizer.state_dict(),
        "corpora": fingerprints(run.dataset),
    }
    topology = {"world_size": run.context.topology.world_size}
    manifest = Manifest(run.state.step, {}, {}, plain_json(objects), to_dict(run.config), topology)
    tensors = run.optimizer.state_tensors() | run.parts.tensors()
    source = LiveCheckpoint(tensors, manifest, device=run.context.device)
    return HeldRun(source, successor, run.config, begun)


def go_on(
    held: HeldRun, inputs: RunInputs, *, context: ParallelContext
) -> tuple[Plan, RunInputs] | None:
    """Leave the old groups, form the new ones, and plan the run that follows; collective.

    Returns:
        Plan and inputs of the run that follows; None on a rank that it leaves out, once the others
        have its state.
    """
    config = held.successor.config
    world_size = held.successor.world_size
    topology = Topology.of(config.parallel, world_size, has_experts=config.model.moe is not None)
    barrier(context.control)  # nothing of the old run is under way
    # of the run that follows; its hook sets the timeout after its start, as in a new process
    context.set_timeout(60 * config.parallel.distributed_timeout_minutes)
    everyone = context.rejoin(topology)
    held.source.connect(everyone.world, everyone.control)
    if not context.is_member:
        held.source.leave()
        return None
    start_logging(coordinates=context.coords_text, is_first=context.rank == 0)
    plan = plan_run(config, world_size, rank=context.rank)
    inputs = replace(
        _with_mixed_data(inputs, config),
        checkpoint=None,
        live=held.source,
        is_resumed=True,
        begins_phase=True,
        reads_checkpoint=True,
    )
    return plan, inputs


def _with_mixed_data(inputs: RunInputs, config: Config) -> RunInputs:
    """The inputs with the samples that a resume would read after `nanotrain data mix`."""
    first = 0 if inputs.data_origin is None else inputs.data_origin.sample
    if config.data.mock_data or not recorded_stages(inputs.folder.path, origin=first):
        return inputs
    data = with_recorded_mix(config.data, inputs.folder.path, origin=first)
    assert config.model.vocab_size, "set before the run began"
    mixed = build_data(
        data, vocab_size=config.model.vocab_size, seed=config.train.seed, required={"train"}
    )
    return replace(inputs, datasets=replace(inputs.datasets, train=mixed.train))


def record(run: Run, held: HeldRun) -> None:
    """Log and record the relayout on the first rank, once the run that follows is built."""
    if not run.context.control.is_first:
        return
    seconds = time.monotonic() - held.begun
    moved = held.source.moved
    changed = changed_keys(held.config, held.successor.config)
    log.info(
        "relayout after step %d in %.2f s: %s sent in %s, of them in %.2f s; %s",
        run.state.step,
        seconds,
        describe_bytes(moved.sent_bytes),
        count_of(moved.num_rounds, "round"),
        moved.seconds,
        ", ".join(f"{key} {before} -> {now}" for key, (before, now) in changed.items()),
    )
    row: Mapping[str, Any] = {
        "step": run.state.step,
        **held.successor.request,
        "ranks": run.context.topology.world_size,
        "total_seconds": round(seconds, 3),
        **asdict(moved),
    }
    record_layout(run.folder.path, row, before=held.config, after=held.successor.config)


def require_room(run: Run, config: Config, *, world_size: int) -> None:
    """Check that every rank has memory for its state and for the run that follows; collective.

    Raises:
        ConfigError: one has not; on every rank.
    """
    context = run.context

    def lacking() -> list[float]:
        """The bytes that this rank lacks, and the bytes that it needs."""
        needed = _held_bytes(run) + MEMORY_BYTES
        if context.rank < world_size:
            resident = plan_run(config, world_size, rank=context.rank).resident_bytes
            needed += resident.params + resident.units + resident.grads + resident.optimizer
        available = memory_per_rank(context.device, context.num_local_ranks)
        return [needed - available if available else 0.0, needed]

    lacked, needed = reduce_on_all(context.control, lacking, length=2)
    if lacked > 0:
        raise ConfigError(
            f"a rank lacks {describe_bytes(int(lacked))} of memory",
            why=f"the old and the new state together need {describe_bytes(int(needed))}",
            fix="stop the run, and start it in the other layout: a checkpoint loads in any",
        )


def _held_bytes(run: Run) -> int:
    """Bytes of the storage that this rank holds until the run that follows has its state."""
    tensors = run.optimizer.state_tensors() | run.parts.tensors()
    nbytes_of_storage = {}
    for tensor in tensors.values():
        storage = tensor.untyped_storage()
        nbytes_of_storage[storage.data_ptr()] = storage.nbytes()
    return sum(nbytes_of_storage.values())
