#!/usr/bin/env python3
"""Compress public tables of measured kernels into nanotrain/planner/data/kernels.json.

    git clone https://github.com/ai-dynamo/aiconfigurator && git -C aiconfigurator checkout 095f58a5
    python scripts/kernel_tables.py aiconfigurator

Every measured time is divided by a roofline of its GPU (`nanotrain/planner/kernels.py`); the
logarithm of what is left is fitted on a grid of sizes, linear between its points, by least absolute
error. Values are in hundredths. Collectives are medians, in tenths of a microsecond. Needs pandas
and pyarrow.
"""

import json
import sys
from argparse import ArgumentParser
from pathlib import Path

import numpy as np
import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nanotrain.planner.hardware import GPU, gpu_of  # noqa: E402
from nanotrain.planner.kernels import AttentionShape, Work, attention_work, matmul_work, roofline_s  # noqa: E402

SYSTEMS = "aic-core/src/aiconfigurator_core/systems/data"
OUT, SAMPLES = (
    ROOT / "nanotrain/planner/data/kernels.json",
    ROOT / "tests/planner/measured_products.tsv",
)
# GPU -> folder of the measurements; frameworks whose kernels are cuBLAS's, and FlashAttention's or
# TensorRT-LLM's
GPUS = {name: f"{name}_sxm" for name in ("h100", "h200", "b200", "b300")} | {
    "gb200": "gb200",
    "gb300": "gb300",
}
GPUS["a100-80gb"] = "a100_sxm"
# in bf16 all are cuBLAS; in 8 and 4 bits the fastest kernel counts, as cuBLASLt has them all
MATMUL = {"a100_sxm": ["sglang/0.5.10", "sglang/0.5.9", "trtllm/1.0.0", "vllm/0.14.0"]}
DEFAULT_MATMUL = ["trtllm/1.3.0rc20", "sglang/0.5.14", "vllm/0.24.0"]
# FlashAttention-2; else vllm/0.24.0: FlashAttention-3, TensorRT-LLM
ATTENTION = {"a100_sxm": "sglang/0.5.10"}
NCCL = {"a100_sxm": "2.27.3"}  # else 2.29.2
DTYPES = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4"}
LEAST = 128  # rows, columns and depth of the products that are fitted
GRID = {"m": [128, 512, 1024, 2048, 4096, 8192, 32768], "n": [128, 512, 1024, 4096, 16384, 65536]}
SEQUENCES, HEADS = [256, 512, 1024, 2048, 4096, 8192, 16384], [4, 16, 64, 256, 1024]
BYTES = [2**power for power in (10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 29)]


def weights(grid: list[np.ndarray], points: list[np.ndarray]) -> np.ndarray:
    """Multilinear weights of the grid's points at every sample, in the logarithms of the sizes."""
    matrix = np.ones((len(points[0]), 1))
    for nodes, values in zip(grid, points, strict=True):
        place = np.clip(np.log(values), np.log(nodes[0]), np.log(nodes[-1]))
        one = np.stack([np.interp(place, np.log(nodes), row) for row in np.eye(len(nodes))], axis=1)
        matrix = (matrix[:, :, None] * one[:, None, :]).reshape(len(place), -1)
    return matrix


def fit(
    grid: list[list[int]], points: list[np.ndarray], ratios: np.ndarray
) -> tuple[list[int], float]:
    """Values of the grid in hundredths of a logarithm, and the median error."""
    design, target = weights([np.array(nodes) for nodes in grid], points), np.log(ratios)
    # a point that no sample reaches is drawn to its neighbours
    near = np.eye(design.shape[1]) - weights([np.array(n) for n in grid], shifted(grid))
    weight = np.ones(len(target))
    for _ in range(10):
        normal = (
            (design * weight[:, None]).T @ design
            + 0.05 * near.T @ near
            + 1e-6 * np.eye(design.shape[1])
        )
        values = np.linalg.solve(normal, (design * weight[:, None]).T @ target)
        weight = 1 / np.maximum(np.abs(design @ values - target), 0.02)
    values = np.round(100 * values)
    return values.astype(int).tolist(), float(
        np.median(np.abs(np.exp(design @ values / 100 - target) - 1))
    )


def shifted(grid: list[list[int]]) -> list[np.ndarray]:
    """The grid's points, each moved halfway towards the middle of the grid."""
    axes = [np.array(nodes, dtype=float) for nodes in grid]
    moved = [
        np.exp((np.log(a) + np.log(np.clip(np.sqrt(a * np.sqrt(a[0] * a[-1])), a[0], a[-1]))) / 2)
        for a in axes
    ]
    return [points.ravel() for points in np.meshgrid(*moved, indexing="ij")]


def products_of(table: pd.DataFrame, *, dtype: str) -> pd.DataFrame:
    """The products of training's sizes, each once."""
    table = table[(table[["m", "n", "k"]] >= LEAST).all(axis=1) & (table.m % LEAST == 0)]
    return table.groupby(["m", "n", "k"], as_index=False).latency.agg(
        "median" if dtype == "bf16" else "min"
    )


def matmul_table(gpu: GPU, table: pd.DataFrame, *, dtype: str) -> dict[str, object]:
    """The surface of one dtype: reached FLOP/s and values of the grid."""
    flops = 2.0 * table.m * table.n * table.k
    reached = float(np.quantile(flops / table.latency * 1e3, 0.995))
    base = [
        roofline_s(gpu, matmul_work(shape, dtype=dtype), flops_per_s=reached)
        for shape in table[["m", "n", "k"]].itertuples(index=False)
    ]
    points = [table[name].to_numpy(float) for name in "mnk"]
    values, error = fit(
        [GRID["m"], GRID["n"], GRID["n"]], points, table.latency.to_numpy() * 1e-3 / np.array(base)
    )
    print(
        f"  {gpu.name} {dtype}: {len(table)} products, median error {error:.3f}, {reached / 1e12:.0f} TFLOP/s"
    )
    return {"flops_per_s": round(reached), "values": values}


def attention_table(gpu: GPU, table: pd.DataFrame) -> dict[str, object]:
    """The surface of attention's forward pass at one head size."""
    table = table[(table.isl >= SEQUENCES[0]) & (table.latency > 0)]
    shapes = [
        AttentionShape(
            row.batch_size, row.num_heads, row.num_key_value_heads, row.isl, row.head_dim
        )
        for row in table.itertuples()
    ]
    work = np.array([attention_work(shape) for shape in shapes])
    reached = float(np.quantile(work[:, 0] / table.latency * 1e3, 0.995))
    base = np.array([roofline_s(gpu, Work(*one), flops_per_s=reached) for one in work])
    points = [table.isl.to_numpy(float), (table.batch_size * table.num_heads).to_numpy(float)]
    values, error = fit([SEQUENCES, HEADS], points, table.latency.to_numpy() * 1e-3 / base)
    print(
        f"  {gpu.name} attention: {len(table)} shapes, median error {error:.3f}, {reached / 1e12:.0f} TFLOP/s"
    )
    return {"flops_per_s": round(reached), "values": values}


def collective_table(table: pd.DataFrame) -> dict[str, dict[str, list[int]]]:
    """Tenths of microseconds by operation and ranks, at `BYTES`."""
    table = table[table.nccl_dtype == "half"]
    return {
        operation.replace("alltoall", "all_to_all"): {
            str(ranks): np.exp(
                np.interp(np.log(BYTES), np.log(2 * sizes.index), np.log(sizes.to_numpy() * 1e4))
            )
            .round()
            .astype(int)
            .tolist()
            for ranks, rows in of_operation.groupby("num_gpus")
            if len(sizes := rows.groupby("message_size").latency.median())
        }
        for operation, of_operation in table.groupby("op_name")
    }


def main() -> None:
    """Write the file."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    systems = parser.parse_args().checkout / SYSTEMS
    samples = [["gpu", "dtype", "m", "n", "k", "milliseconds"]]
    tables: dict[str, dict[str, object]] = {"matmul": {}, "attention": {}, "collectives": {}}
    for name, folder in GPUS.items():
        gpu = gpu_of(name)
        files = [
            systems / folder / "gemm" / name / "gemm_perf.parquet"
            for name in MATMUL.get(folder, DEFAULT_MATMUL)
        ]
        products = pd.concat([pd.read_parquet(file) for file in files])
        surfaces = {}
        for dtype, rows in products[products.gemm_dtype.isin(DTYPES)].groupby("gemm_dtype"):
            one = products_of(rows, dtype=DTYPES[dtype])
            surfaces[DTYPES[dtype]] = matmul_table(gpu, one, dtype=DTYPES[dtype])
            large = one[(one.m >= 1024) & (one.m * one.n * one.k > 2**33)].sample(
                12, random_state=0
            )
            samples += [
                [name, DTYPES[dtype], *map(str, row)] for row in large.itertuples(index=False)
            ]
        tables["matmul"][name] = surfaces
        version = ATTENTION.get(folder, "vllm/0.24.0")
        context = pd.read_parquet(
            systems / folder / "attention" / version / "context_attention_perf.parquet"
        )
        plain = context[
            (context.attn_dtype == "bfloat16")
            & (context.kv_cache_dtype == "bfloat16")
            & (context.step == 0)
        ]
        plain = plain[plain.window_size == 0] if "window_size" in plain else plain
        plain = plain[~plain.kernel_source.str.contains("decode|fa4|triton")]
        tables["attention"][name] = {
            str(size): attention_table(gpu, rows)
            for size, rows in plain.groupby("head_dim")
            if size <= 256
        }
        tables["collectives"][name] = collective_table(
            pd.read_parquet(
                systems / folder / "comm/nccl" / NCCL.get(folder, "2.29.2") / "nccl_perf.parquet"
            )
        )
    header = {
        "source": "ai-dynamo/aiconfigurator@095f58a5 systems/data (2026-08-21), Apache-2.0; scripts/kernel_tables.py",
        "grid": {**GRID, "queries": SEQUENCES, "heads": HEADS, "bytes": BYTES},
    }
    text = json.dumps(header | tables, separators=(",", ":"))
    OUT.write_text(text.replace("{", "{\n").replace("],", "],\n") + "\n", encoding="utf-8")
    SAMPLES.write_text("\n".join("\t".join(row) for row in samples) + "\n", encoding="utf-8")
    print(f"{OUT}: {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
