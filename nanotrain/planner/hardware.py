"""GPUs and the links between them: rows of data/gpus.yaml.

GPU.node     inside an NVLink domain (NVLink, Infinity Fabric, PCIe)
   .network  between nodes

Bandwidths are per GPU and direction. Sizes are bytes, times are seconds.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from nanotrain.attention.scan_kernels import runs_chunk_scan
from nanotrain.config.suggest import nearest_choice
from nanotrain.config.tables import read_table
from nanotrain.errors import ConfigError

DATA = Path(__file__).parent / "data"
read_data = cache(partial(read_table, folder=DATA))
# the first compute capabilities of generations
HOPPER = (9, 0)
BLACKWELL = (10, 0)


@dataclass(frozen=True)
class Link:
    """One level of the interconnect."""

    bandwidth: float  # bytes/s per GPU and direction
    latency: float  # seconds of one step of a collective


@dataclass(frozen=True)
class Calibration:
    """Times of a machine relative to the times of its row, from measured runs (calibrate.py)."""

    compute: float = 1.0  # products, memory-bound operators and launches
    network: float = 1.0  # collectives


@dataclass(frozen=True, eq=False)
class GPU:
    """A GPU model in its usual server."""

    name: str
    capability: tuple[int, int] | None  # CUDA compute capability; None: no GPU of NVIDIA
    memory_bytes: int  # that a process can use
    peak_flops: Mapping[str, float]  # dense FLOP/s by dtype, from the data sheet
    reachable: Mapping[str, float]  # share of the peak that the largest products reach for long
    memory_bandwidth: float  # bytes/s, from the data sheet
    memory_efficiency: float  # share of the bandwidth that operators without reuse reach
    host_bandwidth: float  # bytes/s to or from the memory of its host
    gpus_per_node: int  # GPUs of an NVLink domain
    node: Link
    network: Link
    network_efficiency: float  # share of the network's bandwidth that collectives reach
    kernels: str  # GPU whose measured kernels shape the efficiencies
    collectives: str  # GPU whose measured collectives predict collectives inside a node
    is_mesh: bool  # GPUs of a node are linked pairwise, not by a switch
    is_cpu: bool  # cores of a processor, which launch what they compute
    calibration: Calibration = Calibration()  # factors of this machine
    # packages with kernels of scans, such as fla; None: the ones on this machine
    kernel_packages: frozenset[str] | None = None

    @property
    def has_scan_kernels(self) -> bool:
        """Whether this project's Triton kernels of scans run on it: Hopper and Blackwell."""
        return runs_chunk_scan(self.capability)

    @property
    def is_before_hopper(self) -> bool:
        """Whether it is a GPU of NVIDIA that is older than Hopper."""
        return self.capability is not None and self.capability < HOPPER

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s of a dtype.

        Raises:
            ConfigError: a dtype that the GPU has no matrix unit for.
        """
        if dtype not in self.peak_flops:
            near = next(name for name in ("fp8", "bf16", "fp16") if name in self.peak_flops)
            why = f"its matrix units compute in {', '.join(self.peak_flops)}"
            raise ConfigError(f"{self.name} has no {dtype} products", why=why, fix=f"use {near}")
        return self.peak_flops[dtype]


@cache
def gpus() -> dict[str, GPU]:
    """All rows by name."""
    table = read_data("gpus")
    defaults = table["defaults"]
    return {name: _build_gpu(name, defaults | row) for name, row in table["gpus"].items()}


def _build_gpu(name: str, row: Mapping[str, Any]) -> GPU:
    """The GPU of a row with the defaults filled in."""
    peak_flops = {dtype: float(tflops) * 1e12 for dtype, tflops in row["peak_tflops"].items()}
    reachable = dict.fromkeys(peak_flops, row["reachable"]["bf16"])
    reachable |= row["reachable"]
    node = _build_link(row["node"])
    network = _build_link(row["network"])
    kernels = row.get("kernels", name)
    collectives = row.get("collectives", kernels)
    return GPU(
        name=name,
        capability=_capability(row),
        memory_bytes=row["memory_bytes"],
        peak_flops=peak_flops,
        reachable=reachable,
        memory_bandwidth=row["memory_bandwidth"],
        memory_efficiency=row["memory_efficiency"],
        host_bandwidth=row["host_bandwidth"],
        gpus_per_node=row["gpus_per_node"],
        node=node,
        network=network,
        network_efficiency=row["network_efficiency"],
        kernels=kernels,
        collectives=collectives,
        is_mesh=row["is_mesh"],
        is_cpu=row["is_cpu"],
    )


def _capability(row: Mapping[str, Any]) -> tuple[int, int] | None:
    """The compute capability of a row; None for a GPU without one."""
    if "capability" not in row:
        return None
    major, minor = row["capability"]
    return major, minor


def _build_link(values: Sequence[float]) -> Link:
    bandwidth, latency = values
    return Link(float(bandwidth), float(latency))


@cache
def machine_of(gpu: GPU, link: Link | None = None) -> GPU:
    """The GPU with the measured speed of a machine.

    Args:
        gpu: a GPU with its calibration.
        link: the link between nodes as collectives reach it; None for the GPU's.
    """
    if link is not None:
        gpu = replace(gpu, network=link, network_efficiency=1.0)
    compute = gpu.calibration.compute
    return replace(
        gpu,
        peak_flops={dtype: peak / compute for dtype, peak in gpu.peak_flops.items()},
        memory_bandwidth=gpu.memory_bandwidth / compute,
        node=_slower_link(gpu.node, gpu.calibration.network),
        network=_slower_link(gpu.network, gpu.calibration.network),
    )


def _slower_link(link: Link, factor: float) -> Link:
    return Link(link.bandwidth / factor, link.latency * factor)


def gpu_of(name: str) -> GPU:
    """The GPU of a name as people and tools write it.

    >>> gpu_of("NVIDIA H100 80GB HBM3").name, gpu_of("A100 40 GB").name
    ('h100', 'a100-40gb')
    >>> gpu_of("H100").name, gpu_of("GB200 NVL72").name
    ('h100', 'gb200')

    Raises:
        ConfigError: an unknown name, with the nearest known one.
    """
    words = re.findall(r"[a-z]*\d+[a-z]*|[a-z]+", name.lower())
    rows = [row for row in gpus() if row.split("-")[0] in words]
    if not rows:
        near = _nearest_model(words)
        raise ConfigError(
            f"unknown GPU {name}",
            why=f"the planner has {', '.join(gpus())}",
            fix=f"did you mean {near}?" if near else "name the nearest of them",
        )
    for row in rows:
        variant = row.partition("-")[2]
        if variant in words or variant.removesuffix("gb") in words:
            return gpus()[row]
    return gpus()[rows[0]]


def _nearest_model(words: Sequence[str]) -> str | None:
    """The model whose name resembles a word; None if there is none."""
    models = dict.fromkeys(row.split("-")[0] for row in gpus())
    for word in words:
        near = nearest_choice(word, models)
        if near:
            return near
    return None
