"""Times of kernels: measured products are met, peaks are never passed, more work never takes less
time.
"""

import csv
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.planner.hardware import gpu_of, gpus
from nanotrain.planner.kernels import (
    AttentionShape,
    attention_s,
    attention_work,
    grouped_matmul_s,
    matmul_s,
    memory_s,
    tables,
)

SIZES = st.integers(min_value=1, max_value=1 << 17)
# of products on the machine that was measured; the planner's times are those of its `reachable`
# throughput
MEDIAN_ERROR, LARGEST_ERROR = 0.05, 0.6


def measured_products() -> list[dict[str, str]]:
    """12 products of every measured GPU and dtype, of aiconfigurator's tables."""
    with (Path(__file__).parent / "measured_products.tsv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def error(row: dict[str, str]) -> float:
    gpu, dtype = gpu_of(row["gpu"]), row["dtype"]
    reached = tables()["matmul"][gpu.name][dtype]["flops_per_s"] / gpu.peak(dtype)
    as_measured = replace(gpu, reachable={dtype: reached})
    seconds = matmul_s(as_measured, (int(row["m"]), int(row["n"]), int(row["k"])), dtype=dtype)
    return abs(seconds / (float(row["milliseconds"]) * 1e-3) - 1)


def test_measured_products_are_met() -> None:
    errors = [error(row) for row in measured_products()]
    assert len(errors) > 200
    assert median(errors) < MEDIAN_ERROR
    assert max(errors) < LARGEST_ERROR


@given(m=SIZES, n=SIZES, k=SIZES, name=st.sampled_from(sorted(gpus())))
def test_no_product_passes_the_peak(m: int, n: int, k: int, name: str) -> None:
    gpu = gpu_of(name)
    for dtype, peak in gpu.peak_flops.items():
        assert matmul_s(gpu, (m, n, k), dtype=dtype) >= 2 * m * n * k / peak


@given(length=SIZES, heads=st.integers(1, 128), backward=st.booleans())
def test_no_attention_passes_the_peak(length: int, heads: int, backward: bool) -> None:
    gpu, shape = gpu_of("h100"), AttentionShape(1, heads, 1, length, 128)
    assert attention_s(gpu, shape, backward=backward) >= attention_work(shape)[0] / gpu.peak("bf16")


@pytest.mark.parametrize("name", sorted(gpus()))
def test_every_gpu_has_a_time_of_attention(name: str) -> None:
    gpu, shape = gpu_of(name), AttentionShape(1, 32, 8, 2048, 128)
    assert 0 < attention_s(gpu, shape, dtype="fp16" if name == "v100" else "bf16") < 100


def test_pairs_of_attention_are_counted() -> None:
    for length, window in [(5, None), (5, 9), (5, 2), (7, 1)]:
        pairs = attention_work(AttentionShape(1, 1, 1, length, 1, window=window))[0] / 4
        assert pairs == sum(min(query + 1, window or length) for query in range(length))


def test_faster_memory_is_faster() -> None:
    h100 = gpu_of("h100")
    faster = replace(h100, memory_bandwidth=2 * h100.memory_bandwidth)
    assert memory_s(faster, 1e9) < memory_s(h100, 1e9)
    assert matmul_s(faster, (64, 8192, 8192), dtype="bf16") < matmul_s(
        h100, (64, 8192, 8192), dtype="bf16"
    )


@pytest.mark.parametrize("accumulate", [False, True])
def test_experts_compute_no_faster_than_one_product_of_their_tokens(accumulate: bool) -> None:
    gpu, shape = gpu_of("h100"), (8192, 2048, 7168)
    whole = (2048, 7168, 8192) if accumulate else shape
    times = [
        grouped_matmul_s(gpu, shape, num_experts=n, dtype="bf16", accumulate=accumulate)
        for n in (1, 8, 64)
    ]
    assert times[0] == pytest.approx(
        1.2 * matmul_s(gpu, whole, dtype="bf16", accumulate=accumulate), rel=0.01
    )
    assert times == sorted(times)


def test_adding_weight_gradients_takes_longer() -> None:
    gpu = gpu_of("a100")
    shape = (4096, 4096, 8192)
    assert matmul_s(gpu, shape, dtype="bf16", accumulate=True) > matmul_s(gpu, shape, dtype="bf16")


def test_eight_bits_are_faster_than_sixteen() -> None:
    for name in ("h100", "b200", "gb200", "mi300x"):
        assert matmul_s(gpu_of(name), (8192, 8192, 8192), dtype="fp8") < matmul_s(
            gpu_of(name), (8192, 8192, 8192), dtype="bf16"
        )


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 64, 256, 4096])
def test_no_product_is_faster_than_its_bytes(tokens: int, accumulate: bool) -> None:
    """Inputs in bf16; an output in bf16 is written, one in fp32 is read and written."""
    for name in ("a100", "h100", "h200", "b200"):
        gpu = gpu_of(name)
        for m, n in ((8192, 8192), (1024, 16384), (4096, 512)):
            num_bytes = 2 * tokens * (m + n) + (8 if accumulate else 2) * m * n
            seconds = matmul_s(gpu, (m, n, tokens), dtype="bf16", accumulate=accumulate)
            least = num_bytes / (gpu.memory_bandwidth * gpu.memory_efficiency)
            assert seconds > least, (name, m, n)
