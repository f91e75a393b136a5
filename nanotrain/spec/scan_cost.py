"""What the torch implementation of a scan costs, from counted multiples of its sizes.

attention/ssd.py and attention/delta_rule.py compute chunks of tokens in fp32 by eager operators.
tests/spec/kinds/test_scans.py counts these operators on the meta device.

    ScanSizes   heads and chunks of a scan
    PassTerms   counted multiples of forward or backward
    scan_cost   FLOPs, bytes and launches of a pass
"""

from dataclasses import dataclass

from nanotrain.spec.layer_sizes import FP32
from nanotrain.spec.operators import ScanCost


@dataclass(frozen=True)
class ScanSizes:
    """Heads and chunks of a scan on one rank."""

    tokens: int
    num_chunks: int  # of a sequence, one after the other
    chunk: int  # tokens of a chunk
    heads: int  # of values
    groups: int  # heads of queries and keys
    key: int  # channels of a key head
    value: int  # channels of a value head

    @property
    def state(self) -> int:
        """Elements of the states of a head, per token."""
        return self.key * self.value // self.chunk


@dataclass(frozen=True)
class Elements:
    """Elements in fp32 that operators read and write per token and head, as multiples of sizes."""

    chunk: int = 0
    key: int = 0
    value: int = 0
    state: int = 0

    def number(self, sizes: ScanSizes) -> int:
        """Elements of one token and head."""
        number = self.chunk * sizes.chunk
        number += self.key * sizes.key
        number += self.value * sizes.value
        return number + self.state * sizes.state


@dataclass(frozen=True)
class PassTerms:
    """Counted multiples of a pass."""

    launches: int
    launches_per_chunk: int
    head_elements: Elements
    state_flops: int  # per token and head, times K V
    value_flops: int  # per token and head, times C V
    key_flops: int = 0  # per token and head, times C K
    group_elements: Elements = Elements()
    group_flops: int = 0  # per token and group, times C K


def scan_cost(terms: PassTerms, sizes: ScanSizes) -> ScanCost:
    """FLOPs, bytes and launches of a pass."""
    head_flops = terms.state_flops * sizes.key * sizes.value
    head_flops += terms.value_flops * sizes.chunk * sizes.value
    head_flops += terms.key_flops * sizes.chunk * sizes.key
    group_flops = terms.group_flops * sizes.chunk * sizes.key
    flops = sizes.heads * head_flops + sizes.groups * group_flops
    elements = sizes.heads * terms.head_elements.number(sizes)
    elements += sizes.groups * terms.group_elements.number(sizes)
    launches = terms.launches
    launches += terms.launches_per_chunk * sizes.num_chunks
    return ScanCost(
        flops=sizes.tokens * flops,
        num_bytes=sizes.tokens * elements * FP32,
        launches=launches,
    )


def fused_scan_bytes(sizes: ScanSizes, *, itemsize: int) -> int:
    """Queries, keys, values and outputs, and the states of the chunks in fp32."""
    inputs = 2 * (sizes.groups * sizes.key + sizes.heads * sizes.value)
    states = 2 * sizes.heads * sizes.state
    return sizes.tokens * (inputs * itemsize + states * FP32)
