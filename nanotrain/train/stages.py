"""The stages of this rank: modules on meta, what the rank holds of their parameters, flat storage for them.

    declare_stage -> localize -> Stage (meta) -> DataParallel, one for dense parameters and one for experts

Dense parameters are replicated over dp_cp, experts over expert_dp, so each has groups and buckets of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import ParallelConfig
from nanotrain.kernels.deferred_wgrad import WgradQueue
from nanotrain.model.parallel import ModelParallel
from nanotrain.model.transformer import Stage
from nanotrain.parallel.cp.attention import build_core_attention
from nanotrain.parallel.dp.bucket import ReduceGroups
from nanotrain.parallel.dp.data_parallel import DataParallel, DataParallelOptions
from nanotrain.parallel.dp.layout import LayoutRules, plan_layout
from nanotrain.parallel.dp.strategy import STRATEGIES
from nanotrain.parallel.pp.executor import RunnableStage
from nanotrain.parallel.tp.tensor_parallel import TensorParallel
from nanotrain.precision.policy import Precision
from nanotrain.topology.groups import GroupName
from nanotrain.topology.parameters import declare_stage
from nanotrain.topology.params import LocalParam, localize
from nanotrain.topology.shape import ModelShape
from nanotrain.topology.stages import StageSpec
from nanotrain.train.plan import Plan

# is_expert -> names of the shard group and the replicate group
GROUPS_OF: dict[bool, tuple[GroupName, GroupName]] = {
    False: ("dp_shard", "dp_replicate"),
    True: ("expert_dp_shard", "expert_dp_replicate"),
}


@dataclass(frozen=True)
class BuiltStage:
    """A stage and its storage.

    Attributes:
        module: its parameters are views of the layers' buffers.
        params: what this rank holds of each parameter, in registration order.
        data_parallel: data-parallel layers: dense, then experts where there are any.
        wgrad_queue: where its layers defer weight gradients; None where the schedule has no W actions.
    """

    module: Stage
    params: tuple[LocalParam, ...]
    data_parallel: tuple[DataParallel, ...]
    wgrad_queue: WgradQueue | None

    @property
    def runnable(self) -> RunnableStage:
        """The stage as the executor wants it."""
        return RunnableStage(self.module, self.data_parallel, self.wgrad_queue)


def build_stages(plan: Plan, context: ParallelContext) -> dict[int, BuiltStage]:
    """Build this rank's stages with storage; parameters are zero until they are initialized or loaded.

    Args:
        plan: says which stages this rank holds.
        context: device and groups.

    Returns:
        the stages by global index.
    """
    return {spec.index: _build_stage(plan, spec, context=context) for spec in plan.stages}


def all_data_parallel(stages: Mapping[int, BuiltStage]) -> tuple[DataParallel, ...]:
    """The data-parallel storage of all stages of this rank."""
    return tuple(dp for stage in stages.values() for dp in stage.data_parallel)


def _build_stage(plan: Plan, spec: StageSpec, *, context: ParallelContext) -> BuiltStage:
    config, precision = plan.config, Precision.of(plan.config.precision)
    wgrad_queue = WgradQueue() if plan.train_schedule.defers_wgrad else None
    parallel = _model_parallel(config.parallel, context, wgrad_queue=wgrad_queue)
    sizes = {axis: context.topology.size(axis) for axis in ("tp", "ep", "etp")}
    declared = declare_stage(
        ModelShape.of(config.model),
        spec,
        dtype=config.precision.params_dtype.value,
        tensor_parallel_size=sizes["tp"],
        sequence_parallel=config.parallel.sequence_parallel,
    )
    params = tuple(localize(param, coords=context.coords, sizes=sizes) for param in declared)
    module = Stage(config.model, spec, params=params, parallel=parallel)
    layers = []
    for is_expert, (shard, replicate) in GROUPS_OF.items():
        held = [param for param in params if param.spec.is_expert is is_expert]
        if not held:
            continue
        groups = ReduceGroups(context.group(shard), context.group(replicate))
        options = _options(config.parallel)
        layout = plan_layout(held, _layout_rules(config.parallel, num_shards=groups.shard.size))
        layer = DataParallel(module, layout, groups=groups, options=options, precision=precision, device=context.device)
        layers.append(layer)
    module.to(context.device)  # the buffers of routers; parameters are there already
    return BuiltStage(module, params, tuple(layers), wgrad_queue)


def _model_parallel(
    parallel: ParallelConfig, context: ParallelContext, *, wgrad_queue: WgradQueue | None
) -> ModelParallel:
    """What the layers of one stage talk over."""
    tensor_parallel = TensorParallel(context.group("tp"), parallel.sequence_parallel, wgrad_queue)
    return ModelParallel(
        tp=tensor_parallel,
        core_attention=build_core_attention(parallel.cp_comm_type, context.group("cp")),
        ep=context.group("ep"),
        etp=context.group("etp"),
        sequence=context.group("tp_cp"),
    )


def _layout_rules(parallel: ParallelConfig, *, num_shards: int) -> LayoutRules:
    return LayoutRules(
        num_shards=num_shards,
        bucket_size=parallel.ddp_bucket_size,
        pad_for_high_busbw=parallel.ddp_pad_buckets_for_high_nccl_busbw,
        gathers_by_unit=STRATEGIES[parallel.data_parallel_sharding_strategy.value].gathers_by_unit,
    )


def _options(parallel: ParallelConfig) -> DataParallelOptions:
    return DataParallelOptions(
        strategy=STRATEGIES[parallel.data_parallel_sharding_strategy.value],
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
    )
