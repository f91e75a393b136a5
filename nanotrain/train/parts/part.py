"""`StepPart`: the part of a training step that a feature adds. `StepParts`: the parts of a run.

    is_enabled                  whether a model has the part
    prepare, counts             before the step: changes of the microbatches as they are read, and
                                numbers that are summed over all ranks
    context                     inputs of the forward passes besides the batch
    sums                        after gradients are reduced: this rank's part of sums that join the
                                all-reduce of the gradient norm
    after_update                after the update rule, before the all-gather of parameters
    metrics                     on the host, once the step is read
    wants_repeat, repeating     whether a step that changed no weight is taken again, and how
    repeated                    once it was
    take_back                   before that: forget the step
    tensors, missing, unread, restored  in checkpoints

Between `prepare` and `metrics` nothing may wait for the device (law L10).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanotrain.checkpoint.manifest import Manifest
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.data.batch import Batch, SampleDataset
from nanotrain.model.transformer import Stage
from nanotrain.optim.distributed import DistributedOptimizer, Update
from nanotrain.parallel.dp.param_buffer import ParamBuffer
from nanotrain.parallel.pp.executor import RunnableStage
from nanotrain.plan.plan import Plan
from nanotrain.spec.boxes import TensorBox
from nanotrain.topology.groups import GroupName
from nanotrain.train.batches import GlobalBatch


@dataclass(frozen=True)
class BuiltModel:
    """This rank's stages and optimizer; parts are built from it, checkpoints are loaded into it."""

    plan: Plan  # the plan that was built
    context: ParallelContext  # device and process groups
    dataset: SampleDataset  # training samples
    stages: Mapping[int, Stage]  # this rank's part of the model, by global stage index
    runnable: Mapping[int, RunnableStage]  # the same stages as the pipeline executor takes them
    # flat parameter and gradient storage, and gradient reduction; dense and expert, per stage;
    # frozen parameters without gradients
    data_parallel: tuple[ParamBuffer, ...]
    optimizer: DistributedOptimizer  # main params and moments of this rank's shard

    @property
    def config(self) -> Config:
        """The complete configuration."""
        return self.plan.config

    def start_param_gather(self) -> None:
        """Start the all-gather of the updated parameters."""
        for dp in self.data_parallel:
            dp.start_param_gather()

    def wait_for_params(self) -> None:
        """Wait for the all-gather of the parameters."""
        for dp in self.data_parallel:
            dp.wait_for_params()


class StepPart:
    """Base class; subclasses override what they need. Every rank calls all parts in one order.

    Attributes:
        replicated_over: groups whose ranks hold equal `tensors`; the first rank of all of them
            saves.
        may_repeat: whether the part may have a step repeated.
    """

    replicated_over: tuple[GroupName, ...] = ("tp", "dp_cp")  # the ranks of a stage
    may_repeat = False  # whether `wants_repeat` is asked after every step

    def __init__(self, model: BuiltModel) -> None:
        """Build the part of a model; collective."""

    @staticmethod
    def is_enabled(model: BuiltModel) -> bool:
        """Whether a model has the part."""
        return True

    def prepare(self, batch: Batch) -> Batch:
        """Change a microbatch on the host, before it is split over ranks."""
        return batch

    def counts(self, batches: Sequence[Batch]) -> list[float]:
        """Numbers that are summed over all ranks before the step.

        Args:
            batches: microbatches of this rank; none after an error. The result has equally many
                numbers then.
        """
        return []

    def context(self, batch: GlobalBatch, counts: Sequence[float]) -> dict[str, Any]:
        """Fields of `BatchContext` for all microbatches of a step.

        Args:
            batch: this rank's part of the global batch.
            counts: the sums of `counts` over all ranks.
        """
        return {}

    def sums(self, *, is_logged: bool) -> Tensor | None:
        """[n] fp64, this rank's part of sums over all ranks; called once all gradients are reduced.

        Args:
            is_logged: whether the step is logged; values for the log are measured only then.
        """
        return None

    def after_update(self, update: Update, sums: Tensor, *, is_logged: bool) -> Tensor:
        """Act between the update rule and the all-gather of parameters.

        Args:
            update: the result of the optimizer step.
            sums: the sums of `sums` over all ranks; empty without them.
            is_logged: whether the step is logged.

        Returns:
            [m] the numbers that `metrics` reads; empty for none.
        """
        return sums

    def metrics(self, numbers: Sequence[float]) -> dict[str, Any]:
        """Entries of the step in metrics.jsonl; not called without numbers.

        The entry `skip_reason` explains why the part had the step skipped and how to fix it; the
        log and the error after many skips show it.

        Args:
            numbers: result of `after_update`.
        """
        return {}

    def wants_repeat(self, metrics: Mapping[str, Any]) -> bool:
        """Whether to take a step again that was skipped, with the same batch; equal on all ranks.

        Called where `may_repeat` is set, for which the host waits for every step.

        Args:
            metrics: the metrics of the step.
        """
        return False

    def take_back(self) -> None:
        """Return to the state before the last step, which changed no weight and is taken again."""

    def repeating(self) -> AbstractContextManager[None]:
        """A context in which the repeated step runs; a part changes its settings for that time."""
        return nullcontext()

    def repeated(self, metrics: Mapping[str, Any], *, local_fault: int) -> None:
        """Called after a repetition.

        Args:
            metrics: the metrics of the repetition.
            local_fault: `StepOutput.local_fault` of this rank in the step that was skipped.
        """

    def tensors(self) -> dict[TensorBox, Tensor]:
        """This rank's tensors in a checkpoint, into which it is also read."""
        return {}

    def missing(
        self, targets: Collection[TensorBox], manifest: Manifest, *, weights_alone: bool
    ) -> Collection[TensorBox]:
        """The tensors of this part that are not read from a checkpoint, which must have all others.

        Args:
            targets: all tensors of the run.
            manifest: manifest of the checkpoint.
            weights_alone: whether only weights are loaded.
        """
        return ()

    def unread(self, manifest: Manifest) -> Collection[str]:
        """Names of the tensors of a checkpoint that this run has no use for."""
        return ()

    def restored(self, missing: Collection[TensorBox], *, checkpoint: Path | None) -> None:
        """Called once weights and tensors are loaded.

        Args:
            missing: tensors of the run that were not read.
            checkpoint: None if only weights were loaded.
        """


class StepParts:
    """The parts of a run in the order in which they are called.

    Args:
        parts: parts by name.
        context: device and groups of this rank.
    """

    def __init__(self, parts: Mapping[str, StepPart], context: ParallelContext) -> None:
        self.by_name = dict(parts)
        self._context = context
        self._num_sums: list[int] = []  # sums of each part in this step

    def __iter__(self) -> Iterator[StepPart]:
        return iter(self.by_name.values())

    def prepare(self, batch: Batch) -> Batch:
        """A microbatch as all parts need it."""
        for part in self:
            batch = part.prepare(batch)
        return batch

    def counts(self, batches: Sequence[Batch]) -> list[float]:
        """The counts of all parts."""
        return [count for part in self for count in part.counts(batches)]

    def context(self, batch: GlobalBatch) -> dict[str, Any]:
        """Fields of `BatchContext` of all parts."""
        counts = iter(batch.counts)
        fields = {}
        for part in self:
            num_counts = len(part.counts([]))
            fields.update(part.context(batch, list(islice(counts, num_counts))))
        return fields

    def sums(self, *, is_logged: bool) -> Tensor:
        """[n] fp64, the sums of all parts."""
        sums = [torch.zeros(0, dtype=torch.float64, device=self._context.device)]
        self._num_sums = []
        for part in self:
            part_sums = part.sums(is_logged=is_logged)
            self._num_sums.append(0 if part_sums is None else len(part_sums))
            if part_sums is not None:
                sums.append(part_sums)
        return torch.cat(sums)

    def after_update(self, update: Update, sums: Tensor, *, is_logged: bool) -> dict[str, Tensor]:
        """Call all parts after the update rule; returns the numbers of each for `metrics`."""
        numbers = {}
        for (name, part), part_sums in zip(
            self.by_name.items(), sums.split(self._num_sums), strict=True
        ):
            numbers[name] = part.after_update(update, part_sums, is_logged=is_logged)
        return numbers

    def metrics(self, numbers: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        """The entries of all parts in metrics.jsonl."""
        entries = {}
        for name, part_numbers in numbers.items():
            if part_numbers:
                entries.update(self.by_name[name].metrics(part_numbers))
        return entries

    def tensors(self) -> dict[TensorBox, Tensor]:
        """The tensors of all parts."""
        tensors = {}
        for part in self:
            tensors.update(part.tensors())
        return tensors

    def tensors_to_save(self) -> dict[TensorBox, Tensor]:
        """The tensors that this rank saves: the first of the ranks with equal tensors does."""
        tensors = {}
        for part in self:
            if all(self._context.group(name).is_first for name in part.replicated_over):
                tensors.update(part.tensors())
        return tensors

    def missing(
        self, targets: Collection[TensorBox], manifest: Manifest, *, weights_alone: bool
    ) -> set[TensorBox]:
        """The tensors of all parts that are not read from a checkpoint."""
        boxes: set[TensorBox] = set()
        for part in self:
            boxes.update(part.missing(targets, manifest, weights_alone=weights_alone))
        return boxes

    def unread(self, manifest: Manifest) -> set[str]:
        """The tensors of a checkpoint that no part has a use for."""
        return {name for part in self for name in part.unread(manifest)}

    def restored(self, missing: Collection[TensorBox], *, checkpoint: Path | None) -> None:
        """Let all parts initialize the tensors that were not read."""
        for part in self:
            part.restored(missing, checkpoint=checkpoint)
