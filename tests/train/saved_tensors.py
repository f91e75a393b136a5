"""Bytes that autograd keeps of one block, counted with saved-tensor hooks on a rank of a real world."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.load import load
from nanotrain.data.batch import Batch
from nanotrain.model.context import BatchContext, LayerContext
from nanotrain.precision.policy import Precision
from nanotrain.train.activations import Activations
from nanotrain.train.plan import plan_run
from nanotrain.train.stages import build_stages


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


def kept_and_planned(ctx: ParallelContext, words: str) -> tuple[int, int]:
    """Bytes that a block keeps of a microbatch: counted, and by the formula."""
    config = load(f"--mock-data --vocab-size 512 {words}".split()).config
    plan = plan_run(config, ctx.topology.world_size, rank=ctx.rank)
    stage = build_stages(plan, ctx)[0].module
    torch.manual_seed(0)
    for param in stage.parameters():
        nn.init.normal_(param, std=0.02)
    tokens = torch.zeros(plan.hidden_shape[0], config.data.seq_length // ctx.group("cp").size, dtype=torch.int64)
    dtype = Precision.of(config.precision).params
    hidden = torch.randn(*plan.hidden_shape, dtype=dtype, requires_grad=True)
    context = BatchContext.of(Batch.of_tokens(tokens), cp=ctx.group("cp"), aux_loss_scale=1.0)
    rotary = None if stage._rotary is None else stage._rotary.at(tokens.shape[1], like=hidden)
    layer_context = LayerContext(
        rotary=rotary,
        mask=stage.parallel.core_attention.plan_mask(None, tokens=tokens),
        sequence_positions=context.sequence_positions,
        aux_loss_scale=1.0,
    )
    shared = [] if rotary is None else [rotary.cos, rotary.sin]
    saved = SavedTensors([*stage.parameters(), *shared])
    with saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        out = stage.layers["0"](hidden, layer_context)
    assert out.shape == hidden.shape  # keeps the graph until here
    return saved.num_bytes, Activations(plan, "cpu").block(0)
