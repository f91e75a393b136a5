"""The real step of one rank on the meta device, recorded."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from nanotrain.comm.recorded_world import recorded_world
from nanotrain.comm.recorder import Call, Recorder
from nanotrain.config.config import DataConfig
from nanotrain.data.build import build_data
from nanotrain.dry_run.stand_ins import on_meta
from nanotrain.plan.memory_plan import PROCESS_BYTES, plan_memory
from nanotrain.plan.plan import Plan
from nanotrain.plan.traffic import sent_bytes
from nanotrain.runs.folder import RunFolder
from nanotrain.spec.boxes import TensorBox
from nanotrain.topology.groups import GroupSpec
from nanotrain.train.build import build_run
from nanotrain.train.run import Run, RunInputs
from nanotrain.train.step import train_step


class PlannedBytes(NamedTuple):
    """Planned memory of a rank."""

    resident: int  # before the first step
    peak: int  # at the peak of a step


@dataclass(frozen=True)
class RankRecord:
    """The recorded run of one rank."""

    plan: Plan
    setup: list[Call]  # calls of the build and of a first step of few microbatches
    step: list[Call]  # calls of the second step
    resident: int  # bytes allocated before the first step
    peak: int  # largest number of bytes allocated in a step
    saved: Mapping[TensorBox, int]  # bytes that the rank writes into a checkpoint
    sent: Mapping[tuple[str, str], int]  # bytes of the second step by group and operation

    @cached_property
    def planned(self) -> PlannedBytes:
        """Planned memory, without the libraries of the process."""
        memory = plan_memory(
            self.plan.config, self.plan.topology.world_size, pp_rank=self.pp_index, device="cuda"
        )
        resident = self.plan.resident_bytes
        return PlannedBytes(
            resident=resident.params + resident.grads + resident.optimizer,
            peak=memory.total - PROCESS_BYTES["cuda"],
        )

    @property
    def pp_index(self) -> int:
        """The pipeline rank."""
        return self.plan.groups["pp"].index

    @property
    def distinct_groups(self) -> list[GroupSpec]:
        """One group for every set of several ranks; the first name of each."""
        groups = list(self.plan.groups.values())
        by_ranks = {spec.ranks: spec for spec in reversed(groups)}
        return [spec for spec in by_ranks.values() if spec.size > 1]

    def describe(self, call: Call | None) -> str:
        """A call for messages."""
        if call is None:
            return "starts none"
        during: object = call.moment
        if isinstance(call.moment, int):
            during = [*self.plan.train_schedule.actions][call.moment]
        return f"starts {call.op} of {call.size} in {during} at {call.place}"


def run_rank(plan: Plan, *, shapes: dict[Any, Any]) -> RankRecord:
    """Build the run of a rank, train two steps, and plan a save.

    Args:
        plan: plan of the rank.
        shapes: results of operators by arguments, shared by all ranks.

    Raises:
        Race: a buffer is used while an operation in flight may read or write it.
    """
    recorder = Recorder(shapes)
    with (
        TemporaryDirectory() as folder,
        recorded_world(plan.topology, plan.rank, recorder=recorder) as context,
        on_meta(plan),
        recorder,
    ):
        run = build_run(plan, _run_inputs(plan, Path(folder)), context=context)
        resident = recorder.allocated
        recorder.peak = resident  # while it builds, initial values and buffers both exist
        _train_step(run, recorder, num_microbatches=_fewest_microbatches(plan))
        num_setup_calls = len(recorder.calls)
        context.traffic.reset()
        _train_step(run, recorder, num_microbatches=plan.num_microbatches)
        sent = {(name, op): context.traffic.bytes(name, op) for name, op in sent_bytes(plan)}
        run.batch_iterator.discard()
        for dp in run.data_parallel:
            dp.wait_for_params()
        recorder.finish()
        tensors = run.optimizer.tensors_to_save() | run.parts.tensors_to_save()
        saved = {box: tensor.nbytes for box, tensor in tensors.items()}
    return RankRecord(
        plan,
        setup=recorder.calls[:num_setup_calls],
        step=recorder.calls[num_setup_calls:],
        resident=resident,
        peak=recorder.peak,
        saved=saved,
        sent=sent,
    )


def _run_inputs(plan: Plan, folder: Path) -> RunInputs:
    """A run folder and mock data."""
    data = replace(DataConfig(), mock_data=True, seq_length=plan.config.data.seq_length)
    datasets = build_data(data, vocab_size=plan.shape.vocab_size, seed=0, required={"train"})
    return RunInputs(RunFolder(folder), datasets)


def _fewest_microbatches(plan: Plan) -> int:
    """The microbatches of the first step; interleaved schedules need one per pipeline rank."""
    is_interleaved = plan.config.parallel.num_virtual_stages_per_pipeline_rank > 1
    return plan.groups["pp"].size if is_interleaved else 1


def _train_step(run: Run, recorder: Recorder, *, num_microbatches: int) -> None:
    """Train on the first microbatches of the next batch."""
    recorder.moment = "batch"
    batch = run.batch_iterator.next()
    assert batch is not None
    train_step(run, replace(batch, microbatches=batch.microbatches[:num_microbatches]))
