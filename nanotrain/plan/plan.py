"""`Plan`: everything of one rank that is determined before a device is touched.

    Config -> plan_run(config, world_size, rank) -> Plan -> build.build_run

Pure: no process group, no module. `plan_run` accepts any rank of any world size and takes the same
time for all of them.
`traffic.sent_bytes` computes the bytes that a step sends from a plan.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from nanotrain.attention.backends import backend_flags
from nanotrain.config.config import Config, DataConfig
from nanotrain.config.rules.check import OPEN_NAMES
from nanotrain.config.schedules import (
    batch_schedule,
    global_batch_size,
    length_schedule,
    samples_of_steps,
)
from nanotrain.config.schema import ENTRIES, check_choice, value_of
from nanotrain.data.sampler import SamplerConfig
from nanotrain.errors import ErrorCollector
from nanotrain.optim import OPTIMIZERS
from nanotrain.optim.lr import LR_DECAYS
from nanotrain.optim.muon import SCALAR_RULES
from nanotrain.parallel.cp import CORE_ATTENTIONS
from nanotrain.parallel.pp.actions import PipelineShape
from nanotrain.parallel.pp.schedules import SCHEDULES, build_schedule, forward_only
from nanotrain.parallel.pp.transfers import RankPlan, plan_rank
from nanotrain.plan.model_plan import ModelPlan, plan_model, stage_specs
from nanotrain.precision.fp8 import RECIPES
from nanotrain.spec.shape import ModelShape
from nanotrain.spec.trainable import TrainableSet, first_trained_stage
from nanotrain.topology.groups import GroupName, GroupSpec
from nanotrain.topology.replays import require_replicas
from nanotrain.topology.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Plan(ModelPlan):
    """One rank's part of a run."""

    sampler: SamplerConfig  # which samples this rank reads
    # actions and transfers of a training step; `StepSchedules` plans other batch sizes
    train_schedule: RankPlan
    valid_schedule: RankPlan  # forwards and transfers of a validation batch
    # factor of the loss that the gradient collectives divide by: the ranks of `dp_cp` if they
    # average, else 1
    num_averaged_ranks: int

    @property
    def num_microbatches(self) -> int:
        """Microbatches of this rank per step."""
        return self.sampler.num_microbatches

    def samples_of(self, steps: int, *, batch_size: int | None = None) -> int:
        """Samples of the first `steps` steps.

        Args:
            steps: number of steps.
            batch_size: global batch size of step 0 where a resume has changed it.
        """
        if self.sampler.schedule:
            return samples_of_steps(self.sampler.schedule, steps)
        if batch_size is None:
            batch_size = self.sampler.global_batch_size
        return steps * batch_size


def plan_run(config: Config, world_size: int, *, rank: int, stage: str = "") -> Plan:
    """Plan one rank's part of a run.

    Args:
        config: a validated configuration with the vocabulary size set.
        world_size: ranks of the run.
        rank: global rank.
        stage: stage of the data, where stages train other parameters; by default the first.

    Raises:
        ConfigError: an unknown name, a batch that does not fit, or replays without replicas.
        TopologyError: a layout that does not fit the ranks or the model.
    """
    topology = plan_topology(config, world_size)
    batch_size = global_batch_size(config.train, topology.dense.size("dp"))
    # Saved with the configuration, so that a resume on other ranks reports that an unset size has
    # changed.
    config = replace(config, train=replace(config.train, global_batch_size=batch_size))
    shape = ModelShape.of(config.model)
    model = plan_model(config, topology, shape=shape, rank=rank, stage=stage)
    groups = model.groups
    sampler = _plan_sampler(
        config,
        groups,
        batch_size=batch_size,
        readers=_readers(config.data, groups, topology=topology),
    )
    pipeline = PipelineShape.of(config.parallel, sampler.num_microbatches)
    schedule = config.parallel.pipeline_schedule
    num_averaged_ranks = 1
    if config.parallel.ddp_average_in_collective:
        num_averaged_ranks = groups["dp_cp"].size
    return Plan(
        config=model.config,
        topology=model.topology,
        rank=model.rank,
        groups=model.groups,
        shape=model.shape,
        stages=model.stages,
        trainable=model.trainable,
        sampler=sampler,
        train_schedule=plan_train_schedule(
            config,
            groups,
            num_microbatches=sampler.num_microbatches,
            trainable=model.trainable,
        ),
        valid_schedule=_rank_plan(schedule, pipeline, rank=groups["pp"].index, is_training=False),
        num_averaged_ranks=num_averaged_ranks,
    )


def plan_topology(config: Config, world_size: int) -> Topology:
    """The ranks of a run and their groups, once its names of implementations are checked.

    Raises:
        ConfigError: an unknown name, or replays without replicas.
        TopologyError: a layout that does not fit the ranks.
    """
    check_names(config)
    topology = Topology.of(config.parallel, world_size, has_experts=config.model.moe is not None)
    require_replicas(topology, replay_interval=config.train.replay_interval)
    return topology


class Readers(NamedTuple):
    """Ranks that read a sample."""

    num_ranks: int
    includes_rank: bool  # whether the planned rank is one of them


def _readers(
    data: DataConfig, groups: Mapping[GroupName, GroupSpec], *, topology: Topology
) -> Readers:
    """The ranks that read a sample.

    The first stage needs tokens, the last one labels, and the stages between them at most the
    borders of documents.
    """
    pp = groups["pp"]
    is_by_all = data.reset_position_ids or data.reset_attention_mask
    pipeline_ranks = range(pp.size) if is_by_all else topology.end_ranks
    num_ranks = groups["tp"].size * groups["cp"].size * len(pipeline_ranks)
    return Readers(num_ranks, pp.index in pipeline_ranks)


def _plan_sampler(
    config: Config, groups: Mapping[GroupName, GroupSpec], *, batch_size: int, readers: Readers
) -> SamplerConfig:
    """The samples that this rank reads of global batches of `batch_size`."""
    return SamplerConfig(
        dp_rank=groups["dp"].index,
        dp_size=groups["dp"].size,
        micro_batch_size=config.train.micro_batch_size,
        global_batch_size=batch_size,
        schedule=batch_schedule(config),
        lengths=length_schedule(config),
        readers_per_sample=readers.num_ranks,
        unread_length=None if readers.includes_rank else config.data.seq_length,
    )


def plan_train_schedule(
    config: Config,
    groups: Mapping[GroupName, GroupSpec],
    *,
    num_microbatches: int,
    trainable: TrainableSet,
) -> RankPlan:
    """The actions and transfers of this rank in a training step of `num_microbatches`."""
    pipeline = PipelineShape.of(config.parallel, num_microbatches)
    shape = ModelShape.of(config.model)
    first_trained = first_trained_stage(
        trainable, shape, stages=stage_specs(config.parallel, shape)
    )
    return _rank_plan(
        config.parallel.pipeline_schedule,
        pipeline,
        rank=groups["pp"].index,
        first_trained_stage=first_trained,
    )


@lru_cache(maxsize=1024)  # thousands of layouts of a search have few pipelines
def _rank_plan(
    name: str,
    pipeline: PipelineShape,
    *,
    rank: int,
    is_training: bool = True,
    first_trained_stage: int = 0,
) -> RankPlan:
    """The actions and transfers of a rank; in validation the forwards alone."""
    schedule = build_schedule(name, pipeline)
    if not is_training:
        return plan_rank(forward_only(schedule), rank)
    return plan_rank(schedule, rank, first_trained_stage=first_trained_stage)


def check_names(config: Config) -> None:
    """Check the settings that name an entry of a table of implementations.

    Raises:
        ConfigError: unknown names, all in one error; suggests the nearest of each.
    """
    tables: dict[str, Iterable[str]] = {
        "pipeline_schedule": SCHEDULES,
        "cp_comm_type": CORE_ATTENTIONS,
        "attention_backend": backend_flags(),
        "optimizer": OPTIMIZERS,
        "muon_scalar_optimizer": SCALAR_RULES,
        "lr_decay_style": LR_DECAYS,
        "fp8_recipe": RECIPES,
    }
    assert tables.keys() == set(OPEN_NAMES)
    errors = ErrorCollector()
    for name, known in tables.items():
        with errors:
            check_choice(name, value_of(config, ENTRIES[name].key), known=known)
    errors.raise_errors()
