"""`Run`: everything a training run is made of, built once by `build.py`. No methods; nothing below names it."""

from collections.abc import Mapping
from dataclasses import dataclass

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.data.build import Datasets
from nanotrain.data.loader import GlobalBatches
from nanotrain.data.sampler import ReadPlace
from nanotrain.model.stage import Stage
from nanotrain.optim.distributed import DistributedOptimizer
from nanotrain.optim.lr import LRSchedule
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.pp.actions import Schedule
from nanotrain.parallel.pp.executor import Pipeline, RunnableStage
from nanotrain.train.feed import Feed
from nanotrain.train.folder import RunFolder
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
        layers: flat storage and reduction of the stages' parameters.
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
    layers: tuple[DataParallel, ...]
    optimizer: DistributedOptimizer
    schedule: Schedule
    pipeline: Pipeline
    lr_schedule: LRSchedule
    datasets: Datasets
    place: ReadPlace
    batches: GlobalBatches
    feed: Feed
    checkpointer: Checkpointer
    state: TrainState
