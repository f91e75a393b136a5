"""`Run`: the live parts of one rank's run, built once by build.py. `TrainState`: its counters."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.data.loader import GlobalBatchLoader
from nanotrain.model.transformer import Stage
from nanotrain.optim.distributed import DistributedOptimizer
from nanotrain.optim.lr import LRSchedule
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.pp.executor import Pipeline, RunnableStage
from nanotrain.runs.folder import RunFolder
from nanotrain.train.batches import BatchIterator
from nanotrain.train.inputs import RunInputs
from nanotrain.train.plan import Plan


@dataclass
class TrainState:
    """Counters of a run; with a checkpoint's tensors they are all that a resume needs.

    Attributes:
        step: optimizer steps done, skipped steps included.
        consumed_samples: samples read by all ranks together; the next global batch starts there.
        consumed_tokens: unmasked target tokens.
        curve_batch_size: the global batch size at step 0. It converts the steps of the learning-rate curve to samples,
            so that the curve stays the same when a resumed run has another batch size.
    """

    step: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    curve_batch_size: int = 0

    def advance(self, *, samples: int, tokens: int) -> None:
        """Count one step."""
        self.step += 1
        self.consumed_samples += samples
        self.consumed_tokens += tokens

    def to_dict(self) -> dict[str, int]:
        """The counters as JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Run:
    """The live parts of a run on one rank.

    Attributes:
        plan: what was built.
        inputs: open datasets and folders.
        context: device and process groups.
        stages: this rank's part of the model, by global stage index.
        runnable: the same stages as the pipeline executor takes them.
        data_parallel: flat parameter and gradient storage, and gradient reduction; dense and expert, per stage.
        optimizer: main params and moments of this rank's shard.
        pipeline: the pp group, and the shape of the hidden states sent over it.
        lr_schedule: learning rate by consumed samples.
        batches: loads this rank's microbatches; closed when the run ends.
        batch_iterator: global batches, with the counts that all ranks agree on.
        checkpointer: reads and writes the run's checkpoints.
        state: counters.
    """

    plan: Plan
    inputs: RunInputs
    context: ParallelContext
    stages: Mapping[int, Stage]
    runnable: Mapping[int, RunnableStage]
    data_parallel: tuple[DataParallel, ...]
    optimizer: DistributedOptimizer
    pipeline: Pipeline
    lr_schedule: LRSchedule
    batches: GlobalBatchLoader
    batch_iterator: BatchIterator
    checkpointer: Checkpointer
    state: TrainState

    @property
    def config(self) -> Config:
        """The complete configuration."""
        return self.plan.config

    @property
    def folder(self) -> RunFolder:
        """Where the run is written."""
        return self.inputs.folder
