"""The one place that sees every part: from a plan to a `Run`.

    stage (meta) -> specs -> data-parallel storage -> start values -> optimizer -> checkpoint -> feed

Start values come from the seed, from a Hugging Face folder or from a checkpoint; exactly one of them is used.
"""

from pathlib import Path

import torch

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.config.derive import global_batch_size
from nanotrain.config.schema import to_dict
from nanotrain.data.loader import GlobalBatches
from nanotrain.data.sampler import ReadPlace
from nanotrain.hf.import_weights import import_weights
from nanotrain.log import get_logger
from nanotrain.model.build import build_stage, collect_specs
from nanotrain.model.init import initialize
from nanotrain.model.stage import Stage
from nanotrain.optim.distributed import DistributedOptimizer
from nanotrain.optim.lr import LRSchedule
from nanotrain.parallel.dp.bucket import ReduceGroups
from nanotrain.parallel.dp.data_parallel import DataParallel, DataParallelOptions
from nanotrain.parallel.dp.layout import LayoutRules
from nanotrain.parallel.dp.strategy import STRATEGIES
from nanotrain.parallel.pp.executor import RunnableStage
from nanotrain.parallel.pp.schedules import SCHEDULES
from nanotrain.precision.loss_scale import LossScale
from nanotrain.precision.policy import Precision
from nanotrain.topology.boxes import TensorBox
from nanotrain.topology.params import LocalParam
from nanotrain.topology.stages import split_layers
from nanotrain.train.feed import Feed
from nanotrain.train.resolve import Plan
from nanotrain.train.run import Run
from nanotrain.train.state import TrainState

log = get_logger(__name__)


def build_run(plan: Plan, context: ParallelContext) -> Run:
    """Build every part of a run on this rank, and load what it starts from.

    Args:
        plan: what was asked for, complete.
        context: this rank's device and groups.

    Raises:
        NanotrainError: a checkpoint or Hugging Face folder that does not fit; on every rank alike.
    """
    config = plan.config
    precision = Precision.of(config.precision)
    stage = build_stage(config.model, split_layers(config.model.num_layers, 1)[0], dtype=precision.params)
    data_parallel = build_data_parallel(config, stage, context=context)
    if plan.checkpoint is None:
        _give_start_values(config, stage)
    if config.train.torch_compile:
        _compile_layers(stage)
    optimizer = DistributedOptimizer(
        data_parallel, config.optim, precision=precision, loss_scale=LossScale.of(config.precision)
    )
    checkpointer = Checkpointer(plan.folder.checkpoints, group=context.control, keep_last=config.checkpoint.keep_last)
    state = TrainState()
    if plan.checkpoint is not None:
        state = restore(plan.checkpoint, checkpointer, optimizer=optimizer, config=config)
        data_parallel.start_param_gather()

    place = _read_place(config, context)
    samples = plan.datasets.train
    assert samples is not None, "resolve requires a training split"
    batches = GlobalBatches(
        samples,
        place=place,
        consumed_samples=state.consumed_samples,
        num_workers=config.data.num_workers,
        pin_memory=context.device.type == "cuda",
    )
    return Run(
        config=config,
        context=context,
        folder=plan.folder,
        stage=stage,
        stages={0: RunnableStage(stage, (data_parallel,))},
        data_parallel=data_parallel,
        optimizer=optimizer,
        schedule=SCHEDULES["one_stage"](place.num_microbatches),
        lr_schedule=LRSchedule(config.optim, place.global_batch_size, config.train.train_iters),
        datasets=plan.datasets,
        place=place,
        batches=batches,
        feed=Feed(batches, context.control, device=context.device),
        checkpointer=checkpointer,
        state=state,
    )


def build_data_parallel(config: Config, stage: Stage, *, context: ParallelContext) -> DataParallel:
    """Flat storage for the parameters of a stage; they are zero until start values are given."""
    parallel = config.parallel
    groups = ReduceGroups(context.group("dp_shard"), context.group("dp_replicate"))
    sizes = {axis: context.topology.size(axis) for axis in ("tp", "pp", "cp", "ep", "etp")}
    params = [LocalParam(spec, spec.box(context.coords, sizes)) for spec in collect_specs(stage)]
    options = DataParallelOptions(
        strategy=STRATEGIES[parallel.data_parallel_sharding_strategy.value],
        rules=LayoutRules(
            num_shards=groups.shard.size,
            bucket_size=parallel.ddp_bucket_size,
            pad_for_high_busbw=parallel.ddp_pad_buckets_for_high_nccl_busbw,
        ),
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
    )
    precision = Precision.of(config.precision)
    return DataParallel(stage, params, groups=groups, options=options, precision=precision, device=context.device)


def restore(
    checkpoint: Path, checkpointer: Checkpointer, *, optimizer: DistributedOptimizer, config: Config
) -> TrainState:
    """Read a checkpoint into the optimizer; the parameters still have to be gathered."""
    manifest = checkpointer.restore(checkpoint, optimizer.held_tensors(), config=to_dict(config))
    optimizer.load_state(manifest.objects["optimizer"])
    state = TrainState(**manifest.objects["train"])
    log.info("going on from %s: step %d, %d samples consumed", checkpoint, state.step, state.consumed_samples)
    return state


def _give_start_values(config: Config, stage: Stage) -> None:
    specs = collect_specs(stage)
    if config.checkpoint.pretrained_checkpoint is None:
        initialize(stage, specs, seed=config.train.seed)
        return
    folder = Path(config.checkpoint.pretrained_checkpoint)
    params = dict(stage.named_parameters())
    wanted = {TensorBox.whole(spec.name, spec.shape): params[spec.name].data for spec in specs}
    import_weights(folder, config.model, wanted)
    log.info("starting from the weights of %s", folder)


def _compile_layers(stage: Stage) -> None:
    """Compile what runs inside each layer; the hooks around it, which wait for parameters, stay outside."""
    for layer in stage.layers.values():
        layer.forward = torch.compile(layer.forward)


def _read_place(config: Config, context: ParallelContext) -> ReadPlace:
    group = context.group("dp")
    return ReadPlace(
        dp_rank=group.index,
        dp_size=group.size,
        micro_batch_size=config.train.micro_batch_size,
        global_batch_size=global_batch_size(config.train, group.size),
    )
