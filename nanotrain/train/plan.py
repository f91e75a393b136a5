"""`Plan`: everything that is known of a rank's run before a device is touched. Pure: no process group, no module.

    Config -> plan_run(config, world_size, rank=rank) -> Plan -> build.build_run

`plan_run` answers for any rank of any world size, in one process.
"""

from dataclasses import dataclass

from nanotrain.config.config import Config
from nanotrain.config.derive import global_batch_size
from nanotrain.config.schema import check_choice
from nanotrain.data.sampler import SamplerConfig
from nanotrain.optim.optimizers import OPTIMIZERS
from nanotrain.parallel.cp.attention import CORE_ATTENTIONS
from nanotrain.parallel.pp.actions import PipelineShape
from nanotrain.parallel.pp.gpipe import forward_only
from nanotrain.parallel.pp.schedules import SCHEDULES, build_schedule
from nanotrain.parallel.pp.transfers import RankPlan, plan_rank
from nanotrain.topology.counts import flops_per_token
from nanotrain.topology.shape import ModelShape
from nanotrain.topology.stages import StageSpec, split_layers
from nanotrain.topology.topology import Topology


@dataclass(frozen=True)
class Plan:
    """One rank's part of a run.

    Attributes:
        config: complete: the vocabulary size is set.
        topology: all ranks and their groups.
        rank: global rank, 0 to world_size - 1.
        stages: the pipeline stages of this rank, ascending.
        sampler: which samples this rank reads.
        train_schedule: this rank's actions and transfers in a training step.
        valid_schedule: the same for the forwards of a validation batch.
        flops_per_token: of the whole model, forward and backward.
    """

    config: Config
    topology: Topology
    rank: int
    stages: tuple[StageSpec, ...]
    sampler: SamplerConfig
    train_schedule: RankPlan
    valid_schedule: RankPlan
    flops_per_token: int


def plan_run(config: Config, world_size: int, *, rank: int) -> Plan:
    """Plan one rank's part of a run.

    Args:
        config: a validated configuration with the vocabulary size set.
        world_size: ranks of the run.
        rank: global rank.

    Raises:
        NanotrainError: a layout that does not fit the ranks, the batch or the model.
    """
    _check_names(config)
    topology = Topology.of(config.parallel, world_size)
    coords = topology.coords(rank)
    sampler = SamplerConfig(
        dp_rank=coords["dp"],
        dp_size=topology.size("dp"),
        micro_batch_size=config.train.micro_batch_size,
        global_batch_size=global_batch_size(config.train, topology.size("dp")),
    )
    stages_per_rank = config.parallel.num_virtual_stages_per_pipeline_rank
    shape = PipelineShape(topology.size("pp"), stages_per_rank, sampler.num_microbatches)
    return Plan(
        config=config,
        topology=topology,
        rank=rank,
        stages=_stages(config, topology)[coords["pp"] :: topology.size("pp")],
        sampler=sampler,
        train_schedule=plan_rank(build_schedule(config.parallel.pipeline_schedule, shape), coords["pp"]),
        valid_schedule=plan_rank(forward_only(shape), coords["pp"]),
        flops_per_token=flops_per_token(ModelShape.of(config.model), config.data.seq_length),
    )


def _check_names(config: Config) -> None:
    """Check that every name of a table is in its table."""
    check_choice("pipeline_schedule", config.parallel.pipeline_schedule, known=SCHEDULES)
    check_choice("cp_comm_type", config.parallel.cp_comm_type, known=CORE_ATTENTIONS)
    check_choice("optimizer", config.optim.optimizer, known=OPTIMIZERS)


def _stages(config: Config, topology: Topology) -> tuple[StageSpec, ...]:
    """All stages of the model."""
    parallel = config.parallel
    return split_layers(
        config.model.num_layers,
        topology.size("pp") * parallel.num_virtual_stages_per_pipeline_rank,
        first=parallel.decoder_first_pipeline_num_layers,
        last=parallel.decoder_last_pipeline_num_layers,
    )
