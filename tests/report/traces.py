"""Traces as torch's profiler exports them, a few events long."""

import json
from pathlib import Path
from typing import Any

STEP = "ProfilerStep#"


def event(cat: str, name: str, start: float, end: float, **more: Any) -> dict[str, Any]:
    """A complete event, in microseconds."""
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 0,
        "tid": 7,
        "ts": start,
        "dur": end - start,
        **more,
    }


def write_trace(
    folder: Path, events: list[dict[str, Any]], *, rank: int = 0, last_step: int = 5
) -> Path:
    """A trace in the run folder, under the name that a run gives it."""
    (folder / "profile").mkdir(parents=True, exist_ok=True)
    path = folder / "profile" / f"step-{last_step:08d}-rank-{rank:05d}.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    return path


def gpu_events() -> list[dict[str, Any]]:
    """Two steps of a GPU rank; times of step 5 from 1000 us.

    compute         0 -------- 400     500 --- 700
    communication        300 ------------- 600          800 - 900
    copies                                          720-740
    """
    host = [
        event("user_annotation", f"{STEP}4", 0, 900),
        # the host queues the step before the GPU runs it
        event("user_annotation", f"{STEP}5", 900, 1100),
        event("cpu_op", "aten::mm", 910, 930),
        event("cuda_runtime", "cudaLaunchKernel", 931, 932),
        event("user_annotation", "nccl:all_reduce", 940, 950),
        {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": 950},
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]
    device = [
        event("gpu_user_annotation", f"{STEP}4", 100, 990),
        event("gpu_user_annotation", f"{STEP}5", 1000, 1900),
        event("gpu_user_annotation", f"{STEP}5", 1300, 2000, tid=20),  # one of each stream
        event("kernel", "ampere_bf16_s16816gemm_bf16_128x128", 100, 990),
        event("kernel", "sm90_xmma_gemm_bf16bf16_bf16f32", 1000, 1250),
        event("kernel", "flash_fwd_kernel", 1250, 1400),
        event("kernel", "void at::native::vectorized_elementwise_kernel", 1500, 1700),
        event(
            "kernel",
            "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage)",
            1300,
            1600,
            tid=20,
        ),
        event(
            "kernel",
            "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)",
            1800,
            1900,
            tid=20,
        ),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1720, 1730),
        event("gpu_memset", "Memset (Device)", 1730, 1740),
    ]
    return host + device
