"""The pipeline of a run: the schedule of its steps, and what flows between its stages."""

from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config, ParallelConfig
from nanotrain.parallel.pp.actions import PipelineShape, Schedule
from nanotrain.parallel.pp.executor import Pipeline
from nanotrain.parallel.pp.schedules import SCHEDULES
from nanotrain.parallel.pp.simulate import simulate
from nanotrain.precision.policy import Precision


def build_schedule(parallel: ParallelConfig, group: Group, *, num_microbatches: int) -> Schedule:
    """The schedule of every step; without a pipeline it is that of one stage.

    Args:
        parallel: names the schedule and the stages per rank.
        group: the pipeline ranks.
        num_microbatches: of one step.
    """
    name = parallel.pipeline_schedule.value if group.size > 1 else "one_stage"
    shape = PipelineShape(group.size, parallel.num_virtual_stages_per_pipeline_rank, num_microbatches)
    schedule = SCHEDULES[name](shape)
    simulate(schedule)  # a schedule that would hang or drop a microbatch fails here, before the first step
    return schedule


def build_pipeline(config: Config, context: ParallelContext) -> Pipeline:
    """Whom this rank's stages talk to, and the shape of the hidden states that they send."""
    shards = context.group("cp").size * (context.group("tp").size if config.parallel.sequence_parallel else 1)
    pipeline = Pipeline(
        group=context.group("pp"),
        hidden_shape=(config.train.micro_batch_size, config.data.seq_length // shards, config.model.hidden_size),
        dtype=Precision.of(config.precision).params,
        device=context.device,
    )
    pipeline.connect()
    return pipeline
