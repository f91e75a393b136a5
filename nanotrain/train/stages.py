"""The stages of this rank: modules on meta, what the rank holds of their parameters, flat storage for them.

    build_stage (meta) -> collect_specs -> localize -> DataParallel, one for dense parameters and one for experts

Dense parameters are replicated over dp_cp, experts over expert_dp, so each has groups and buckets of its own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config, ParallelConfig
from nanotrain.model.build import build_stage, collect_specs
from nanotrain.model.stage import Stage
from nanotrain.parallel.dp.bucket import ReduceGroups
from nanotrain.parallel.dp.data_parallel import DataParallel, DataParallelOptions
from nanotrain.parallel.dp.layout import LayoutRules
from nanotrain.parallel.dp.strategy import STRATEGIES
from nanotrain.precision.policy import Precision
from nanotrain.topology.params import LocalParam, localize
from nanotrain.topology.stages import StageSpec

# Whether parameters are experts' -> the prefix of the names of their groups.
GROUP_PREFIXES = {False: "dp", True: "expert_dp"}


@dataclass(frozen=True)
class BuiltStage:
    """A stage and its storage.

    Attributes:
        module: its parameters are views of the layers' buffers.
        params: what this rank holds of each parameter, in registration order.
        layers: data-parallel layers: dense, then experts where there are any.
    """

    module: Stage
    params: tuple[LocalParam, ...]
    layers: tuple[DataParallel, ...]


def build_stages(config: Config, specs: Sequence[StageSpec], *, context: ParallelContext) -> dict[int, BuiltStage]:
    """Build stages with storage; parameters are zero until start values are given.

    Args:
        config: model, parallel and precision sections are read.
        specs: the stages of this rank.
        context: device and groups.

    Returns:
        the stages by global index.
    """
    return {spec.index: _build_one(config, spec, context=context) for spec in specs}


def all_layers(stages: Mapping[int, BuiltStage]) -> tuple[DataParallel, ...]:
    """The data-parallel layers of all stages of this rank."""
    return tuple(layer for stage in stages.values() for layer in stage.layers)


def _build_one(config: Config, spec: StageSpec, *, context: ParallelContext) -> BuiltStage:
    precision = Precision.of(config.precision)
    module = build_stage(config.model, spec, dtype=precision.params)
    sizes = {axis: context.topology.size(axis) for axis in ("tp", "ep", "etp")}
    params = tuple(localize(param, context.coords, sizes) for param in collect_specs(module))
    layers = []
    for is_expert, prefix in GROUP_PREFIXES.items():
        held = [param for param in params if param.spec.is_expert is is_expert]
        if not held:
            continue
        groups = ReduceGroups(context.group(f"{prefix}_shard"), context.group(f"{prefix}_replicate"))
        options = _options(config.parallel, num_shards=groups.shard.size)
        layer = DataParallel(module, held, groups=groups, options=options, precision=precision, device=context.device)
        layers.append(layer)
    return BuiltStage(module, params, tuple(layers))


def _options(parallel: ParallelConfig, *, num_shards: int) -> DataParallelOptions:
    return DataParallelOptions(
        strategy=STRATEGIES[parallel.data_parallel_sharding_strategy.value],
        rules=LayoutRules(
            num_shards=num_shards,
            bucket_size=parallel.ddp_bucket_size,
            pad_for_high_busbw=parallel.ddp_pad_buckets_for_high_nccl_busbw,
        ),
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
    )
