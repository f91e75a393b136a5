"""Bytes that autograd keeps of blocks: counted with saved-tensor hooks, or as live storages, in a
real world.
"""

import gc
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.config.load import load
from nanotrain.config.schema import with_values
from nanotrain.data.batch import Batch
from nanotrain.memory.block_transforms import transform_blocks
from nanotrain.model.context import AttentionInputs, BatchContext, LayerContext
from nanotrain.model.layer_inputs import layer_input_state
from nanotrain.model.transformer import Stage
from nanotrain.plan.memory_plan import peak_of, train_schedule
from nanotrain.plan.plan import Plan, plan_run
from nanotrain.plan.saved_bytes import SavedBytes
from nanotrain.precision.dtypes import Precision
from nanotrain.train.build import build_stages

DOCUMENTS = "--reset-attention-mask"


class SavedTensors:
    """Distinct storages that autograd saves, without those of parameters."""

    def __init__(self, not_counted: Iterable[Tensor]) -> None:
        self._params = {param.untyped_storage().data_ptr() for param in not_counted}
        self.tensors: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage().data_ptr()
        if key not in self._params:
            self.tensors.setdefault(key, tensor)
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())


class LiveStorages(TorchDispatchMode):
    """Storages allocated inside the block that something still refers to.

    Counts also what inner saved-tensor hooks replace, which outer ones do not see.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.set_.source_Storage:
            return func(*args)  # a view of storage that exists: a receive buffer of collectives
        given = {
            x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    @property
    def num_bytes(self) -> int:
        self._storages = {
            key: value for key, value in self._storages.items() if not value[0].expired()
        }
        return sum(num_bytes for _, num_bytes in self._storages.values())


class PeakStorages(LiveStorages):
    """The most bytes of live storages after any operator inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.peak = max(self.peak, self.num_bytes)
        return out


@dataclass(frozen=True)
class Microbatch:
    """A stage of one rank, and what its blocks are called with."""

    plan: Plan
    stage: Stage
    hidden: Tensor
    context: LayerContext


def _documents(config: Config, batch_size: int) -> Tensor | None:
    """Segment ids of three documents per sequence, of other lengths in each."""
    if not config.data.reset_attention_mask:
        return None
    length = config.data.seq_length
    borders = torch.tensor([[length // 3 + row, length // 2 + row] for row in range(batch_size)])
    return torch.searchsorted(
        borders, torch.arange(length).expand(batch_size, -1).contiguous(), right=True
    )


@cache
def config_of(words: str) -> Config:
    """The configuration of a command line, of which mock data has no documents."""
    words = words if "--vocab-size" in words else f"{words} --vocab-size 512"
    config = load(f"--mock-data {words.replace(DOCUMENTS, '')}".split()).config
    return with_values(config, {"data.reset_attention_mask": DOCUMENTS in words})


def microbatch(ctx: ParallelContext, config: Config) -> Microbatch:
    """The first stage of a run with random weights, and one microbatch."""
    plan = plan_run(config, ctx.topology.world_size, rank=ctx.rank)
    stage = build_stages(plan, ctx)[0].module
    transform = partial(transform_blocks, config=config, recompute=stage.parallel.recompute)
    stage.layer_functions = transform(stage.layers.values())
    for layer in stage.mtp_layers:
        layer.block_functions = transform([layer.block])
    generator = torch.Generator().manual_seed(0)  # ranks may be threads, which share torch's own
    for param in stage.parameters():
        nn.init.normal_(param, std=0.02, generator=generator)
    tokens = torch.zeros(
        plan.hidden_shape[0], config.data.seq_length // ctx.group("cp").size, dtype=torch.int64
    )
    dtype = Precision.of(config.precision).params
    hidden = torch.randn(*plan.hidden_shape, dtype=dtype, generator=generator, requires_grad=True)
    context = BatchContext.of(Batch.from_tokens(tokens), cp=ctx.group("cp"), aux_loss_scale=1.0)
    batch = replace(context.batch, segment_ids=_documents(config, len(tokens)))
    masks = stage.masks.plan(batch, stage.parallel)
    positions = stage.position_tables.at(tokens.shape[1], like=hidden)
    layer_context = LayerContext(
        full=AttentionInputs(positions.full, masks.full),
        windowed=AttentionInputs(positions.windowed, masks.windowed),
        query_scale=positions.query_scale,
        sequence_positions=context.sequence_positions,
        aux_loss_scale=1.0,
    )
    if stage.layer_inputs is not None:
        sizes = (plan.shape.num_layers, plan.shape.layer_input_size)
        inputs = torch.randn(*hidden.shape[:2], *sizes, dtype=dtype, generator=generator)
        layer_context.state.update(layer_input_state(inputs.requires_grad_()))
    return Microbatch(plan, stage, hidden, layer_context)


def kept_and_planned(ctx: ParallelContext, config: Config) -> tuple[int, int]:
    """Bytes that a block keeps of a microbatch: counted, and by the formula."""
    case = microbatch(ctx, config)
    rotary = case.context.full.rotary
    shared = [] if rotary is None else [rotary.cos, rotary.sin]
    shared += chain.from_iterable(case.context.state.values())  # inputs of layers
    saved = SavedTensors([*case.stage.parameters(), *shared])
    with saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        out = case.stage.layers["0"](case.hidden, case.context)
    assert out.shape == case.hidden.shape  # keeps the graph until here
    return saved.num_bytes, SavedBytes(case.plan, "cpu").block(0)


def live_and_planned(ctx: ParallelContext, config: Config) -> tuple[int, int]:
    """Bytes that the blocks of a stage keep of a microbatch, recomputation included: live, and by
    the formula.
    """
    case = microbatch(ctx, config)

    def forward() -> Tensor:
        hidden = case.hidden + 0
        context = replace(case.context, state=dict(case.context.state))
        for function in case.stage.layer_functions:
            hidden = function(hidden, context)
        return hidden

    with torch.no_grad():
        forward()  # allocates the receive buffers of collectives, which stay
    with LiveStorages() as live:
        hidden = forward()
    graph = hidden.grad_fn
    del hidden
    gc.collect()
    time.sleep(0.02)  # gloo's threads drop the tensors of a transfer soon after it
    num_bytes = live.num_bytes
    assert graph is not None  # keeps the graph until here
    kept, spec = SavedBytes(case.plan, "cpu"), case.plan.stages[0].spec
    return num_bytes, kept.stage(spec).kept - kept.head()


def stage_kept_and_planned(ctx: ParallelContext, config: Config) -> tuple[int, int]:
    """Bytes that a stage with both ends of the model keeps of a microbatch: counted, and by the
    formula.
    """
    case = microbatch(ctx, config)
    tokens = torch.zeros(case.hidden.shape[:2], dtype=torch.int64)
    depth = case.plan.shape.num_mtp_predictions
    batch = Batch(tokens, tokens, torch.ones(tokens.shape)).with_mtp(depth)
    saved = SavedTensors(case.stage.parameters())
    with saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        loss = case.stage(None, BatchContext(batch, mtp_scales=(0.1,) * depth))
    assert loss.requires_grad  # keeps the graph until here
    return saved.num_bytes, SavedBytes(case.plan, "cpu").stage(case.plan.stages[0].spec).kept


def peak_and_planned(ctx: ParallelContext, config: Config) -> tuple[int, int]:
    """Peak bytes of a forward and backward of a stage with both ends: counted, and as planned
    without the process.
    """
    case = microbatch(ctx, config)
    tokens = torch.zeros(case.hidden.shape[:2], dtype=torch.int64)
    batch = Batch(tokens, tokens, torch.ones(tokens.shape))
    for param in case.stage.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    with PeakStorages() as live:
        case.stage(None, BatchContext.of(batch, cp=ctx.group("cp"), aux_loss_scale=1.0)).backward()
    peak = peak_of(
        case.plan, SavedBytes(case.plan, "cpu"), schedule=train_schedule(case.plan.config, 1)
    )
    return live.peak, peak.total
