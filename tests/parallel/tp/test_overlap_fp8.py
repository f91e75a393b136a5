"""fp8 products in pieces: the values of whole products, and the calls of torch's operators."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Fp8Config
from nanotrain.kernels.fp8.layer import fp8_options
from nanotrain.kernels.fp8.quantize import Quantized, block_amax, inverse_scales, quantize
from nanotrain.kernels.fp8.scaled_mm import emulate
from nanotrain.parallel.tp import overlap_fp8
from nanotrain.parallel.tp.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    column_parallel,
)
from nanotrain.parallel.tp.overlap_fp8 import can_overlap, gather_scaled, scatter_scaled
from nanotrain.precision.fp8 import PER_ROW, PER_TENSOR, RECIPES, Block
from tests.harness import ranks, run_ranks
from tests.parallel.tp.test_overlap import BATCH, numbers

LENGTH, WIDTH, OUTPUTS = 3, 32, 48
RECIPES_IN_PIECES = ["tensorwise", "delayed", "rowwise"]


def quantized(x: Tensor, block: Block) -> Quantized:
    """Whole numbers, which are exact in fp8 with a scale that is a power of two."""
    amax = torch.full_like(block_amax(x, block), 448.0)
    scales = inverse_scales(amax, torch.float8_e4m3fn, power_of_two=True)
    return quantize(x, scales, block=block, dtype=torch.float8_e4m3fn)


def test_recipes_with_scales_of_tensors_or_rows_overlap() -> None:
    assert [name for name, recipe in RECIPES.items() if can_overlap(recipe)] == RECIPES_IN_PIECES


def rows_of(ctx: ParallelContext, x: Tensor) -> Tensor:
    """The tokens of this rank."""
    group = ctx.group("tp")
    return x[:, group.index * LENGTH : (group.index + 1) * LENGTH].flatten(0, 1)


def gathered_and_scattered(ctx: ParallelContext, block: Block) -> None:
    """Whole numbers are added without rounding, so that the values are exact."""
    group = ctx.group("tp")
    x = numbers(BATCH, LENGTH * group.size, WIDTH, seed=1)
    weights = [numbers(OUTPUTS, WIDTH, seed=seed) for seed in (2, 3)]
    local = quantized(rows_of(ctx, x), block)
    outputs = gather_scaled(
        "pieces",
        local,
        batch=BATCH,
        weights=[quantized(weight, block) for weight in weights],
        group=group,
        dtype=torch.float32,
    )
    for output, weight in zip(outputs, weights, strict=True):
        assert torch.equal(output, x @ weight.t())
    # every rank has other inputs and another matrix
    inputs = [numbers(*x.shape, seed=10 + rank) for rank in range(group.size)]
    shards = [numbers(OUTPUTS, WIDTH, seed=20 + rank) for rank in range(group.size)]
    expected = sum((a @ b.t() for a, b in zip(inputs, shards, strict=True)), torch.zeros(()))
    found = scatter_scaled(
        "pieces",
        quantized(inputs[group.index].flatten(0, 1), block),
        batch=BATCH,
        weight=quantized(shards[group.index], block),
        group=group,
        dtype=torch.float32,
    )
    assert torch.equal(found.flatten(0, 1), rows_of(ctx, expected))
    sent = local.values.nbytes + (local.inverse_scales.nbytes if block == PER_ROW else 0)
    assert group.traffic.bytes("tp", "all_gather") == (group.size - 1) * sent
    assert group.traffic.bytes("tp", "reduce_scatter") == (group.size - 1) * found.nbytes


@pytest.mark.parametrize("block", [PER_TENSOR, PER_ROW])
@pytest.mark.parametrize("tp", [2, 3])
def test_pieces_are_the_whole_products_to_the_bit(tp: int, block: Block) -> None:
    run_ranks(tp, gathered_and_scattered, block, tp=tp, threads=False)


def parallel_layers(ctx: ParallelContext, overlap: str, recipe: str) -> list[Tensor]:
    """Outputs and gradients of two layers with one input, and of one that reads them."""
    group = ctx.group("tp")
    options = fp8_options(Fp8Config("e4m3", recipe), sequence=group)
    tensor_parallel = TensorParallel(group, True, fp8=options, overlap=overlap)
    weights = []
    for seed, shape in ((1, (OUTPUTS, WIDTH)), (2, (OUTPUTS, WIDTH)), (3, (WIDTH, OUTPUTS))):
        generator = torch.Generator().manual_seed(10 * group.index + seed)
        weights.append(nn.Parameter(torch.randn(shape, generator=generator)))
    gate, up = (
        ColumnParallelLinear(weight, None, tensor_parallel=tensor_parallel)
        for weight in weights[:2]
    )
    down = RowParallelLinear(weights[2], None, tensor_parallel=tensor_parallel)
    generator = torch.Generator().manual_seed(group.index)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator, requires_grad=True)
    both = column_parallel(x, (gate, up))
    out = down(both[0] * both[1])
    return [out.detach(), *torch.autograd.grad(out, [x, *weights], torch.ones_like(out))]


def both_forms(ctx: ParallelContext, recipe: str) -> None:
    whole = parallel_layers(ctx, "", recipe)
    sent = ctx.group("tp").traffic.bytes("tp", "all_gather")
    in_pieces = parallel_layers(ctx, "pieces", recipe)
    assert ctx.group("tp").traffic.bytes("tp", "all_gather") < 2 * sent, "inputs are sent in fp8"
    for found, expected in zip(in_pieces, whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * expected.abs().max())


@pytest.mark.parametrize("recipe", RECIPES_IN_PIECES)
def test_layers_have_the_outputs_and_gradients_of_whole_transfers(recipe: str) -> None:
    run_ranks(2, both_forms, recipe, tp=2, threads=False)


def scaled_mm_of_torch(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *_: Any) -> Tensor:
    """torch's product in place of its kernels, which check scales on GPUs."""
    block = PER_TENSOR if scale_a.numel() == 1 else PER_ROW
    scales = [scale_a.reshape(-1, 1), scale_b.reshape(-1, 1)]
    pair = Quantized(a, scales[0], block), Quantized(b.t(), scales[1], block)
    return emulate(*pair, dtype=torch.bfloat16)


@ranks(2, tp=2, threads=False)
def test_symmetric_memory_gets_the_arguments_of_torch(ctx: ParallelContext) -> None:
    """By torch's own functions for other devices, which gather first and multiply then."""
    from torch.distributed import _symmetric_memory as torch_symmetric

    group = ctx.group("tp")
    gather = torch_symmetric._fused_all_gather_scaled_matmul_fallback
    scatter = torch_symmetric._fused_scaled_matmul_reduce_scatter_fallback
    operators = SimpleNamespace(
        fused_all_gather_scaled_matmul=gather, fused_scaled_matmul_reduce_scatter=scatter
    )
    x = numbers(BATCH, LENGTH * group.size, WIDTH, seed=group.index)
    weight = numbers(OUTPUTS, WIDTH, seed=7)
    found: dict[str, list[Tensor]] = {}
    for block in (PER_TENSOR, PER_ROW):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.ops, "symm_mem", operators, raising=False)
            patch.setattr(torch, "_scaled_mm", scaled_mm_of_torch)
            patch.setattr(FUNCTIONAL, "all_gather_into_tensor", gather_bytes)
            patch.setattr(
                torch_symmetric.torch.ops.aten, "_scaled_mm", _keyword_free, raising=False
            )
            for name in ("symmetric", "pieces"):
                found[name] = [
                    *gather_scaled(
                        name,
                        quantized(rows_of(ctx, x), block),
                        batch=BATCH,
                        weights=[quantized(weight, block)],
                        group=group,
                        dtype=torch.bfloat16,
                    ),
                    scatter_scaled(
                        name,
                        quantized(x.flatten(0, 1), block),
                        batch=BATCH,
                        weight=quantized(weight, block),
                        group=group,
                        dtype=torch.bfloat16,
                    ),
                ]
        for symmetric, pieces in zip(found["symmetric"], found["pieces"], strict=True):
            assert torch.equal(symmetric, pieces)


FUNCTIONAL: Any = torch.ops._c10d_functional
gather_tensor = FUNCTIONAL.all_gather_into_tensor


def gather_bytes(tensor: Tensor, size: int, name: str) -> Tensor:
    """torch's all-gather, which has no fp8 on gloo."""
    gathered = FUNCTIONAL.wait_tensor(gather_tensor(tensor.view(torch.uint8), size, name))
    return gathered.view(tensor.dtype)


def _keyword_free(*args: Any, out_dtype: torch.dtype, use_fast_accum: bool) -> Tensor:
    assert out_dtype is torch.bfloat16 and use_fast_accum
    return scaled_mm_of_torch(*args)


def test_order_is_that_of_pieces_in_bf16() -> None:
    by_rank = run_ranks(3, events_of, tp=3, threads=False)
    gather = ["start +1", "start +2", "product", "wait +1", "product", "wait +2", "product"]
    scatter = ["product", "start -1", "product", "start -2", "product", "wait -1", "wait -2"]
    assert by_rank == [gather + scatter] * 3


def events_of(ctx: ParallelContext) -> list[str]:
    """Products and transfers of a rank in the order in which they are started."""
    group = ctx.group("tp")
    events: list[str] = []
    start, multiply = overlap_fp8.start_shift, overlap_fp8.scaled_mm

    def start_recorded(tensor: Tensor, *args: Any, distance: int, op: str) -> Any:
        events.append(f"start {distance:+d}")
        work = start(tensor, *args, distance=distance, op=op)

        def wait() -> Tensor:
            events.append(f"wait {distance:+d}")
            return work.wait()

        return SimpleNamespace(wait=wait)

    def multiply_recorded(*args: Any, **options: Any) -> Tensor:
        events.append("product")
        return multiply(*args, **options)

    matrix = quantized(torch.ones(OUTPUTS, WIDTH), PER_TENSOR)
    local = quantized(torch.ones(LENGTH, WIDTH), PER_TENSOR)
    full = quantized(torch.ones(group.size * LENGTH, WIDTH), PER_TENSOR)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap_fp8, "start_shift", start_recorded)
        patch.setattr(overlap_fp8, "scaled_mm", multiply_recorded)
        options = {"batch": 1, "group": group, "dtype": torch.float32}
        gather_scaled("pieces", local, weights=[matrix], **options)
        scatter_scaled("pieces", full, weight=matrix, **options)
    return events
