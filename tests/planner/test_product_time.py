"""Times of products, their casts, and the collectives of tensor parallelism around them."""

from dataclasses import replace
from typing import Any

import pytest

from nanotrain.planner.kernels import grouped_matmul_s, matmul_s, memory_s
from nanotrain.planner.product_time import ACCUMULATED_BYTES, product_parts
from nanotrain.planner.rank_clock import RankClock
from nanotrain.spec.operators import ExpertProduct, Product
from tests.planner.scenarios import llama

TOKENS, OUTPUTS, INPUTS = 4096, 6144, 2048
SHAPE = (TOKENS, OUTPUTS, INPUTS)


def product(**fields: Any) -> Product:
    values = {"name": "up", "weights": ("up.weight",)} | fields
    return Product(rows=TOKENS, outputs=OUTPUTS, inputs=INPUTS, **values)


def with_accumulation(kind: str) -> RankClock:
    clock = RankClock(llama(8))
    operators = replace(clock.engine.operators, accumulation=kind)
    clock.engine = replace(clock.engine, operators=operators)
    return clock


@pytest.mark.parametrize("accumulation", ["fused", "separate"])
def test_a_product_is_three_matrix_products(accumulation: str) -> None:
    clock = with_accumulation(accumulation)
    (part,) = product_parts(clock, product())
    gpu = clock.gpu
    is_fused = accumulation == "fused"
    wgrad = matmul_s(gpu, (OUTPUTS, INPUTS, TOKENS), dtype="bf16", accumulate=is_fused)
    if not is_fused:
        wgrad += memory_s(gpu, ACCUMULATED_BYTES * OUTPUTS * INPUTS)
    assert part.forward == matmul_s(gpu, SHAPE, dtype="bf16")
    assert part.dgrad == matmul_s(gpu, (TOKENS, INPUTS, OUTPUTS), dtype="bf16")
    assert part.wgrad == pytest.approx(wgrad)
    assert part.launches == (1, 1, 1 if is_fused else 2)
    assert (part.flops, part.sizes) == (2.0 * TOKENS * OUTPUTS * INPUTS, SHAPE)
    assert (part.before, part.after, part.group) == (0.0, 0.0, "")


def test_experts_are_grouped_products() -> None:
    clock = with_accumulation("separate")
    experts = ExpertProduct(
        name="experts.up",
        weights=("experts.up.weight",),
        rows=TOKENS,
        outputs=OUTPUTS,
        inputs=INPUTS,
        num_experts=8,
        topk=2,
        num_choices=64,
    )
    (part,) = product_parts(clock, experts)
    assert part.forward == grouped_matmul_s(clock.gpu, SHAPE, num_experts=8, dtype="bf16")
    added = memory_s(clock.gpu, ACCUMULATED_BYTES * 8 * OUTPUTS * INPUTS)
    assert part.wgrad > added, "the gradients of all eight are added"


@pytest.mark.parametrize("shard", ["column", "row"])
@pytest.mark.parametrize("is_sequence_parallel", [False, True], ids=["tp", "sp"])
def test_collectives_are_where_the_product_is_sharded(
    shard: str, is_sequence_parallel: bool
) -> None:
    clock = RankClock(llama(8, tp=4, sequence_parallel=is_sequence_parallel))
    (part,) = product_parts(clock, product(shard=shard))
    width = INPUTS if shard == "column" else OUTPUTS
    num_bytes = TOKENS * width * 2

    def seconds(operation: str) -> float:
        return clock.collective("tp", operation, num_bytes=num_bytes)

    found = {
        name: getattr(part, name)
        for name in ("before", "after", "first", "again", "last")
        if getattr(part, name)
    }
    if is_sequence_parallel:
        gather_s, scatter_s = seconds("all_gather"), seconds("reduce_scatter")
        expected = {"before": gather_s, "again": gather_s, "last": scatter_s}
        if shard == "row":
            expected = {"after": scatter_s, "first": gather_s}
    else:
        expected = {"last" if shard == "column" else "after": seconds("all_reduce")}
    assert found == expected and part.group == "tp" and part.pieces == 4


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("shard", ["column", "row"])
def test_products_in_8_bits_overlap_in_the_forward_where_scales_are_not_of_blocks(
    shard: str, recipe: str
) -> None:
    fp8 = {"fp8_format": "e4m3", "fp8_recipe": recipe}
    parallel = {"sequence_parallel": True, "tp_comm_overlap": True}
    whole, pieces = (
        product_parts(RankClock(llama(8, tp=4, **fp8, **options)), product(shard=shard))[1]
        for options in ({"sequence_parallel": True}, parallel)
    )
    if recipe == "blockwise":
        assert pieces == whole
        return
    assert pieces.hides == "forward tiles" and pieces.forward > whole.forward
    assert (pieces.dgrad, pieces.first, pieces.last) == (whole.dgrad, whole.first, whole.last)
    if shard == "column":
        assert pieces.before < whole.before == whole.again, "inputs are sent in fp8"


def test_products_in_8_bits_cast_both_operands_but_not_the_head() -> None:
    clock = RankClock(llama(8, fp8_format="hybrid"))
    assert clock.scenario.matmul_dtype == "fp8"
    cast, part = product_parts(clock, product())
    assert part.forward == matmul_s(clock.gpu, SHAPE, dtype="fp8")
    assert part.forward < matmul_s(clock.gpu, SHAPE, dtype="bf16")
    # read in 16 bits, written twice in 8
    assert cast.forward == memory_s(clock.gpu, TOKENS * INPUTS * 4)
    assert cast.dgrad == memory_s(clock.gpu, TOKENS * OUTPUTS * 4)
    (head,) = product_parts(clock, product(name="head"))
    assert head.forward == matmul_s(clock.gpu, SHAPE, dtype="bf16")


@pytest.mark.parametrize("engine", ["nanotrain", "megatron"])
def test_products_in_nvfp4_read_for_amaxes_and_for_each_layout(engine: str) -> None:
    """nanotrain casts a weight for every product, Transformer Engine once per step."""
    values = {"fp8_format": "e2m1", "fp8_recipe": "nvfp4"}
    clock = RankClock(llama(8, gpu="b200", engine=engine, **values))
    assert clock.scenario.matmul_dtype == "nvfp4"
    cast, part = product_parts(clock, product())
    assert part.forward == matmul_s(clock.gpu, SHAPE, dtype="nvfp4")
    # three reads in 16 bits, two writes in 4; of a weight one of each
    weight = OUTPUTS * INPUTS * 2.5 if engine == "nanotrain" else 0
    assert cast.forward == memory_s(clock.gpu, TOKENS * INPUTS * 7 + weight)
    assert cast.dgrad == memory_s(clock.gpu, TOKENS * OUTPUTS * 7 + weight)
