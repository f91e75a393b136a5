"""GPUs and the links between them: rows of data/gpus.yaml.

GPU.node     inside an NVLink domain (NVLink, Infinity Fabric, PCIe)
   .network  between nodes

Bandwidths are per GPU and direction. Sizes are bytes, times are seconds.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from nanotrain.config.suggest import nearest_choice
from nanotrain.config.tables import read_table
from nanotrain.errors import ConfigError

DATA = Path(__file__).parent / "data"
read_data = cache(partial(read_table, folder=DATA))


@dataclass(frozen=True)
class Link:
    """One level of the interconnect."""

    bandwidth: float  # bytes/s per GPU and direction
    latency: float  # seconds of one step of a collective


@dataclass(frozen=True)
class Calibration:
    """Times of a machine relative to those of its row, from measured runs (calibrate.py)."""

    compute: float = 1.0  # of products, memory-bound operators and launches
    network: float = 1.0  # of collectives


@dataclass(frozen=True, eq=False)
class GPU:
    """A GPU model in its usual server."""

    name: str
    memory_bytes: int  # that a process can use
    peak_flops: Mapping[str, float]  # dense FLOP/s by dtype, from the data sheet
    reachable: Mapping[str, float]  # share of the peak that the largest products reach for long
    memory_bandwidth: float  # bytes/s, from the data sheet
    memory_efficiency: float  # share of it that operators without reuse reach
    host_bandwidth: float  # bytes/s to or from the memory of its host
    gpus_per_node: int  # of an NVLink domain
    node: Link
    network: Link
    network_efficiency: float  # share of the network's bandwidth that collectives reach
    kernels: str  # GPU whose measured kernels shape the efficiencies
    collectives: str  # GPU whose measured collectives shape those inside a node
    is_mesh: bool  # GPUs of a node are linked pairwise, not by a switch
    is_cpu: bool  # cores of a processor, which launch what they compute
    calibration: Calibration = Calibration()  # of this machine

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s of a dtype.

        Raises:
            ConfigError: a dtype that the GPU has no matrix unit for.
        """
        if dtype not in self.peak_flops:
            near = next(each for each in ("fp8", "bf16", "fp16") if each in self.peak_flops)
            why = f"its matrix units compute in {', '.join(self.peak_flops)}"
            raise ConfigError(f"{self.name} has no {dtype} products", why=why, fix=f"use {near}")
        return self.peak_flops[dtype]


@cache
def gpus() -> dict[str, GPU]:
    """All rows by name."""
    table = read_data("gpus")
    return {name: _gpu(name, **table["defaults"] | row) for name, row in table["gpus"].items()}


def _gpu(name: str, **row: Any) -> GPU:
    row = {"kernels": name, "collectives": row.get("kernels", name)} | row
    row |= {level: Link(*map(float, row[level])) for level in ("node", "network")}
    peaks = {dtype: float(tflops) * 1e12 for dtype, tflops in row.pop("peak_tflops").items()}
    reachable = dict.fromkeys(peaks, row["reachable"]["bf16"]) | row["reachable"]
    del row["source"]
    return GPU(**row | {"name": name, "peak_flops": peaks, "reachable": reachable})


@cache
def machine_of(gpu: GPU, link: Link | None = None) -> GPU:
    """The GPU whose operators and collectives take as long as on the machine that was measured.

    Args:
        gpu: a GPU with its calibration.
        link: the link between nodes as collectives reach it; None for that of the GPU.
    """
    gpu = replace(gpu, network=link, network_efficiency=1.0) if link else gpu
    compute, slower = gpu.calibration.compute, gpu.calibration.network
    node, network = (
        Link(link.bandwidth / slower, link.latency * slower) for link in (gpu.node, gpu.network)
    )
    peaks, bandwidth = (
        {dtype: peak / compute for dtype, peak in gpu.peak_flops.items()},
        gpu.memory_bandwidth / compute,
    )
    return replace(gpu, peak_flops=peaks, memory_bandwidth=bandwidth, node=node, network=network)


def gpu_of(name: str) -> GPU:
    """The GPU of a name as people and tools write it.

    >>> [gpu_of(name).name for name in ("H100", "NVIDIA H100 80GB HBM3", "A100 40 GB", "GB200 NVL72")]
    ['h100', 'h100', 'a100-40gb', 'gb200']

    Raises:
        ConfigError: an unknown name, with the nearest known one.
    """
    words = re.findall(r"[a-z]*\d+[a-z]*|[a-z]+", name.lower())
    rows = [row for row in gpus() if row.split("-")[0] in words]
    if not rows:
        models = dict.fromkeys(row.split("-")[0] for row in gpus())
        close = next((near for word in words if (near := nearest_choice(word, models))), None)
        fix = f"did you mean {close}?" if close else "name the nearest of them"
        raise ConfigError(
            f"unknown GPU {name}", why=f"the planner has {', '.join(gpus())}", fix=fix
        )
    variants = [
        row
        for row in rows
        if {variant := row.partition("-")[2], variant.removesuffix("gb")} & {*words}
    ]
    return gpus()[(variants or rows)[0]]
