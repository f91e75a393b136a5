"""`Run`: the live parts of one rank's run, built once by build.py. `TrainState`: its counters."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.data.loader import GlobalBatchLoader
from nanotrain.data.staged import StagedDataset
from nanotrain.model.transformer import Stage
from nanotrain.optim.distributed import DistributedOptimizer
from nanotrain.optim.group_norms import GroupNorms
from nanotrain.optim.lr import LRSchedule
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.pp.executor import Pipeline, RunnableStage
from nanotrain.parallel.pp.transfers import RankPlan
from nanotrain.runs.folder import RunFolder
from nanotrain.train.batches import BatchIterator
from nanotrain.train.metrics.source_losses import SourceLosses
from nanotrain.train.plans.plan import Plan, plan_train_schedule
from nanotrain.train.routers import ModelRouters
from nanotrain.train.start.inputs import RunInputs


@dataclass
class TrainState:
    """Counters of a run; with a checkpoint's tensors they are all that a resume needs."""

    step: int = 0  # optimizer steps done, skipped steps included
    consumed_samples: int = 0  # samples read by all ranks together, so the index of the next global batch's first
    consumed_tokens: int = 0  # unmasked target tokens
    # the global batch size at step 0. It converts the steps of the learning-rate curve to samples, so that the curve
    # stays the same when a resumed run has another batch size.
    curve_batch_size: int = 0
    # only in runs with rollback_on_spike:
    skipped_samples: int = 0  # left out after spikes; the index of the next sample is consumed + skipped samples
    spike_step: int = 0  # the highest step that was rolled back
    rollback_step: int = 0  # the step that the last rollback returned to
    recent_losses: list[float] = field(default_factory=list)  # of the last steps, oldest first

    def advance(self, *, samples: int, tokens: int) -> None:
        """Count one step."""
        self.step += 1
        self.consumed_samples += samples
        self.consumed_tokens += tokens

    def to_dict(self) -> dict[str, Any]:
        """The counters as JSON values; counters of rollbacks only if a rollback has happened."""
        rollbacks = ("skipped_samples", "spike_step", "rollback_step", "recent_losses")
        return {name: value for name, value in asdict(self).items() if value or name not in rollbacks}


class StepSchedules:
    """The pipeline schedule of each training step; planned again only when the number of microbatches changes."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._last = plan, plan.train_schedule

    def of(self, num_microbatches: int) -> RankPlan:
        """The actions and transfers of this rank in a step of `num_microbatches`."""
        if self._last.num_microbatches != num_microbatches:
            self._last = plan_train_schedule(self._plan.config, self._plan.groups, num_microbatches=num_microbatches)
        return self._last


@dataclass
class StopRequest:
    """Signals that this rank received; the run stops, or saves, on all ranks."""

    signal: int | None = None  # ends the run at the next step, validation batch or microbatch
    wants_save: bool = False  # received SIGUSR1 since the last step

    def __bool__(self) -> bool:
        return self.signal is not None


@dataclass(frozen=True)
class Run:
    """The live parts of a run on one rank."""

    plan: Plan  # what was built
    inputs: RunInputs  # open datasets and folders
    context: ParallelContext  # device and process groups
    stages: Mapping[int, Stage]  # this rank's part of the model, by global stage index
    runnable: Mapping[int, RunnableStage]  # the same stages as the pipeline executor takes them
    # flat parameter and gradient storage, and gradient reduction; dense and expert, per stage
    data_parallel: tuple[DataParallel, ...]
    routers: ModelRouters  # of MoE layers; none in a dense model
    optimizer: DistributedOptimizer  # main params and moments of this rank's shard
    pipeline: Pipeline  # the pp group, and the shape of the hidden states sent over it
    lr_schedule: LRSchedule  # learning rate by consumed samples
    batches: GlobalBatchLoader  # loads this rank's microbatches; closed when the run ends
    batch_iterator: BatchIterator  # global batches, with the counts that all ranks agree on
    checkpointer: Checkpointer  # reads and writes the run's checkpoints
    state: TrainState  # counters
    schedules: StepSchedules  # pipeline schedules by number of microbatches
    source_losses: SourceLosses | None = None  # losses by corpus; None where the data is no blend
    group_norms: GroupNorms | None = None  # norms by group of parameters, of logged steps; None where not logged
    stop: StopRequest = field(default_factory=StopRequest)  # set by the trainer's signal handler

    @property
    def config(self) -> Config:
        """The complete configuration."""
        return self.plan.config

    def pipeline_of(self, seq_length: int) -> Pipeline:
        """The pipeline of a step whose sequences have `seq_length` tokens, a divisor of the sample length."""
        parts = self.config.data.seq_length // seq_length
        batch_size, length, hidden_size = self.plan.hidden_shape
        shape = (batch_size * parts, length // parts, hidden_size)
        return self.pipeline if parts == 1 else replace(self.pipeline, hidden_shape=shape)

    def data_stage_at(self, consumed_samples: int) -> str | None:
        """The data stage of the batch that starts at `consumed_samples`; None without data stages."""
        dataset = self.batches.dataset
        if not isinstance(dataset, StagedDataset):
            return None
        return dataset.stage_at(consumed_samples + self.state.skipped_samples).name

    @property
    def folder(self) -> RunFolder:
        """Where the run is written."""
        return self.inputs.folder
