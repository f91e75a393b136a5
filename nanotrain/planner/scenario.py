"""One configuration on one machine, run by one engine: the question that the planner answers.

Scenario --estimate_memory--> MemoryPlan
         --predict_step-----> StepTime
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

from nanotrain.config.config import Config
from nanotrain.config.schedules import global_batch_size, num_microbatches
from nanotrain.errors import ConfigError
from nanotrain.parallel.pp.actions import PipelineShape
from nanotrain.plan.model_plan import stage_specs
from nanotrain.plan.plan import check_names
from nanotrain.planner.engine import Engine, engine_of, engine_on_cpu
from nanotrain.planner.hardware import GPU, machine_of
from nanotrain.spec.counts import layer_weights
from nanotrain.spec.operators import POINTWISE
from nanotrain.spec.shape import ModelShape
from nanotrain.spec.stages import StageSpec, balanced_lengths, stages_of_lengths
from nanotrain.topology.groups import GroupName
from nanotrain.topology.replays import require_replicas
from nanotrain.topology.topology import Topology


@dataclass(frozen=True)
class Scenario:
    """One configuration on one machine."""

    config: Config  # complete: the vocabulary size and the global batch size are set
    world_size: int  # ranks of the run
    gpu: GPU  # device of every rank
    engine: Engine  # training program
    matmul_dtype: (
        str  # dtype of the products of linear layers: bf16, fp8, mxfp8, nvfp4, fp16 or fp32
    )
    # token dispatcher: alltoall, allgather, hierarchical or flex (DeepEP, HybridEP)
    dispatcher: str = "alltoall"
    imbalance: float = 1.0  # tokens of the busiest expert-parallel rank, relative to an even share
    cuda_graphs: bool = False  # the host launches a layer at once
    tp_overlap: str | None = None  # instead of the engine's
    # features of other programs that decide bytes, such as "fused loss"
    features: frozenset[str] = frozenset()

    @cached_property
    def shape(self) -> ModelShape:
        """Sizes of the model."""
        return ModelShape.of(self.config.model)

    @cached_property
    def topology(self) -> Topology:
        """All ranks and their groups."""
        return Topology.of(
            self.config.parallel, self.world_size, has_experts=self.shape.moe is not None
        )

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Ranks along every axis: tp, cp, dp, pp, etp, ep and expert_dp."""
        sizes: dict[str, int] = {}
        for grid in (self.topology.expert, self.topology.dense):
            sizes.update(zip(grid.axes, grid.sizes, strict=True))
        return sizes

    @cached_property
    def machine(self) -> GPU:
        """The GPU as calibrated, with the link between nodes of the engine, if it has one."""
        return machine_of(self.gpu, self.engine.network.link)

    @property
    def padding(self) -> float:
        """Rows that are sent to the experts, relative to the tokens of the busiest rank."""
        factor = self.config.parallel.moe_expert_rank_capacity_factor or 1.0
        return max(1.0, min(factor, self.sizes["ep"]) / self.imbalance)

    @property
    def num_nodes(self) -> float:
        """Nodes of the run."""
        return self.world_size / self.machine.gpus_per_node

    def ranks(self, name: str) -> Sequence[int]:
        """The group of the first rank with a name, such as tp, dp_shard or expert_dp_replicate."""
        return _ranks(self.topology, name)

    @cached_property
    def stages(self) -> tuple[tuple[StageSpec, ...], ...]:
        """The stages of every pipeline rank."""
        parallel = self.config.parallel
        num_ranks = self.sizes["pp"]
        specs = self._stage_specs(num_ranks)
        stages = []
        for rank in range(num_ranks):
            stages.append(tuple(specs[index] for index in parallel.stages_of(rank)))
        return tuple(stages)

    def _stage_specs(self, num_ranks: int) -> Sequence[StageSpec]:
        """All stages, with the lengths that the engine gives them."""
        specs = stage_specs(self.config.parallel, self.shape)
        stages = self.engine.pipeline.stages
        if stages == "shares" and num_ranks > 1:
            return stages_of_lengths(_lengths_by_weights(layer_weights(self.shape), num_ranks))
        is_uneven = self.shape.num_layers % len(specs) > 0
        if stages == "balanced" and is_uneven and not self._has_stage_layout:
            return stages_of_lengths(balanced_lengths(layer_weights(self.shape), len(specs)))
        return specs

    @property
    def _has_stage_layout(self) -> bool:
        """Whether the configuration sets the lengths of stages."""
        parallel = self.config.parallel
        has_set_first = parallel.decoder_first_pipeline_num_layers is not None
        has_set_last = parallel.decoder_last_pipeline_num_layers is not None
        has_layout = bool(parallel.pipeline_model_parallel_layout)
        return has_layout or has_set_first or has_set_last or any(parallel.counted_ends)

    @cached_property
    def pipeline(self) -> PipelineShape:
        """The arguments of the pipeline schedule."""
        number = num_microbatches(self.config.train, self.sizes["dp"])
        return PipelineShape.of(self.config.parallel, number)


@lru_cache(maxsize=256)
def _ranks(topology: Topology, name: GroupName) -> Sequence[int]:
    """The ranks of a group of rank 0, as a range if they are evenly spaced."""
    members = topology.members(0, name)
    strides = {after - before for before, after in pairwise(members)}
    if len(strides) != 1:
        return members
    return range(0, members[-1] + 1, strides.pop())


def _lengths_by_weights(weights: Sequence[int], num_ranks: int) -> list[int]:
    """Layers of every rank: as many as exceed its share of the weights (nanotron, build_model)."""
    ends = [0]
    for rank in range(num_ranks):
        weight_until = sum(weights) * (rank + 1) // num_ranks
        ends.append(min(len(weights), weight_until // weights[0] + 1))
    return [end - start for start, end in pairwise(ends)]


def scenario_of(
    config: Config, world_size: int, *, gpu: GPU, engine: Engine | str = "nanotrain", **options: Any
) -> Scenario:
    """The scenario of a configuration, checked as far as a layout goes.

    Args:
        config: a validated configuration with the vocabulary size set.
        world_size: ranks of the run.
        gpu: GPU of every rank.
        engine: training program, or its name.
        options: further fields of the scenario.

    Raises:
        ConfigError: an unknown engine, stages that it lacks, a batch that does not fit the ranks,
            or replays without replicas.
        TopologyError: a layout that does not fit the ranks.
    """
    check_names(config)
    dp = config.parallel.data_parallel_size(world_size)
    train = replace(config.train, global_batch_size=global_batch_size(config.train, dp))
    options.setdefault("matmul_dtype", _matmul_dtype(config))
    options.setdefault("dispatcher", _dispatcher(config))
    engine = engine_of(engine) if isinstance(engine, str) else engine
    engine = engine_on_cpu(engine) if gpu.is_cpu else engine
    scenario = Scenario(replace(config, train=train), world_size, gpu, engine, **options)
    if engine.name == "nanotrain":
        require_replicas(scenario.topology, replay_interval=train.replay_interval)
    _check_virtual_stages(scenario)
    _check_schedule(scenario)
    _check_recomputation(scenario)
    assert scenario.pipeline.num_microbatches > 0, (
        "forms the groups and the microbatches, or raises"
    )
    return scenario


def _check_schedule(scenario: Scenario) -> None:
    """Check that the engine has the pipeline schedule."""
    known = scenario.engine.pipeline.schedules
    schedule = scenario.config.parallel.pipeline_schedule
    if known is None or schedule in known or scenario.sizes["pp"] == 1:
        return
    name = scenario.engine.name
    raise ConfigError(
        f"--pipeline-schedule {schedule} with --engine {name}",
        why=f"{name} has {' and '.join(known)}",
        fix=f"set --pipeline-schedule {known[0]}",
    )


def _check_virtual_stages(scenario: Scenario) -> None:
    """Check that a rank has one stage, if the engine's stages are `shares` of the weights."""
    if scenario.engine.pipeline.stages != "shares":
        return
    num_stages = scenario.pipeline.num_stages_per_rank
    if num_stages > 1:
        name = scenario.engine.name
        raise ConfigError(
            f"{num_stages} virtual stages per pipeline rank with --engine {name}",
            why="it has one per rank",
            fix="leave --num-virtual-stages-per-pipeline-rank and its schedule out",
        )


def _check_recomputation(scenario: Scenario) -> None:
    """Check that the engine is nanotrain, if all pointwise operators are recomputed."""
    name = scenario.engine.name
    if name != "nanotrain" and POINTWISE in scenario.config.memory.recomputed_modules:
        raise ConfigError(
            f"--recompute-modules {POINTWISE} with --engine {name}",
            why="only nanotrain has this module",
            fix="name layernorm and moe_act in its place",
        )


def _matmul_dtype(config: Config) -> str:
    """The dtype of the products of linear layers."""
    fp8 = config.precision.fp8
    if fp8 is None:
        return config.precision.params_dtype
    return fp8.recipe if fp8.recipe in ("mxfp8", "nvfp4") else "fp8"


def _dispatcher(config: Config) -> str:
    """The token dispatcher of nanotrain."""
    if config.parallel.uses_deep_ep:
        return "flex"
    return "hierarchical" if config.parallel.moe_hierarchical_dispatch else "alltoall"
