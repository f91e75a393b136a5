"""Attention inside documents and windows: tiles beside a dense mask, forward and backward on one
thread.

    python benchmarks/attention.py

Both sides run in turn in one process; the table shows the least CPU time of each and their ratio.
"""

import time

import torch

from nanotrain.attention.call import TileKernel
from nanotrain.attention.sdpa import DenseKernel, LayerKernels, SDPAttention

LENGTH, HEADS, GROUPS, HEAD_DIM, ROUNDS = 2048, 8, 2, 64, 4
CASES = {
    "documents of 512": (512, None),
    "documents of 64": (64, None),
    "window of 512": (LENGTH, 512),
}
CORES = {
    "dense mask": SDPAttention(LayerKernels(DenseKernel(), DenseKernel())),
    "tiles": SDPAttention(LayerKernels(TileKernel(), TileKernel())),
}


def cpu_ms(core: SDPAttention, *, dtype: torch.dtype, document: int, window: int | None) -> float:
    """Milliseconds of CPU time of one forward and backward."""
    query, key, value = (
        torch.randn(1, LENGTH, heads, HEAD_DIM, dtype=dtype, requires_grad=True)
        for heads in (HEADS, GROUPS, GROUPS)
    )
    ids = torch.arange(LENGTH)[None] // document
    start = time.process_time()
    mask = core.plan_mask(ids, tokens=query[..., 0, 0], window=window)
    out = core(query, key=key, value=value, mask=mask, scores=None)
    out.backward(torch.ones_like(out))
    return (time.process_time() - start) * 1e3


def main() -> None:
    """Measure and print the table."""
    torch.set_num_threads(1)
    print(
        f"{LENGTH} tokens, {HEADS} query and {GROUPS} key/value heads of {HEAD_DIM}; CPU milliseconds\n"
    )
    print("| | dtype | dense mask | tiles | ratio |\n|---|---|---:|---:|---:|")
    for name, (document, window) in CASES.items():
        for dtype in (torch.float32, torch.bfloat16):
            rounds = [
                {
                    side: cpu_ms(core, dtype=dtype, document=document, window=window)
                    for side, core in CORES.items()
                }
                for _ in range(ROUNDS)
            ]
            dense, tiles = (min(times[side] for times in rounds) for side in CORES)
            print(f"| {name} | {dtype} | {dense:.0f} | {tiles:.0f} | {tiles / dense:.2f} |")


if __name__ == "__main__":
    main()
