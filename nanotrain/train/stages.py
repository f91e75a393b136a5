"""This rank's stages with storage: modules on the meta device, then one `DataParallel` per planned buffer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nanotrain.attention.backends import AttentionChoice, AttentionDevice
from nanotrain.comm.device import compute_capability
from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.kernels.deferred_wgrad import WgradQueue
from nanotrain.memory.recompute import Recompute
from nanotrain.model.fp8 import fp8_options, layers_in_bf16
from nanotrain.model.parallel import ModelParallel
from nanotrain.model.transformer import Stage
from nanotrain.parallel.cp import build_core_attention
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.dp.options import DataParallelOptions, ReduceGroups
from nanotrain.parallel.pp.executor import RunnableStage
from nanotrain.parallel.tp.tensor_parallel import TensorParallel
from nanotrain.precision.fp8 import RECIPES
from nanotrain.precision.policy import Precision
from nanotrain.spec.params import LocalParam
from nanotrain.train.plans.plan import BufferPlan, Plan, StagePlan


@dataclass(frozen=True)
class BuiltStage:
    """A stage and its storage."""

    module: Stage  # its parameters are views of the flat buffers
    params: tuple[LocalParam, ...]  # local parameters in registration order
    data_parallel: tuple[DataParallel, ...]  # dense buffer, then expert buffer where there is one
    # takes the deferred weight gradients of its layers; None if the schedule has no W actions
    wgrad_queue: WgradQueue | None

    @property
    def runnable(self) -> RunnableStage:
        """The stage as the pipeline executor takes it."""
        return RunnableStage(self.module, self.data_parallel, self.wgrad_queue)


def build_stages(plan: Plan, context: ParallelContext) -> dict[int, BuiltStage]:
    """Build this rank's stages; parameters are zero until they are initialized or loaded.

    Args:
        plan: of this rank.
        context: device and groups.

    Returns:
        the stages by global index.
    """
    return {stage.spec.index: _build_stage(plan, stage, context=context) for stage in plan.stages}


def all_data_parallel(stages: Mapping[int, BuiltStage]) -> tuple[DataParallel, ...]:
    """The data-parallel wrappers of all stages of this rank."""
    return tuple(dp for stage in stages.values() for dp in stage.data_parallel)


def _build_stage(plan: Plan, stage: StagePlan, *, context: ParallelContext) -> BuiltStage:
    config, precision = plan.config, Precision.of(plan.config.precision)
    wgrad_queue = WgradQueue() if plan.train_schedule.defers_wgrad else None
    parallel = _model_parallel(config, context, wgrad_queue=wgrad_queue)
    module = Stage(config.model, stage.spec, params=stage.params, parallel=parallel)
    data_parallel = tuple(
        DataParallel(
            module,
            buffer.layout,
            groups=ReduceGroups(
                context.group(buffer.shard.name),
                context.group(buffer.replicate.name),
                shards_across=buffer.layout.num_outer_shards > 1,
            ),
            options=replace(
                data_parallel_options(plan, buffer, recompute=parallel.recompute),
                fp8_amax_groups=_amax_groups(config, buffer, context=context) if buffer.is_fp8 else None,
            ),
            precision=precision,
            device=context.device,
        )
        for buffer in stage.buffers
    )
    module.to(context.device)  # moves registered buffers such as router biases; parameters are on the device already
    return BuiltStage(module, stage.params, data_parallel, wgrad_queue)


def _amax_groups(config: Config, buffer: BufferPlan, *, context: ParallelContext) -> tuple[Group, ...]:
    """Groups, besides the data-parallel ones, whose ranks share the scale of an fp8 weight."""
    fp8 = config.precision.fp8
    if fp8 is None or not RECIPES[fp8.recipe].is_per_tensor:
        return ()
    return (context.group("etp" if buffer.layout.params[0].spec.is_expert else "tp"),)


def data_parallel_options(plan: Plan, buffer: BufferPlan, *, recompute: Recompute) -> DataParallelOptions:
    """The options of one buffer's wrapper, in a stage with this recomputation."""
    num_ranks, options = buffer.shard.size * buffer.replicate.size, plan.data_parallel
    return replace(
        options,
        # the loss is scaled for a mean over dp_cp; expert gradients are averaged over fewer ranks
        grad_scale=num_ranks / plan.num_averaged_ranks if options.averages else 1.0,
        is_recomputing=lambda: recompute.is_recomputing,
    )


def _model_parallel(config: Config, context: ParallelContext, *, wgrad_queue: WgradQueue | None) -> ModelParallel:
    """The groups that the layers of a stage communicate over."""
    parallel, sequence = config.parallel, context.group("tp_cp")
    attention = AttentionChoice.of(config, AttentionDevice.of(context.device))
    fp8 = fp8_options(config.precision.fp8, sequence=sequence, capability=compute_capability(context.device))
    return ModelParallel(
        tp=TensorParallel(context.group("tp"), parallel.sequence_parallel, wgrad_queue, fp8),
        core_attention=build_core_attention(parallel.cp_comm_type, context.group("cp"), kernels=attention.kernels()),
        ep=context.group("ep"),
        etp=context.group("etp"),
        sequence=sequence,
        tracks_logits=config.optim.qk_clip or config.train.log_max_attention_logit,
        layers_in_bf16=layers_in_bf16(config.precision.fp8, config.model.num_layers),
        dp=context.group("dp"),
    )
