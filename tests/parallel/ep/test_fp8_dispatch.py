"""Tokens sent in fp8: the operands of a cast after the all-to-all, to the bit, in planned bytes."""

from dataclasses import replace

import pytest
import torch

from nanotrain.comm.all_to_all import all_to_all, start_differentiable_all_to_all
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.kernels.fp8.layer import Fp8Options
from nanotrain.kernels.fp8.quantize import Cast, cast
from nanotrain.parallel.ep.fp8_dispatch import (
    decode_rows,
    dispatch_encoding,
    encode_rows,
    row_bytes,
)
from nanotrain.plan.traffic import sent_bytes
from nanotrain.precision.fp8 import FP8_FORMATS, RECIPES
from nanotrain.train.step import train_step
from tests.harness import run_ranks
from tests.laws.test_fp8 import EXPERTS, MODEL
from tests.laws.worlds import Case, build_here

SENT = ["rowwise", "blockwise", "mxfp8"]


def how(recipe: str) -> Cast:
    return Cast(RECIPES[recipe].block, torch.float8_e4m3fn, power_of_two=True)


def draw(rows: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + width)
    exponents = torch.randn(rows, width, generator=generator) * 4
    return torch.randn(rows, width, generator=generator) * 2**exponents


@pytest.mark.parametrize("recipe", SENT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 200, 256])
def test_a_cast_of_what_arrives_is_a_cast_of_what_was_sent(
    recipe: str, dtype: torch.dtype, width: int
) -> None:
    rows = draw(40, width).to(dtype)
    # just above a power of two of the format: rounded down to it, so that half the scale would do
    rows[0, 0] = rows[0].abs().max() * 2
    rows[1] = rows[1] / rows[1].abs().max() * 224.5
    rows[2] = 0
    payload = encode_rows(rows, how(recipe))
    assert payload.shape == (40, row_bytes(width, RECIPES[recipe].block))
    assert payload.dtype is torch.uint8
    arrived = decode_rows(payload, how(recipe), like=rows)
    assert arrived.dtype is dtype
    operands = [cast(each, how(recipe)).get().dequantize() for each in (rows, arrived)]
    assert torch.equal(*operands)
    assert torch.equal(operands[0].to(dtype), arrived)


def test_an_overflow_arrives() -> None:
    rows = draw(3, 256)
    rows[1, 200] = torch.inf
    arrived = decode_rows(encode_rows(rows, how("blockwise")), how("blockwise"), like=rows)
    assert arrived[1, 128:].isnan().all() and arrived[1, :128].isfinite().all()
    assert arrived[[0, 2]].isfinite().all()
    assert decode_rows(
        encode_rows(rows[:0], how("blockwise")), how("blockwise"), like=rows[:0]
    ).shape == (0, 256)


def test_layers_without_fp8_send_their_own_dtype() -> None:
    options = Fp8Options(RECIPES["blockwise"], FP8_FORMATS["e4m3"])
    assert dispatch_encoding(None) is None
    assert dispatch_encoding(options) is None
    assert dispatch_encoding(replace(options, sends_tokens=True)) is not None


def send(ctx: ParallelContext) -> None:
    group = ctx.group("ep")
    options = Fp8Options(RECIPES["blockwise"], FP8_FORMATS["e4m3"], sends_tokens=True)
    splits = {"output_splits": [2 - group.index] * 2, "input_splits": [2, 1]}
    splits["output_splits"] = [[2, 2], [1, 1]][group.index]
    rows = draw(3, 256)[:, :] + group.index
    rows.requires_grad_()
    encoding = dispatch_encoding(options)
    assert encoding is not None
    ctx.traffic.reset()
    received = start_differentiable_all_to_all(rows, group, **splits, encoding=encoding).wait()
    others = splits["input_splits"][1 - group.index]
    assert ctx.traffic.bytes("ep", "all_to_all") == others * (256 + 2)
    plain = all_to_all(rows.detach(), group, **splits)
    expected = decode_rows(encode_rows(plain, how("blockwise")), how("blockwise"), like=plain)
    assert torch.equal(received, expected)
    grad = torch.arange(received.numel(), dtype=torch.float32).view(received.shape) + group.index
    (grad_rows,) = torch.autograd.grad(received, rows, grad)
    back = {"output_splits": splits["input_splits"], "input_splits": splits["output_splits"]}
    assert torch.equal(grad_rows, all_to_all(grad, group, **back))


def test_rows_are_sent_in_fp8_and_gradients_as_they_are() -> None:
    run_ranks(2, send, ep=2)


def first_losses(ctx: ParallelContext, cases: list[Case]) -> list[float]:
    losses = []
    for case in cases:
        run = build_here(ctx, case)
        ctx.traffic.reset()
        batch = run.batch_iterator.next()
        assert batch is not None
        losses.append(train_step(run, batch).loss)
        for (group, operation), planned in sent_bytes(run.plan).items():
            if group == "ep":
                assert ctx.traffic.bytes(group, operation) == planned, operation
    assert len(losses) == len(cases)
    return losses


@pytest.mark.parametrize("options", [{}, {"moe_hierarchical_dispatch": 1}])
def test_a_run_has_the_loss_of_a_cast_after_dispatch_in_planned_bytes(
    options: dict[str, int],
) -> None:
    """The first loss, in a run with a layer in params_dtype (L5)."""
    # every token goes to all experts, so to all nodes
    balanced = EXPERTS | {"moe_router_force_load_balancing": True, "moe_router_topk": 4}
    plain = Case().but(
        model=MODEL | balanced | {"num_layers": 3},
        precision={
            "params_dtype": "bf16",
            "fp8_format": "e4m3",
            "fp8_recipe": "blockwise",
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": 0,
        },
        train={"micro_batch_size": 2, "global_batch_size": 4},
        parallel={
            "expert_model_parallel_size": 2,
            "data_parallel_sharding_strategy": "optim",
            **options,
        },
    )
    narrow = plain.but(parallel={"moe_dispatch_fwd_dtype": "fp8"})
    replies = run_ranks(
        2, first_losses, [plain, narrow], strategy="optim", ep=2, shares=True, **options
    )
    for wide_loss, narrow_loss in replies:
        assert wide_loss == narrow_loss
