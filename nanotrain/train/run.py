"""`Run`: everything a training run is made of, built once by `build.py`. No methods; nothing below names it."""

from collections.abc import Mapping
from dataclasses import dataclass

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.data.build import DatasetSplits
from nanotrain.data.loader import GlobalBatchLoader
from nanotrain.data.sampler import SamplerConfig
from nanotrain.model.stage import Stage
from nanotrain.optim.distributed import DistributedOptimizer
from nanotrain.optim.lr import LRSchedule
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.pp.actions import Schedule
from nanotrain.parallel.pp.executor import Pipeline, RunnableStage
from nanotrain.runs.folder import RunFolder
from nanotrain.train.batches import BatchIterator
from nanotrain.train.state import TrainState


@dataclass(frozen=True)
class Run:
    """The built parts of one run on one rank.

    Attributes:
        config: what was asked for, with the model section completed.
        context: device and groups.
        folder: where the run is written.
        stages: this rank's parts of the model, by global stage index.
        runnable: the same for the executor, with who listens to their backward passes.
        data_parallel: flat storage and reduction of the stages' parameters.
        optimizer: main weights and moments of this rank's shard.
        schedule: the order of forward and backward passes.
        pipeline: the ranks that share the layers, and what they send each other.
        lr_schedule: the learning rate over consumed samples.
        datasets: samples by split.
        place: where this rank stands among the readers.
        batches: loads this rank's microbatches; closed when the run ends.
        feed: the global batches still to come, agreed upon by all ranks.
        checkpointer: reads and writes the run's checkpoints.
        state: how far the run has come.
    """

    config: Config
    context: ParallelContext
    folder: RunFolder
    stages: Mapping[int, Stage]
    runnable: Mapping[int, RunnableStage]
    data_parallel: tuple[DataParallel, ...]
    optimizer: DistributedOptimizer
    schedule: Schedule
    pipeline: Pipeline
    lr_schedule: LRSchedule
    datasets: DatasetSplits
    place: SamplerConfig
    batches: GlobalBatchLoader
    batch_iterator: BatchIterator
    checkpointer: Checkpointer
    state: TrainState
