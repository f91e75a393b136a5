"""The one place that sees every part: from a plan to a `Run`.

    stages with storage -> start values -> optimizer -> checkpoint -> feed

Start values come from the seed, from a Hugging Face folder or from a checkpoint; exactly one of them is used.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.config.derive import global_batch_size
from nanotrain.config.schema import to_dict
from nanotrain.data.batch import Batch
from nanotrain.data.loader import GlobalBatchLoader
from nanotrain.data.sampler import SamplerConfig
from nanotrain.hf.import_weights import import_weights
from nanotrain.log import get_logger
from nanotrain.model.init import initialize
from nanotrain.optim.distributed import DistributedOptimizer
from nanotrain.optim.lr import LRSchedule
from nanotrain.parallel.cp.split import split_batch
from nanotrain.precision.loss_scale import LossScale
from nanotrain.precision.policy import Precision
from nanotrain.topology.boxes import TensorBox
from nanotrain.train.batches import BatchIterator
from nanotrain.train.pipeline import build_pipeline, build_schedule
from nanotrain.train.resolve import Plan
from nanotrain.train.routers import router_biases
from nanotrain.train.run import Run
from nanotrain.train.stages import BuiltStage, all_data_parallel, build_stages
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
    stages = build_stages(config, context)
    data_parallel = all_data_parallel(stages)
    if plan.checkpoint is None:
        _give_start_values(config, stages)
    if config.train.torch_compile:
        _compile_layers(stages)
    optimizer = DistributedOptimizer(
        data_parallel,
        config.optim,
        precision=precision,
        loss_scale=LossScale.of(config.precision),
        world=context.group("world"),
    )
    checkpointer = Checkpointer(plan.folder.checkpoints, group=context.control, keep_last=config.checkpoint.keep_last)
    state = TrainState()
    if plan.checkpoint is not None:
        biases = router_biases({index: stage.module for index, stage in stages.items()})
        state = restore(plan, checkpointer, optimizer=optimizer, biases=biases)
        for layer in data_parallel:
            layer.start_param_gather()

    place = _read_place(config, context)
    state.curve_batch_size = state.curve_batch_size or place.global_batch_size
    batches = _open_batches(plan, place, consumed_samples=state.consumed_samples, device=context.device)
    return Run(
        config=config,
        context=context,
        folder=plan.folder,
        stages={index: stage.module for index, stage in stages.items()},
        runnable={index: stage.runnable for index, stage in stages.items()},
        data_parallel=data_parallel,
        optimizer=optimizer,
        schedule=build_schedule(config.parallel, context.group("pp"), num_microbatches=place.num_microbatches),
        pipeline=build_pipeline(config, context),
        lr_schedule=LRSchedule(config.optim, state.curve_batch_size, config.train.train_iters),
        datasets=plan.datasets,
        place=place,
        batches=batches,
        batch_iterator=build_batch_iterator(batches, context),
        checkpointer=checkpointer,
        state=state,
    )


def _open_batches(
    plan: Plan, place: SamplerConfig, *, consumed_samples: int, device: torch.device
) -> GlobalBatchLoader:
    samples = plan.datasets.train
    assert samples is not None, "resolve requires a training split"
    return GlobalBatchLoader(
        samples,
        place=place,
        consumed_samples=consumed_samples,
        num_workers=plan.config.data.num_workers,
        pin_memory=device.type == "cuda",
    )


def build_batch_iterator(batches: Iterator[list[Batch]], context: ParallelContext) -> BatchIterator:
    """The feed of this rank: ranks that share a sample (tp, cp, pp) read it all, and each keeps its part of it."""
    return BatchIterator(
        batches,
        context.control,
        device=context.device,
        readers_per_sample=context.topology.world_size // context.group("dp").size,
        split=partial(split_batch, group=context.group("cp")),
    )


def restore(
    plan: Plan,
    checkpointer: Checkpointer,
    *,
    optimizer: DistributedOptimizer,
    biases: dict[TensorBox, torch.Tensor],
) -> TrainState:
    """Read a checkpoint into the optimizer and the routers; the parameters still have to be gathered."""
    checkpoint, config = plan.checkpoint, plan.config
    assert checkpoint is not None, "a new run has nothing to restore"
    manifest = checkpointer.restore(checkpoint, optimizer.held_tensors() | biases, config=to_dict(config))
    optimizer.load_state(manifest.objects["optimizer"])
    state = TrainState(**manifest.objects["train"])
    changed = changed_settings(manifest.config, to_dict(config))
    if changed:
        log.info("other settings than the checkpoint was written under: %s", "; ".join(changed))
    log.info("going on from %s: step %d, %d samples consumed", checkpoint, state.step, state.consumed_samples)
    return state


def changed_settings(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Settings on which the further losses depend and that a checkpoint was not written under.

    Args:
        there: the checkpoint's configuration.
        here: the present one.

    >>> changed_settings({"optim": {"lr": 0.1}}, {"optim": {"lr": 0.2, "clip_grad": 1.0}, "train": {"seed": 1}})
    ['optim.lr 0.1 -> 0.2']
    """
    watched = {"optim": None, "precision": None, "data": None, "train": ("seed", "global_batch_size")}
    changed = []
    for section, names in watched.items():
        before, now = there.get(section, {}), here.get(section, {})
        for name in sorted((before.keys() & now.keys()).intersection(names or now) - {"num_workers"}):
            if before[name] != now[name]:
                changed.append(f"{section}.{name} {before[name]} -> {now[name]}")
    return changed


def _give_start_values(config: Config, stages: Mapping[int, BuiltStage]) -> None:
    folder = config.checkpoint.pretrained_checkpoint
    for stage in stages.values():
        if folder is None:
            initialize(stage.module, stage.params, seed=config.train.seed)
            continue
        held = dict(stage.module.named_parameters())
        wanted = {
            TensorBox(local.spec.name, local.spec.shape, local.box): held[local.spec.name].data
            for local in stage.params
        }
        import_weights(Path(folder), config.model, wanted=wanted)
    if folder is not None:
        log.info("starting from the weights of %s", folder)


def _compile_layers(stages: Mapping[int, BuiltStage]) -> None:
    """Compile what runs inside each layer; the hooks around it, which wait for parameters, stay outside."""
    for stage in stages.values():
        for layer in stage.module.layers.values():
            layer.forward = torch.compile(layer.forward)


def _read_place(config: Config, context: ParallelContext) -> SamplerConfig:
    group = context.group("dp")
    return SamplerConfig(
        dp_rank=group.index,
        dp_size=group.size,
        micro_batch_size=config.train.micro_batch_size,
        global_batch_size=global_batch_size(config.train, group.size),
    )
