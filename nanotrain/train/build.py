"""Build a `Run` from a plan, open inputs and process groups: the only file that imports every part.

    stages with storage -> initial weights -> block transforms -> optimizer -> parts
    -> saved weights -> batches

A stage with storage is a module on the meta device, then one `DataParallel` per planned buffer.

Initial weights come from the seed; saved weights of a checkpoint or a Hugging Face folder are read
into the main params.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from nanotrain.attention.backends import AttentionChoice, AttentionDevice
from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.checkpoint.remote_checkpointer import RemoteCheckpointer
from nanotrain.comm.collectives import all_gather_object
from nanotrain.comm.device import compute_capability
from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.comm.registered_memory import build_registered
from nanotrain.comm.stop_point import StopPoint
from nanotrain.comm.symmetric_memory import has_symmetric_memory
from nanotrain.config.config import Config
from nanotrain.data.build import starting_stages
from nanotrain.data.loader import GlobalBatchLoader
from nanotrain.data.origin import DataOrigin, continued
from nanotrain.kernels.compiler import inductor_fault, triton_fault
from nanotrain.kernels.deferred_wgrad import WgradQueue
from nanotrain.kernels.fp8.layer import Fp8Options, fp8_options, layers_in_bf16
from nanotrain.kernels.fp8.products import keep_weights
from nanotrain.log import get_logger, progress
from nanotrain.memory.block_transforms import MTP_TRANSFORMS, transform_blocks
from nanotrain.memory.recompute import Recompute
from nanotrain.model.context import ModelParallel
from nanotrain.model.invariant import invariant_parallel, make_invariant
from nanotrain.model.norm_casts import cast_norms
from nanotrain.model.parameters import initialize
from nanotrain.model.transformer import Stage
from nanotrain.optim.distributed import DistributedOptimizer
from nanotrain.optim.lr import LRSchedule
from nanotrain.parallel.cp import build_core_attention
from nanotrain.parallel.cp.split import split_batch
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.dp.options import DataParallelOptions, ReduceGroups
from nanotrain.parallel.dp.param_buffer import ParamBuffer
from nanotrain.parallel.ep.token_dispatcher import DispatchOptions
from nanotrain.parallel.pp.executor import Pipeline, RunnableStage
from nanotrain.parallel.tp.layers import TensorParallel
from nanotrain.parallel.tp.overlap_fp8 import can_overlap
from nanotrain.plan.buffers import BufferPlan
from nanotrain.plan.compile import describe_compile, with_compile
from nanotrain.plan.model_plan import StagePlan
from nanotrain.plan.plan import Plan
from nanotrain.precision.dtypes import Precision
from nanotrain.precision.fp8 import RECIPES
from nanotrain.precision.loss_scale import LossScale
from nanotrain.runs.folder import RunFolder
from nanotrain.train.batches import BatchIterator, BatchOptions, StepSettings
from nanotrain.train.parts.part import BuiltModel, StepParts
from nanotrain.train.parts.table import build_parts
from nanotrain.train.resume.restore import load_pretrained, restore, take_over
from nanotrain.train.run import Run, RunInputs, StepSchedules, TrainState

COMPILER = "install gcc and the headers of Python (python3-dev), and see that CC names a compiler"
log = get_logger(__name__)


def build_run(plan: Plan, inputs: RunInputs, *, context: ParallelContext) -> Run:
    """Build every part of a run on this rank and load the weights that it starts from.

    Args:
        plan: plan of this rank.
        inputs: open datasets, run folder and checkpoint.
        context: this rank's device and process groups.

    Raises:
        NanotrainError: a checkpoint or Hugging Face folder that does not fit the model; on every
            rank.
    """
    config = plan.config
    assert plan.groups == {name: group.spec for name, group in context.groups.items()}, (
        "planned for other groups"
    )
    model = _build_model(plan, inputs, context=context)
    parts = build_parts(model)
    checkpointer = _build_checkpointer(config, inputs.folder, context=context)
    reader = inputs.memory.reader(checkpointer) if inputs.memory else checkpointer
    state = _load_start(model, parts, inputs=inputs, checkpointer=reader)
    state.curve_batch_size = state.curve_batch_size or plan.sampler.global_batch_size
    batches = _open_batches(model, state=state, origin=inputs.data_origin)
    train_samples = plan.samples_of(config.train.train_iters, batch_size=state.curve_batch_size)
    lr_schedule = LRSchedule(config.optim, state.curve_batch_size, train_samples)
    return Run(
        **vars(model),
        inputs=inputs,
        parts=parts,
        pipeline=build_pipeline(plan, context),
        lr_schedule=lr_schedule,
        batches=batches,
        batch_iterator=_build_train_iterator(batches, parts, model=model, lr_schedule=lr_schedule),
        checkpointer=checkpointer,
        state=state,
        schedules=StepSchedules(plan),
    )


def _build_model(plan: Plan, inputs: RunInputs, *, context: ParallelContext) -> BuiltModel:
    """Stages and optimizer of this rank; with initial weights unless saved weights are loaded."""
    config = plan.config
    stages = build_stages(plan, context)
    if inputs.starts_anew and config.checkpoint.pretrained_checkpoint is None:
        for stage in stages.values():
            for dp in stage.callbacks:
                dp.fill_params(partial(initialize, stage.module, seed=config.train.seed))
    modules = {index: stage.module for index, stage in stages.items()}
    _transform_blocks(modules.values(), config, context=context)
    data_parallel = tuple(dp for stage in stages.values() for dp in stage.callbacks)
    optimizer = DistributedOptimizer(
        data_parallel,
        config.optim,
        precision=Precision.of(config.precision),
        loss_scale=LossScale(config.precision, context.device),
        groups=context.groups,
        trainable=plan.trainable,
    )
    for balance in optimizer.matrix_balances:
        log.info("%s: %s", config.optim.optimizer, balance)
    assert inputs.datasets.train is not None, "open_inputs requires a training split"
    return BuiltModel(
        plan=plan,
        context=context,
        dataset=inputs.datasets.train,
        stages=modules,
        runnable=stages,
        data_parallel=data_parallel,
        optimizer=optimizer,
    )


@dataclass(frozen=True)
class BuiltStage(RunnableStage):
    """A stage and its storage, as the pipeline executor takes it."""

    module: Stage  # its parameters are views of the flat buffers
    # the wrappers of its buffers: dense, then experts where there are some; trained, then frozen
    callbacks: tuple[ParamBuffer, ...] = ()


def build_stages(plan: Plan, context: ParallelContext) -> dict[int, BuiltStage]:
    """Build this rank's stages; parameters are zero until they are initialized or loaded.

    Args:
        plan: plan of this rank.
        context: device and groups.

    Returns:
        the stages by global index.
    """
    return {stage.spec.index: _build_stage(plan, stage, context=context) for stage in plan.stages}


def _build_stage(plan: Plan, stage: StagePlan, *, context: ParallelContext) -> BuiltStage:
    """The module of a pipeline stage and the data-parallel wrapper of each buffer."""
    wgrad_queue = WgradQueue() if plan.train_schedule.defers_wgrad else None
    parallel = _model_parallel(plan, context, wgrad_queue=wgrad_queue)
    if plan.config.precision.invariant:
        parallel = invariant_parallel(parallel, plan.config, dp=context.group("dp").size)
    module = Stage(plan.config.model, stage.spec, params=stage.params, parallel=parallel)
    data_parallel = []
    for buffer in stage.buffers:
        options = data_parallel_options(plan, buffer, recompute=parallel.recompute)
        if buffer.is_fp8:
            amax_groups = _amax_groups(plan.config, buffer, context=context)
            options = replace(options, fp8_amax_groups=amax_groups)
        data_parallel.append(
            _build_data_parallel(module, buffer, options=options, plan=plan, context=context)
        )
    if parallel.tp.functions is not None:
        make_invariant(module, parallel.tp.functions.options)
    # moves registered buffers such as router biases; parameters are on the device already
    module.to(context.device)
    return BuiltStage(module, tuple(data_parallel), wgrad_queue, module.messages.widths)


def _build_data_parallel(
    module: Stage,
    buffer: BufferPlan,
    *,
    options: DataParallelOptions,
    plan: Plan,
    context: ParallelContext,
) -> ParamBuffer:
    """The flat storage of a buffer, of which the module's parameters become views."""
    groups = ReduceGroups(
        context.group(buffer.shard.name),
        context.group(buffer.replicate.name),
        shards_across=buffer.layout.num_outer_shards > 1,
    )
    build: partial[ParamBuffer] = partial(
        DataParallel if buffer.layout.is_trainable else ParamBuffer,
        module,
        buffer.layout,
        groups=groups,
        options=options,
        precision=Precision.of(plan.config.precision),
        device=context.device,
    )
    if not plan.config.parallel.nccl_ub:
        return build()
    members = (groups.shard, groups.replicate)
    data_parallel, pool = build_registered(build, members, device=context.device)
    storage: Any = data_parallel.param_buffer.untyped_storage()
    storage.memory_pool = pool  # lives as long as the buffers
    if pool is None and context.rank == 0:
        log.info("--nccl-ub: no buffer of %s is sent by NCCL", buffer.shard.name)
    return data_parallel


def _amax_groups(
    config: Config, buffer: BufferPlan, *, context: ParallelContext
) -> tuple[Group, ...]:
    """Groups, besides the data-parallel ones, whose ranks share the scale of an fp8 weight."""
    fp8 = config.precision.fp8
    if fp8 is None or not RECIPES[fp8.recipe].is_per_tensor:
        return ()
    return (context.group("etp" if buffer.layout.params[0].spec.is_expert else "tp"),)


def data_parallel_options(
    plan: Plan, buffer: BufferPlan, *, recompute: Recompute
) -> DataParallelOptions:
    """The options of one buffer's wrapper, in a stage with this recomputation."""
    grad_scale = 1.0
    if plan.data_parallel.averages:
        # the loss is scaled for a mean over dp_cp; expert gradients are averaged over fewer ranks
        num_ranks = buffer.shard.size * buffer.replicate.size
        grad_scale = num_ranks / plan.num_averaged_ranks
    return replace(
        plan.data_parallel,
        grad_scale=grad_scale,
        is_recomputing=lambda: recompute.is_recomputing,
    )


def _model_parallel(
    plan: Plan, context: ParallelContext, *, wgrad_queue: WgradQueue | None
) -> ModelParallel:
    """The groups that the layers of a stage communicate over."""
    config = plan.config
    parallel = config.parallel
    fp8 = _fp8_options(plan, context)
    attention = AttentionChoice.of(config, AttentionDevice.of(context.device))
    core_attention = build_core_attention(
        parallel.cp_comm_type,
        context.group("cp"),
        kernels=attention.kernels(),
        num_inside=parallel.all_to_all_ranks,
    )
    return ModelParallel(
        tp=_tensor_parallel(plan, context, wgrad_queue=wgrad_queue, fp8=fp8),
        core_attention=core_attention,
        ep=context.group("ep"),
        etp=context.group("etp"),
        dispatch=_dispatch_options(config, context),
        sequence=context.group("tp_cp"),
        tracks_logits=config.optim.qk_clip or config.train.log_max_attention_logit,
        layers_in_bf16=layers_in_bf16(config.precision.fp8, config.model.num_layers),
        dp=context.group("dp"),
        cp=context.group("cp"),
        cp_comm_type=parallel.cp_comm_type,
    )


def _tensor_parallel(
    plan: Plan, context: ParallelContext, *, wgrad_queue: WgradQueue | None, fp8: Fp8Options | None
) -> TensorParallel:
    """The tp group, with the implementation of products that overlap with its transfers."""
    parallel = plan.config.parallel
    group = context.group("tp")
    overlap = ""
    if parallel.tp_comm_overlap and parallel.sequence_parallel and group.size > 1:
        is_symmetric = has_symmetric_memory(group, context.device)
        overlap = "symmetric" if is_symmetric else "pieces"
        if context.rank == 0:
            transport = "symmetric memory" if is_symmetric else "all-to-alls"
            log.info(
                "--tp-comm-overlap: pieces are sent by %s%s", transport, _left_out_of_pieces(fp8)
            )
    return TensorParallel(
        group, parallel.sequence_parallel, wgrad_queue=wgrad_queue, fp8=fp8, overlap=overlap
    )


def _left_out_of_pieces(fp8: Fp8Options | None) -> str:
    """Layers in fp8 whose transfers are not overlapped in pieces, for the log."""
    if fp8 is None:
        return ""
    if can_overlap(fp8.recipe):
        return "; gradients of layers in fp8 are sent as a whole"
    return "; layers in fp8 send inputs, outputs and gradients as a whole: scales are per block"


def _dispatch_options(config: Config, context: ParallelContext) -> DispatchOptions:
    """How tokens are sent to experts; on the meta device DeepEP is an all-to-all of its rows."""
    options = DispatchOptions.of(config)
    if not config.parallel.uses_deep_ep or context.device.type == "meta":
        return options
    return replace(options, uses_deep_ep=True)


def _fp8_options(plan: Plan, context: ParallelContext) -> Fp8Options | None:
    """The fp8 products of this device; None without fp8."""
    device = context.device
    is_fused = device.type == "meta" or (device.type == "cuda" and not triton_fault())
    return fp8_options(
        plan.config.precision.fp8,
        sequence=context.group("tp_cp"),
        capability=compute_capability(device),
        is_fused=is_fused,
        keeps_weights=is_fused and plan.keeps_fp8_weights(plan.num_microbatches),
        sends_tokens=plan.config.parallel.moe_dispatch_fwd_dtype != "bf16",
    )


def _transform_blocks(stages: Iterable[Stage], config: Config, *, context: ParallelContext) -> None:
    """Recomputation, compilation, CUDA graphs and offload of blocks.

    Multi-token prediction has neither graphs nor offload.
    """
    resolved = _with_compiler(config, context)
    modules = config.memory.recomputed_modules
    for stage in stages:
        blocks = list(stage.layers.values())
        blocks += [layer.block for layer in stage.mtp_layers]
        for block in blocks:
            cast_norms(block, modules, parallel=stage.parallel)
            keep_weights(block)
        transform = partial(transform_blocks, config=resolved, recompute=stage.parallel.recompute)
        stage.layer_functions = transform(stage.layers.values())
        for layer in stage.mtp_layers:
            layer.block_functions = transform([layer.block], transforms=MTP_TRANSFORMS)


def _with_compiler(config: Config, context: ParallelContext) -> Config:
    """Resolve whether blocks are compiled, which needs a compiler on every rank.

    Eager blocks reduce in another order than compiled ones.
    """
    device_type = context.device.type
    resolved = with_compile(config, device_type)
    inductor = ""
    if resolved.train.torch_compile:
        inductor = _first_fault(inductor_fault(device_type), context.control)
    if inductor:
        log.warning(
            "torch.compile: off, blocks run eagerly, as inductor cannot compile: %s; %s",
            inductor,
            COMPILER,
        )
        resolved = replace(resolved, train=replace(resolved.train, torch_compile=False))
    elif device_type == "cuda" or config.train.torch_compile is not None:
        log.info("torch.compile: %s", describe_compile(config, device_type))
    triton = triton_fault() if device_type == "cuda" else ""
    if triton:
        log.warning(
            "the loss runs torch's operators, as Triton cannot compile: %s; %s", triton, COMPILER
        )
    return resolved


def _first_fault(fault: str, control: Group) -> str:
    """The fault of the first rank that has one; empty if none has."""
    return next(filter(None, all_gather_object(fault, control)), "")


def build_pipeline(plan: Plan, context: ParallelContext) -> Pipeline:
    """The pp group of this rank and the shape of the hidden states sent over it."""
    timeout_s = plan.config.parallel.distributed_timeout_minutes * 60
    pipeline = Pipeline(
        group=context.group("pp"),
        hidden_shape=plan.hidden_shape,
        dtype=Precision.of(plan.config.precision).params,
        device=context.device,
        turns=context.group("ep").turns,
        stop_point=StopPoint(context.store, context.control, timeout_s=timeout_s),
    )
    pipeline.connect()
    return pipeline


def build_batch_iterator(
    batches: GlobalBatchLoader, context: ParallelContext, *, options: BatchOptions | None = None
) -> BatchIterator:
    """Global batches for this rank.

    The ranks of tp, cp and pp read the same samples; each cp rank keeps a sequence shard.
    """
    options = replace(
        options or BatchOptions(),
        readers_per_sample=batches.sampler.readers_per_sample,
        split=partial(split_batch, group=context.group("cp")),
    )
    return BatchIterator(
        batches,
        context.group("world"),
        control=context.control,
        device=context.device,
        options=options,
    )


def _build_train_iterator(
    batches: GlobalBatchLoader, parts: StepParts, *, model: BuiltModel, lr_schedule: LRSchedule
) -> BatchIterator:
    """The batches of a run, each checked by all ranks before the step."""

    def settings() -> StepSettings:
        return StepSettings.at(batches.consumed_samples, plan=model.plan, lr_schedule=lr_schedule)

    options = BatchOptions(
        # Voting one step ahead saves time on a GPU only: on a CPU the host runs the step itself and
        # waits just as long.
        is_ahead=model.context.device.type != "cpu",
        prepare=parts.prepare,
        counts=parts.counts,
        settings=settings,
    )
    return build_batch_iterator(batches, model.context, options=options)


def _build_checkpointer(
    config: Config, folder: RunFolder, *, context: ParallelContext
) -> Checkpointer:
    local = Checkpointer(
        folder.checkpoints,
        group=context.control,
        keep_last=config.checkpoint.keep_last,
        keep_every=config.checkpoint.save_retain_interval,
        timeout_s=config.parallel.distributed_timeout_minutes * 60,
    )
    return RemoteCheckpointer(local, folder.remote, store=context.store) if folder.remote else local


def _open_batches(
    model: BuiltModel, *, state: TrainState, origin: DataOrigin | None
) -> GlobalBatchLoader:
    """A loader that starts at the sample where the run stopped."""
    plan = model.plan
    samples_of = partial(plan.samples_of, batch_size=state.curve_batch_size)
    samples = starting_stages(model.dataset, plan.config.data, samples_of=samples_of)
    return GlobalBatchLoader(
        continued(samples, origin),
        sampler=plan.sampler,
        consumed_samples=state.consumed_samples,
        skipped_samples=state.skipped_samples,
        num_workers=plan.config.data.num_workers,
        pin_memory=model.context.device.type == "cuda",
    )


def _load_start(
    model: BuiltModel, parts: StepParts, *, inputs: RunInputs, checkpointer: Checkpointer
) -> TrainState:
    """Load the checkpoint, live state or folder that a run starts from; returns its counters."""
    if inputs.live is not None:
        return take_over(inputs.live, model=model, parts=parts)
    pretrained = model.config.checkpoint.pretrained_checkpoint
    if inputs.checkpoint is None and pretrained is None:
        return TrainState()
    with progress("loading weights", is_shown=model.context.control.is_first):
        if inputs.checkpoint is not None:
            return restore(
                inputs.checkpoint,
                checkpointer,
                model=model,
                parts=parts,
                may_fall_back=inputs.is_resumed,
            )
        assert pretrained is not None
        load_pretrained(Path(pretrained), model=model, parts=parts)
    return TrainState()
