"""One configuration on one machine, run by one engine: the question that the planner answers.

Scenario --estimate_memory--> MemoryEstimate
         --predict_step-----> StepTime
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from nanotrain.config.config import Config
from nanotrain.config.schedules import global_batch_size, num_microbatches
from nanotrain.config.suggest import nearest_choice
from nanotrain.errors import ConfigError
from nanotrain.parallel.pp.actions import PipelineShape
from nanotrain.spec.shape import ModelShape
from nanotrain.spec.stages import StageSpec
from nanotrain.topology.topology import Topology
from nanotrain.train.plans.plan import Plan, check_names, plan_run, stage_specs

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Engine:
    """A training program: a row of data/engines.yaml."""

    name: str  # nanotrain, megatron, fsdp2 or nanotron
    launch_s: float  # host time to launch one operator
    fused: bool  # norms, activations, rotary positions and the loss are one operator each
    tp_overlap: str  # of collectives of tensor parallelism: none or wgrad
    p2p_overlap: bool  # transfers between pipeline ranks overlap with computation


@dataclass(frozen=True)
class Scenario:
    """One configuration on one machine."""

    config: Config  # complete: the vocabulary size and the global batch size are set
    world_size: int  # ranks of the run
    gpu: Any  # GPU of every rank
    engine: Engine  # training program
    matmul_dtype: str  # of the products of linear layers: bf16, fp8, mxfp8, nvfp4, fp16 or fp32
    dispatcher: str = "alltoall"  # of tokens to experts: alltoall, allgather or deepep
    imbalance: float = 1.0  # tokens of the busiest expert-parallel rank, relative to an even share
    cuda_graphs: bool = False  # the host launches a layer at once

    @cached_property
    def shape(self) -> ModelShape:
        """Sizes of the model."""
        return ModelShape.of(self.config.model)

    @cached_property
    def topology(self) -> Topology:
        """All ranks and their groups."""
        return Topology.of(self.config.parallel, self.world_size, has_experts=self.shape.moe is not None)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Ranks along every axis: tp, cp, dp, pp, etp, ep and expert_dp."""
        grids = (self.topology.expert, self.topology.dense)
        return {axis: size for grid in grids for axis, size in zip(grid.axes, grid.sizes, strict=True)}

    @cached_property
    def stages(self) -> tuple[tuple[StageSpec, ...], ...]:
        """The stages of every pipeline rank."""
        specs, num_ranks = stage_specs(self.config.parallel, self.shape.num_layers), self.sizes["pp"]
        return tuple(specs[rank::num_ranks] for rank in range(num_ranks))

    @cached_property
    def pipeline(self) -> PipelineShape:
        """The arguments of the pipeline schedule."""
        number = num_microbatches(self.config.train, self.sizes["dp"])
        return PipelineShape(self.sizes["pp"], self.config.parallel.num_virtual_stages_per_pipeline_rank, number)

    @cached_property
    def _plans(self) -> dict[int, Plan]:
        return {}

    def plan(self, pp_index: int) -> Plan:
        """The exact plan of the rank of a pipeline stage whose index on the other axes is 0."""
        if pp_index not in self._plans:
            rank = pp_index * self.topology.dense.stride("pp")
            self._plans[pp_index] = plan_run(self.config, self.world_size, rank=rank)
        return self._plans[pp_index]


@cache
def engines() -> dict[str, Engine]:
    """The engines by name."""
    rows = yaml.safe_load((DATA / "engines.yaml").read_bytes())
    return {name: Engine(name=name, **row) for name, row in rows.items()}


def engine_of(name: str) -> Engine:
    """The engine of a name.

    Raises:
        ConfigError: an unknown name.
    """
    if name not in engines():
        close = nearest_choice(name, engines())
        raise ConfigError(
            f"unknown engine {name}",
            why=f"the engines are {', '.join(engines())}",
            fix=f"set --engine {close or 'nanotrain'}",
        )
    return engines()[name]


def scenario_of(
    config: Config, world_size: int, *, gpu: Any, engine: Engine | str = "nanotrain", **options: Any
) -> Scenario:
    """The scenario of a configuration, checked as far as a layout goes.

    Args:
        config: a validated configuration with the vocabulary size set.
        world_size: ranks of the run.
        gpu: GPU of every rank.
        engine: training program, or its name.
        options: further fields of the scenario.

    Raises:
        ConfigError: an unknown engine, or a batch that does not fit the ranks.
        TopologyError: a layout that does not fit the ranks.
    """
    check_names(config)
    dp = config.parallel.data_parallel_size(world_size)
    train = replace(config.train, global_batch_size=global_batch_size(config.train, dp))
    options.setdefault("matmul_dtype", _matmul_dtype(config))
    engine = engine_of(engine) if isinstance(engine, str) else engine
    scenario = Scenario(replace(config, train=train), world_size, gpu, engine, **options)
    assert scenario.pipeline.num_microbatches > 0, "forms the groups and the microbatches, or raises"
    return scenario


def _matmul_dtype(config: Config) -> str:
    fp8 = config.precision.fp8
    if fp8 is None:
        return config.precision.params_dtype
    return "mxfp8" if fp8.recipe == "mxfp8" else "fp8"
