"""A layer of sparse attention on any ranks of tp and cp has the outputs, gradients and divergences
of one rank.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.model.context import AttentionInputs, LayerContext, ModelParallel
from nanotrain.model.parameters import Parameters
from nanotrain.model.rope import RotaryTables
from nanotrain.model.sublayers import build_mixer
from nanotrain.parallel.cp import build_core_attention
from nanotrain.parallel.cp.split import local_chunks, local_positions
from nanotrain.parallel.tp.layers import TensorParallel
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.params import localize
from nanotrain.spec.shape import ModelShape
from tests.harness import run_ranks
from tests.model.mixers import assert_near, random_hidden
from tests.model.test_block_sparse import MODEL as BLOCKS
from tests.model.test_dsa import MODEL, SEGMENTS, B, H, S

MODELS = {
    "blocks": BLOCKS,
    # topk so small that they are gathered
    "gathered blocks": replace(BLOCKS, dsa=replace(BLOCKS.dsa, topk=2, block_size=1)),
    "all keys": replace(MODEL, dsa=replace(MODEL.dsa, n_heads=3)),  # tp does not divide them
    "selected keys": replace(MODEL, dsa=replace(MODEL.dsa, use_sparse_loss=True)),
}


def gradients(
    ctx: ParallelContext | None, name: str, *, sequence_parallel: bool
) -> tuple[dict[str, Tensor], Any]:
    """The output, the gradients of input and parameters, and the divergence; of one rank without a
    context.
    """
    model, parallel, coords = MODELS[name], ModelParallel.single_rank(), {"tp": 0}
    if ctx is not None:
        tp, cp, coords = ctx.group("tp"), ctx.group("cp"), ctx.coords
        core, tensor_parallel = (
            build_core_attention("allgather", cp),
            TensorParallel(tp, sequence_parallel),
        )
        parallel = replace(parallel, tp=tensor_parallel, cp=cp, core_attention=core)
    tp, cp = parallel.tp.group, parallel.cp
    shape = ModelShape.of(model)
    kind, _ = shape.kinds(0)
    specs = MIXERS[kind].declare(Declaration(shape, "fp32", tp.size, sequence_parallel))
    params, boxes = {}, {}
    for spec in specs:
        local = localize(spec, coords=coords, sizes={"tp": tp.size})
        full = torch.empty(spec.shape, dtype=torch.float64)
        full.normal_(0, 0.3, generator=torch.Generator().manual_seed(sum(spec.name.encode())))
        boxes[spec.name] = local
        params[spec.name] = torch.nn.Parameter(full[local.box.slices()].clone())
    layer = build_mixer(model, Parameters(params), parallel=parallel, layer=0)

    def local_tokens(x: Tensor) -> Tensor:
        x = x if cp.size == 1 else local_chunks(x, index=cp.index, size=cp.size)
        return parallel.tp.local_slice(x).detach()

    hidden = local_tokens(random_hidden(B, S, H)).requires_grad_()
    positions = (
        S if cp.size == 1 else local_positions(S, index=cp.index, size=cp.size).expand(B, -1)
    )
    rotary = RotaryTables(model).at(positions, like=hidden)
    mask = parallel.core_attention.plan_mask(SEGMENTS, tokens=torch.empty(B, S // cp.size))
    context = LayerContext(
        AttentionInputs(rotary, mask), segment_ids=SEGMENTS, aux_loss_scale=1 / B
    )
    out = layer(hidden, context)
    out.backward(
        local_tokens(
            torch.randn(B, S, H, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
        )
    )
    assert hidden.grad is not None
    found = {"out": out.detach(), "input": hidden.grad}
    for name, param in layer.named_parameters():
        assert param.grad is not None, name
        found[name] = param.grad
    found["divergence"] = layer.divergence.sums[:1]
    if ctx is not None:
        for name in params:
            for axis in ("cp", *boxes[name].spec.grad_sum_axes):
                all_reduce(found[name], ctx.group(axis))
        all_reduce(found["divergence"], cp)
        # a mean over tp ranks, which count equal divergences or those of their own groups
        all_reduce(found["divergence"], tp)
        found["divergence"] /= tp.size
    return found, (boxes, local_tokens)


def every_model_on_this_rank(
    ctx: ParallelContext, sequence_parallel: bool
) -> dict[str, dict[str, Tensor]]:
    replicated = {}
    for model in MODELS:
        single, _ = gradients(None, model, sequence_parallel=False)
        found, (boxes, local_tokens) = gradients(ctx, model, sequence_parallel=sequence_parallel)
        expected = {
            name: x[boxes[name].box.slices()] if name in boxes else x for name, x in single.items()
        }
        expected |= {name: local_tokens(single[name]) for name in ("out", "input")}
        for name in expected:
            assert_near([found[name]], [expected[name]], tolerance=1e-12)
        replicated[model] = {
            name: found[name]
            for name, local in boxes.items()
            if name.startswith("indexer") and not local.spec.shards
        }
    return replicated


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}], ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_share_heads_and_sequences(sizes: dict[str, int], sequence_parallel: bool) -> None:
    num_ranks = sizes.get("tp", 1) * sizes.get("cp", 1)
    first, *others = run_ranks(
        num_ranks, every_model_on_this_rank, sequence_parallel, **sizes, threads=True
    )
    for other in others:  # what every rank has of the indexer has one gradient, to the bit
        for model, grads in other.items():
            assert all(torch.equal(grad, first[model][name]) for name, grad in grads.items())
