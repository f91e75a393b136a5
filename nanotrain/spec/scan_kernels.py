"""What the kernels of a scan cost, from what each reads and writes.

    KernelTerms     tensors that one kernel reads and writes, and its products
    read_kernels    kernels of forward and backward by rule and by row of attention/scan_kernels.py
    kernel_costs    their FLOPs, bytes, launches and steps

Counted from the arguments of the kernels (scan_kernels.yaml): each tensor once per kernel, so
blocks of columns that read the same keys read them from the cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

from nanotrain.config.tables import read_table
from nanotrain.spec.layer_sizes import FP32
from nanotrain.spec.operators import ScanCost, ScanPasses
from nanotrain.spec.scan_cost import ScanSizes

VALUE_BLOCK = 64  # columns of a state that a program walks along
MAMBA_CHUNK = 256  # tokens of a chunk of mamba_ssm


@dataclass(frozen=True, kw_only=True)
class KernelTerms:
    """Tensors that a kernel reads and writes, and its FLOPs per token and head."""

    vectors: int = 0  # queries or keys, per group
    channels: int = 0  # channels of keys, per head of values
    values: int = 0
    wide_values: int = 0  # in fp32
    pairs: int = 0  # tokens of a chunk, per head of values
    group_pairs: int = 0  # tokens of a chunk, per group
    states: int = 0  # states of the chunks
    decays: int = 0  # in fp32
    state_flops: int = 0  # times K V
    value_flops: int = 0  # times C V
    key_flops: int = 0  # times C K
    chunk_flops: int = 0  # times C C
    walks: bool = False  # from chunk to chunk
    launches: int = 1


@cache
def read_kernels() -> Mapping[str, Any]:
    """The rows of scan_kernels.yaml by rule: fields of `KernelTerms` by kernels of a pass."""
    table: dict[str, Any] = read_table("scan_kernels", folder=Path(__file__).parent)
    return table


def kernel_costs(
    rule: str, sizes: ScanSizes, *, itemsize: int, batch: int
) -> dict[str, ScanPasses]:
    """Costs by row.

    Args:
        rule: "mamba2", "gated_delta_net" or "kda".
        sizes: heads and chunks.
        itemsize: bytes of an element of queries, keys and values.
        batch: sequences.
    """
    num_decays = sizes.key if rule == "kda" else 1
    costs: dict[str, ScanPasses] = {}
    for row, passes in read_kernels()[rule].items():
        chunked = sizes
        if row == "mamba_ssm":
            chunked = replace(sizes, chunk=MAMBA_CHUNK)
        counter = _Counter(chunked, itemsize=itemsize, batch=batch, num_decays=num_decays)
        forward = counter.costs(passes["forward"])
        backward = counter.costs(passes["backward"])
        costs[row] = ScanPasses(forward, backward)
    return costs


@dataclass(frozen=True)
class _Counter:
    """Sizes of a scan, of which kernels cost multiples."""

    sizes: ScanSizes
    itemsize: int
    batch: int
    num_decays: int  # per token and head

    def costs(self, kernels: Sequence[Mapping[str, Any]]) -> tuple[ScanCost, ...]:
        """Costs of kernels, one after the other."""
        return tuple(self._cost(KernelTerms(**terms)) for terms in kernels)

    def _cost(self, kernel: KernelTerms) -> ScanCost:
        """FLOPs, bytes and launches of one kernel."""
        sizes = self.sizes
        tokens = sizes.tokens
        flops = self._flops(kernel)
        num_bytes = self._num_bytes(kernel)
        rows = self.batch * sizes.heads
        blocks = ceil(sizes.value / VALUE_BLOCK)
        steps = sizes.num_chunks if kernel.walks else 0
        return ScanCost(
            flops=tokens * sizes.heads * flops,
            num_bytes=tokens * num_bytes,
            launches=kernel.launches,
            steps=steps,
            programs=rows * blocks,
        )

    def _flops(self, kernel: KernelTerms) -> int:
        """Per token and head."""
        sizes = self.sizes
        flops = kernel.state_flops * sizes.key * sizes.value
        flops += kernel.value_flops * sizes.chunk * sizes.value
        flops += kernel.key_flops * sizes.chunk * sizes.key
        return flops + kernel.chunk_flops * sizes.chunk**2

    def _num_bytes(self, kernel: KernelTerms) -> int:
        """Bytes per token."""
        sizes = self.sizes
        low = kernel.channels * sizes.key
        low += kernel.values * sizes.value
        low += kernel.pairs * sizes.chunk
        low += kernel.states * sizes.state
        group = kernel.vectors * sizes.key
        group += 2 * kernel.group_pairs * sizes.chunk
        wide = kernel.wide_values * sizes.value
        wide += kernel.decays * self.num_decays
        low_elements = sizes.heads * low
        low_elements += sizes.groups * group
        num_bytes = low_elements * self.itemsize
        return num_bytes + sizes.heads * wide * FP32
