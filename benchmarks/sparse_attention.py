"""Attention to selected keys beside dense latent attention, by the length of the sequence.

    python benchmarks/sparse_attention.py
    python benchmarks/sparse_attention.py --blocks

First CPU milliseconds of a forward and backward of one layer's attention with the channels of
DeepSeek-V3.2, few heads and few selected keys, on one thread; all forms run in turn in one process.
Dense attention has no index; the other two have index scores and no loss. Then the planner's
milliseconds for one layer of DeepSeek-V3.2 on GPUs, with the loss over selected keys; nothing of it
was measured on a GPU.

With --blocks CPU milliseconds of attention with grouped heads to selected blocks of keys instead.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from nanotrain.attention.absorbed import UpProjection
from nanotrain.attention.block_sparse import attend_blocks
from nanotrain.attention.blocks import BlockIndex
from nanotrain.attention.call import AttentionCall, TileKernel
from nanotrain.attention.latent import attend_gathered
from nanotrain.attention.selection import Index
from nanotrain.attention.sparse import attend_selected
from nanotrain.attention.tiles import Spans
from nanotrain.config.load import load
from nanotrain.planner.engine import engine_of
from nanotrain.planner.hardware import gpu_of
from nanotrain.planner.operator_time import OperatorTimes
from nanotrain.planner.scenario import scenario_of
from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.kinds.dsa import gathers_keys
from nanotrain.spec.shape import ModelShape

HEADS, KEY_DIM, VALUE_DIM, COMPRESSED, ROTARY = 4, 128, 128, 512, 64
INDEX_HEADS, INDEX_DIM, TOPK = 4, 64, 256
LENGTHS, ROUNDS = (256, 1024, 2048, 4096, 8192), 2
BLOCK_LENGTHS = (512, 1024, 2048, 4096, 8192)
PLANNED_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288)


def inputs(length: int) -> dict[str, Tensor]:
    """Random queries, compressed keys, up-projections and index of one sequence."""
    shapes = {
        "query": (1, length, HEADS, KEY_DIM + ROTARY),
        "key": (1, length, 1, COMPRESSED + ROTARY),
        "up": (HEADS * (KEY_DIM + VALUE_DIM), COMPRESSED),
        "index_query": (1, length, INDEX_HEADS, INDEX_DIM),
        "index_key": (1, length, INDEX_DIM),
        "index_weight": (1, length, INDEX_HEADS),
    }
    return {name: torch.randn(shape).mul(0.1).requires_grad_() for name, shape in shapes.items()}


def per_head(x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Keys and values of every head."""
    up = UpProjection(x["up"], KEY_DIM, VALUE_DIM)
    compressed, rotary = x["key"].split((COMPRESSED, ROTARY), dim=-1)
    key = torch.einsum("bsc,ndc->bsnd", compressed[:, :, 0], up.key)
    value = torch.einsum("bsc,ndc->bsnd", compressed[:, :, 0], up.value)
    return torch.cat((key, rotary.expand(-1, -1, HEADS, -1)), dim=-1), value


def call_of(x: dict[str, Tensor]) -> AttentionCall:
    length = x["query"].shape[1]
    spans = Spans.of(None, length=length)
    return AttentionCall(TileKernel(), spans, range(length), torch.device("cpu"))


def index_of(x: dict[str, Tensor]) -> Index:
    return Index(x["index_query"], x["index_key"], x["index_weight"], TOPK)


def dense(x: dict[str, Tensor]) -> Tensor:
    """Attention to all keys."""
    key, value = per_head(x)
    return call_of(x)(x["query"], key=key, value=value)


def masked(x: dict[str, Tensor]) -> Tensor:
    """Attention that masks the keys that are not selected."""
    key, value = per_head(x)
    call, index = call_of(x), index_of(x)
    return attend_selected(x["query"], key=key, value=value, call=call, index=index, scores=None)


def gathered(x: dict[str, Tensor]) -> Tensor:
    """Attention that gathers the selected keys."""
    index = replace(index_of(x), up=UpProjection(x["up"], KEY_DIM, VALUE_DIM))
    return attend_gathered(x["query"], key=x["key"], call=call_of(x), index=index, scores=None)


def measure(attend: Callable[[dict[str, Tensor]], Tensor], x: dict[str, Tensor]) -> float:
    """Milliseconds of CPU time of one forward and backward."""
    start = time.process_time()
    out = attend(x)
    out.backward(torch.ones_like(out))
    return (time.process_time() - start) * 1e3


def block_inputs(length: int) -> dict[str, Tensor]:
    """Random queries, keys, values and index of one sequence with grouped heads."""
    shapes = {
        "query": (1, length, 8, 64),
        "key": (1, length, 2, 64),
        "value": (1, length, 2, 64),
        "index_query": (1, length, 2, 32),
        "index_key": (1, length, 32),
    }
    return {name: torch.randn(shape).mul(0.1).requires_grad_() for name, shape in shapes.items()}


def dense_heads(x: dict[str, Tensor]) -> Tensor:
    """Attention of grouped heads to all keys."""
    return call_of(x)(x["query"], key=x["key"], value=x["value"])


def blocks(x: dict[str, Tensor], *, gathers: bool) -> Tensor:
    """Attention of grouped heads to four blocks of 64 keys."""
    index = BlockIndex(
        x["index_query"], x["index_key"], size=64, topk=4, num_local=1, gathers=gathers
    )
    inputs = {"key": x["key"], "value": x["value"]}
    return attend_blocks(x["query"], **inputs, call=call_of(x), index=index, scores=None)


def planned(gpu: str, length: int, *, is_sparse: bool) -> float:
    """Milliseconds of forward and backward of the mixer of one layer, without recomputation."""
    words = f"+config=deepseek_v32 --seq-length {length} --max-position-embeddings {length}"
    words += " --fp8-format null --recompute-granularity null --mock-data"
    config = load(f"{words} --dsa-indexer-use-sparse-loss".split()).config
    engine = engine_of("nanotrain")
    times = OperatorTimes(scenario_of(config, 2048, gpu=gpu_of(gpu), engine=engine))
    sizes = times.sizes.at(3)
    kind = "dsa" if is_sparse else "mla"
    parts = times.parts(MIXERS[kind].operators(sizes))
    return 1e3 * sum(part.forward + part.dgrad + part.wgrad for part in parts)


def print_forms(
    draw: Callable[[int], dict[str, Tensor]],
    forms: Sequence[Callable[[dict[str, Tensor]], Tensor]],
    lengths: Sequence[int],
) -> None:
    """Measure and print a table of dense, masked and gathered attention."""
    print("| tokens | dense | masked | gathered | gathered / dense |\n|---:|---:|---:|---:|---:|")
    for length in lengths:
        x = draw(length)
        rounds = [[measure(form, x) for form in forms] for _ in range(ROUNDS)]
        best = [min(times) for times in zip(*rounds, strict=True)]
        row = " | ".join(f"{ms:.0f}" for ms in best)
        print(f"| {length:,} | {row} | {best[2] / best[0]:.2f} |", flush=True)


def main() -> None:
    """Measure, plan and print both tables."""
    torch.set_num_threads(1)
    if "--blocks" in sys.argv:
        print("8 heads, 2 of keys, 4 selected blocks of 64 keys, fp32; CPU milliseconds\n")
        forms = (dense_heads, partial(blocks, gathers=False), partial(blocks, gathers=True))
        print_forms(block_inputs, forms, BLOCK_LENGTHS)
        return
    print(f"{HEADS} heads, {TOPK} selected keys, fp32; CPU milliseconds\n")
    print_forms(inputs, (dense, masked, gathered), LENGTHS)
    print("\nplanned milliseconds of a layer of DeepSeek-V3.2 in bf16, tp 1\n")
    print(
        "| tokens | form | h100 dense | sparse | b200 dense | sparse |\n|---:|---|---:|---:|---:|---:|"
    )
    model_config = load(["+config=deepseek_v32", "--mock-data"]).config.model
    shape = ModelShape.of(model_config)
    for length in PLANNED_LENGTHS:
        cells = []
        for gpu in ("h100", "b200"):
            for is_sparse in (False, True):
                cells.append(f"{planned(gpu, length, is_sparse=is_sparse):,.0f}")
        form = "gathered" if gathers_keys(shape, length) else "masked"
        print(f"| {length:,} | {form} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
