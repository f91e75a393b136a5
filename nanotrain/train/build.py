"""Build a `Run` from a plan, open inputs and process groups: the only file that imports every part.

    stages with storage -> initial weights -> block transforms -> optimizer -> saved weights -> batches

Initial weights come from the seed; those of a checkpoint or a Hugging Face folder are read into the main params.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.comm.stop_point import StopPoint
from nanotrain.config.batch_schedule import samples_of_steps
from nanotrain.config.config import Config
from nanotrain.config.data_stages import read_stages, stage_starts
from nanotrain.data.batch import Batch
from nanotrain.data.loader import GlobalBatchLoader
from nanotrain.data.staged import StagedDataset
from nanotrain.log import get_logger
from nanotrain.memory.block_transforms import WITHOUT_OFFLOAD, transform_blocks
from nanotrain.model.init import initialize
from nanotrain.model.transformer import Stage
from nanotrain.optim.distributed import DistributedOptimizer
from nanotrain.optim.lr import LRSchedule
from nanotrain.parallel.cp.split import split_batch
from nanotrain.parallel.pp.executor import Pipeline
from nanotrain.precision.loss_scale import LossScale
from nanotrain.precision.policy import Precision
from nanotrain.spec.params import LocalParam
from nanotrain.train.batches import BatchIterator, BatchOptions
from nanotrain.train.compile import describe_compile, with_compile
from nanotrain.train.parts.part import BuiltModel, StepParts
from nanotrain.train.parts.table import build_parts
from nanotrain.train.plans.plan import Plan
from nanotrain.train.resume.restore import restore
from nanotrain.train.run import Run, RunInputs, StepSchedules, TrainState
from nanotrain.train.stages import BuiltStage, all_data_parallel, build_stages

log = get_logger(__name__)


def build_run(plan: Plan, inputs: RunInputs, *, context: ParallelContext) -> Run:
    """Build every part of a run on this rank and load what it starts from.

    Args:
        plan: of this rank.
        inputs: open datasets, run folder and checkpoint.
        context: this rank's device and process groups.

    Raises:
        NanotrainError: a checkpoint or Hugging Face folder that does not fit the model; on every rank.
    """
    config = plan.config
    assert plan.groups == {name: group.spec for name, group in context.groups.items()}, "planned for other groups"
    built = build_stages(plan, context)
    stages, data_parallel = {index: stage.module for index, stage in built.items()}, all_data_parallel(built)
    if inputs.checkpoint is None and config.checkpoint.pretrained_checkpoint is None:
        _init_weights(config, built)
    _transform_blocks(stages.values(), config, device_type=context.device.type)
    optimizer = DistributedOptimizer(
        data_parallel,
        config.optim,
        precision=Precision.of(config.precision),
        loss_scale=LossScale.of(config.precision, context.device),
        groups=context.groups,
    )
    for balance in optimizer.matrix_balances:
        log.info("%s: %s", config.optim.optimizer, balance)
    assert inputs.datasets.train is not None, "open_inputs requires a training split"
    model = BuiltModel(
        plan=plan,
        context=context,
        dataset=inputs.datasets.train,
        stages=stages,
        runnable={index: stage.runnable for index, stage in built.items()},
        data_parallel=data_parallel,
        optimizer=optimizer,
    )
    parts = build_parts(model)
    checkpointer = _build_checkpointer(config, inputs.folder.checkpoints, context=context)
    state = _load_start(model, parts, inputs=inputs, checkpointer=checkpointer)
    state.curve_batch_size = state.curve_batch_size or plan.sampler.global_batch_size
    batches = _open_batches(model, state=state)
    # Voting one step ahead saves time on a GPU only: on a CPU the host runs the step itself and waits just as long.
    is_ahead = context.device.type == "cuda"
    return Run(
        **vars(model),
        inputs=inputs,
        parts=parts,
        pipeline=build_pipeline(plan, context),
        lr_schedule=LRSchedule(
            config.optim, state.curve_batch_size, _samples_of_steps(plan, state)(config.train.train_iters)
        ),
        batches=batches,
        batch_iterator=build_batch_iterator(batches, context, is_ahead=is_ahead, parts=parts),
        checkpointer=checkpointer,
        state=state,
        schedules=StepSchedules(plan),
    )


def _transform_blocks(stages: Iterable[Stage], config: Config, *, device_type: str) -> None:
    """Recomputation, offload and compilation; the saved tensors of multi-token prediction stay on the device."""
    if device_type == "cuda" or config.train.torch_compile is not None:
        log.info("torch.compile: %s", describe_compile(config, device_type))
    resolved = with_compile(config, device_type)
    for stage in stages:
        transform = partial(transform_blocks, config=resolved, recompute=stage.parallel.recompute)
        stage.layer_functions = transform(stage.layers.values())
        for layer in stage.mtp_layers:
            layer.block_functions = transform([layer.block], transforms=WITHOUT_OFFLOAD)


def _samples_of_steps(plan: Plan, state: TrainState) -> Callable[[int], int]:
    """The number of samples in the first `steps` steps, at the batch size of step 0 even if a resume changed it."""
    schedule = plan.sampler.schedule
    return lambda steps: samples_of_steps(schedule, steps) if schedule else steps * state.curve_batch_size


def build_pipeline(plan: Plan, context: ParallelContext) -> Pipeline:
    """The pp group of this rank and the shape of the hidden states sent over it."""
    timeout_s = plan.config.parallel.distributed_timeout_minutes * 60
    pipeline = Pipeline(
        group=context.group("pp"),
        hidden_shape=plan.hidden_shape,
        dtype=Precision.of(plan.config.precision).params,
        device=context.device,
        stop_point=StopPoint(context.store, context.control, timeout_s=timeout_s),
    )
    pipeline.connect()
    return pipeline


def build_batch_iterator(
    batches: Iterator[list[Batch]], context: ParallelContext, *, is_ahead: bool = False, parts: StepParts | None = None
) -> BatchIterator:
    """Global batches for this rank: tp, cp and pp ranks read the same samples, cp ranks keep a sequence shard each."""
    options = BatchOptions(
        readers_per_sample=context.topology.world_size // context.group("dp").size,
        split=partial(split_batch, group=context.group("cp")),
        is_ahead=is_ahead,
    )
    if parts is not None:
        options = replace(options, prepare=parts.prepare, counts=parts.counts)
    return BatchIterator(
        batches, context.group("world"), control=context.control, device=context.device, options=options
    )


def _build_checkpointer(config: Config, folder: Path, *, context: ParallelContext) -> Checkpointer:
    return Checkpointer(
        folder,
        group=context.control,
        keep_last=config.checkpoint.keep_last,
        keep_every=config.checkpoint.save_retain_interval,
        timeout_s=config.parallel.distributed_timeout_minutes * 60,
    )


def _open_batches(model: BuiltModel, *, state: TrainState) -> GlobalBatchLoader:
    samples, plan = model.dataset, model.plan
    if isinstance(samples, StagedDataset):
        stages = read_stages(plan.config.data.stages)
        samples = samples.starting_at(stage_starts(stages, _samples_of_steps(plan, state)))
    return GlobalBatchLoader(
        samples,
        sampler=plan.sampler,
        consumed_samples=state.consumed_samples,
        skipped_samples=state.skipped_samples,
        num_workers=plan.config.data.num_workers,
        pin_memory=model.context.device.type == "cuda",
    )


def _init_weights(config: Config, stages: Mapping[int, BuiltStage]) -> None:
    """Initial weights from the seed."""

    def fill(module: nn.Module, params: Sequence[LocalParam]) -> None:
        initialize(module, params, seed=config.train.seed)

    for stage in stages.values():
        for dp in stage.data_parallel:
            dp.fill_params(partial(fill, stage.module))


def _load_start(model: BuiltModel, parts: StepParts, *, inputs: RunInputs, checkpointer: Checkpointer) -> TrainState:
    """Load the checkpoint or the Hugging Face folder that a run starts from, if any; the counters it starts with."""
    if inputs.checkpoint is not None:
        return restore(inputs.checkpoint, checkpointer, model=model, parts=parts, may_fall_back=inputs.is_resumed)
    pretrained = model.config.checkpoint.pretrained_checkpoint
    if pretrained is not None:
        from nanotrain.train.resume.pretrained import load_pretrained  # few runs need Hugging Face's families

        load_pretrained(Path(pretrained), model=model, parts=parts)
    return TrainState()
