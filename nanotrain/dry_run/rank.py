"""The real step of one rank on the meta device, recorded."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
from nanotrain.train.build import build_run
from nanotrain.train.run import RunInputs
from nanotrain.train.step import train_step


@dataclass(frozen=True)
class RankRecord:
    """What one rank did."""

    plan: Plan
    setup: list[Call]  # of the build and of a first step of few microbatches
    step: list[Call]  # of the second step
    resident: int  # bytes allocated before the first step
    peak: int  # largest number of bytes allocated in a step
    saved: Mapping[TensorBox, int]  # bytes of what the rank writes into a checkpoint
    sent: Mapping[tuple[str, str], int]  # bytes of the second step by group and operation

    @cached_property
    def planned(self) -> tuple[int, int]:
        """Planned bytes before the first step, and at the peak of a step."""
        plan = plan_memory(
            self.plan.config, self.plan.topology.world_size, pp_rank=self.pp_index, device="cuda"
        )
        resident = self.plan.resident_bytes
        return resident.params + resident.grads + resident.optimizer, plan.total - PROCESS_BYTES[
            "cuda"
        ]

    @property
    def pp_index(self) -> int:
        """The pipeline rank."""
        return self.plan.groups["pp"].index

    def describe(self, call: Call | None) -> str:
        """A call for messages."""
        if call is None:
            return "starts none"
        during = (
            [*self.plan.train_schedule.actions][call.moment]
            if isinstance(call.moment, int)
            else call.moment
        )
        return f"starts {call.op} of {call.size} in {during} at {call.place}"


def run_rank(plan: Plan, *, shapes: dict[Any, Any]) -> RankRecord:
    """Build the run of a rank, train two steps, and plan a save.

    Args:
        plan: plan of the rank.
        shapes: results of operators by arguments, shared by all ranks.

    Raises:
        Race: a buffer is used while an operation in flight may read or write it.
    """
    recorder, parallel = Recorder(shapes), plan.config.parallel
    fewest = plan.groups["pp"].size if parallel.num_virtual_stages_per_pipeline_rank > 1 else 1
    with (
        TemporaryDirectory() as folder,
        recorded_world(plan.topology, plan.rank, recorder=recorder) as context,
        on_meta(plan),
        recorder,
    ):
        data = replace(DataConfig(), mock_data=True, seq_length=plan.config.data.seq_length)
        datasets = build_data(data, vocab_size=plan.shape.vocab_size, seed=0, required={"train"})
        inputs = RunInputs(RunFolder(Path(folder)), datasets)
        run = build_run(plan, inputs, context=context)
        # while it builds, initial values and buffers are both there
        resident = recorder.peak = recorder.allocated
        starts = []
        for num_microbatches in (fewest, plan.num_microbatches):
            starts.append(len(recorder.calls))
            recorder.moment = "batch"
            context.traffic.reset()
            batch = run.batch_iterator.next()
            assert batch is not None
            train_step(run, replace(batch, microbatches=batch.microbatches[:num_microbatches]))
        sent = {(name, op): context.traffic.bytes(name, op) for name, op in sent_bytes(plan)}
        run.batch_iterator.discard()
        for dp in run.data_parallel:
            dp.wait_for_params()
        recorder.finish()
        tensors = run.optimizer.tensors_to_save() | run.parts.tensors_to_save()
        saved = {box: tensor.nbytes for box, tensor in tensors.items()}
    setup, step = recorder.calls[: starts[1]], recorder.calls[starts[1] :]
    return RankRecord(plan, setup, step, resident, recorder.peak, saved, sent)
