"""`Run`: the live parts of one rank's run, built once by build.py. `TrainState`: its counters."""

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.checkpoint.live import LiveCheckpoint
from nanotrain.checkpoint.run_memory import RunMemory
from nanotrain.comm.stop_point import StopPoint
from nanotrain.config.config import Config
from nanotrain.data.blend import BlendedDataset
from nanotrain.data.build import DatasetSplits
from nanotrain.data.loader import GlobalBatchLoader
from nanotrain.data.origin import DataOrigin
from nanotrain.data.tasks import Task
from nanotrain.optim.lr import LRSchedule
from nanotrain.parallel.pp.executor import Pipeline
from nanotrain.parallel.pp.transfers import RankPlan
from nanotrain.plan.plan import Plan, plan_train_schedule
from nanotrain.runs.folder import RunFolder
from nanotrain.system import stop_signals
from nanotrain.train.batches import BatchIterator
from nanotrain.train.parts.part import BuiltModel, StepParts


@dataclass
class TrainState:
    """Counters of a run; with a checkpoint's tensors they are all that a resume needs."""

    step: int = 0  # optimizer steps done, skipped steps included
    consumed_samples: int = 0  # over all ranks; index of the next global batch's first sample
    consumed_tokens: int = 0  # unmasked target tokens
    # the global batch size at step 0. It converts the steps of the learning-rate curve to samples,
    # so that the curve stays the same when a resumed run has another batch size.
    curve_batch_size: int = 0
    # Only in runs with rollback_on_spike. Samples that were left out after spikes; the index of
    # the next sample is consumed + skipped samples.
    skipped_samples: int = 0
    spike_step: int = 0  # the highest step that was rolled back
    rollback_step: int = 0  # the step that the last rollback returned to
    # losses of the last steps, oldest first
    recent_losses: list[float] = field(default_factory=list)

    def advance(self, *, samples: int, tokens: int) -> None:
        """Count one step."""
        self.step += 1
        self.consumed_samples += samples
        self.consumed_tokens += tokens

    def take_back(self, *, samples: int, tokens: int) -> None:
        """Uncount a step, which is taken again."""
        self.step -= 1
        self.consumed_samples -= samples
        self.consumed_tokens -= tokens

    def to_dict(self) -> dict[str, Any]:
        """The counters as JSON values; counters of rollbacks only if a rollback has happened."""
        counters = asdict(self)
        for name in ("skipped_samples", "spike_step", "rollback_step", "recent_losses"):
            if not counters[name]:
                del counters[name]
        return counters


class StepSchedules:
    """The pipeline schedule of each step, planned again when the number of microbatches changes."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._last = plan.train_schedule

    def of(self, num_microbatches: int) -> RankPlan:
        """The actions and transfers of this rank in a step of `num_microbatches`."""
        if self._last.num_microbatches != num_microbatches:
            self._last = plan_train_schedule(
                self._plan.config,
                self._plan.groups,
                num_microbatches=num_microbatches,
                trainable=self._plan.trainable,
            )
        return self._last


@dataclass(frozen=True)
class Successor:
    """The run that goes on from the state in memory, built again with another configuration."""

    config: Config
    world_size: int  # ranks that stay, the first ones
    request: Mapping[str, Any]  # for the record


@dataclass
class StopRequest:
    """Reasons to stop: signals that this rank received, or a successor; on all ranks."""

    signal: int | None = None  # ends the run at the next step, validation batch or microbatch
    wants_save: bool = False  # received SIGUSR1 since the last step
    successor: Successor | None = None  # goes on after this step; equal on all ranks

    def __bool__(self) -> bool:
        return self.signal is not None

    @contextmanager
    def on_signals(self, stop_point: StopPoint | None) -> Iterator[None]:
        """SIGTERM, SIGHUP or SIGINT ends the run, a second SIGINT (Ctrl-C) at once; SIGUSR1 saves.

        A second SIGTERM is ignored: schedulers send one to every process, and torchrun sends
        another to its ranks. Only the main thread can handle signals; in any other thread the
        handlers stay as they are.

        Args:
            stop_point: point in a step at which all ranks stop; None to stop between steps only.
        """
        before = {}
        if threading.current_thread() is threading.main_thread():
            for number in (*stop_signals(), signal.SIGUSR1):
                before[number] = signal.getsignal(number) or signal.SIG_DFL

        def on_signal(number: int, frame: FrameType | None) -> None:
            """Note the signal; a second Ctrl-C ends the process."""
            if number == signal.SIGUSR1:
                self.wants_save = True
                return
            self.signal = number
            if number == signal.SIGINT:
                signal.signal(number, before[signal.SIGINT])

        for number in before:
            signal.signal(number, on_signal)
        try:
            if stop_point is not None:
                stop_point.start(lambda: bool(self))
            yield
        finally:
            if stop_point is not None:
                stop_point.end()
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass(frozen=True)
class RunInputs:
    """The open inputs of a run, and its folder."""

    folder: RunFolder  # the run folder; it exists and is writable
    datasets: DatasetSplits  # samples by split
    # name or path as `load_tokenizer` takes it; None without a tokenizer
    tokenizer: str | None = None
    checkpoint: Path | None = None  # the step folder to start from; None for a new run
    is_resumed: bool = False  # whether `checkpoint` is in the folder of this run
    begins_phase: bool = False  # whether this process had the state at the end of another phase
    # key of the configuration -> source of its value
    origins: Mapping[str, str] = field(default_factory=dict)
    # state in the memory of the ranks, to go on from; None: from `checkpoint`
    live: LiveCheckpoint | None = None
    # False: another rank looks for it, and `require_same_start` sets it
    reads_checkpoint: bool = True
    tasks: tuple[Task, ...] = ()  # scored at every validation
    # folders in the memory of the hosts; None: nothing is saved there
    memory: RunMemory | None = None
    # where changed data begins; None: at sample 0
    data_origin: DataOrigin | None = None
    # settings of the command line that the order of the samples follows from
    data_settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def starts_anew(self) -> bool:
        """Whether there is no state of a run to go on from."""
        return self.checkpoint is None and self.live is None

    @property
    def is_unsaved(self) -> bool:
        """Whether the state to go on from is in no checkpoint."""
        return self.live is not None


@dataclass(frozen=True)
class Run(BuiltModel):
    """The live parts of a run on one rank."""

    inputs: RunInputs  # open datasets and folders
    parts: StepParts  # parts that features add to every step
    pipeline: Pipeline  # the pp group, and the shape of the hidden states sent over it
    lr_schedule: LRSchedule  # learning rate by consumed samples
    batches: GlobalBatchLoader  # loads this rank's microbatches; closed when the run ends
    batch_iterator: BatchIterator  # global batches, with the counts that all ranks agree on
    checkpointer: Checkpointer  # reads and writes the run's checkpoints
    state: TrainState  # counters
    schedules: StepSchedules  # pipeline schedules by number of microbatches
    stop: StopRequest = field(default_factory=StopRequest)  # set by the signal handler of `fit`

    @property
    def folder(self) -> RunFolder:
        """The folder of the run."""
        return self.inputs.folder

    def start_param_gather(self) -> None:
        """Start the all-gather of the updated parameters, as a phase of the step."""
        self.context.heartbeat.begin("param-gather")
        super().start_param_gather()

    @property
    def loss_scale(self) -> float | Tensor:
        """Factor of the summed loss: the optimizer divides by the scale, averaging by the ranks."""
        return self.optimizer.loss_scale.scale * self.plan.num_averaged_ranks

    def data_stage_at(self, consumed_samples: int) -> str | None:
        """The data stage of the batch that starts at `consumed_samples`; None without stages."""
        dataset = self.batches.dataset
        if not isinstance(dataset, BlendedDataset):
            return None
        return dataset.stage_at(consumed_samples + self.state.skipped_samples).name or None
