"""Bytes that operators send over context-parallel ranks (parallel/cp).

halo              the tokens before each chunk, for a convolution
scan_sent         the states or the heads of a scan
all_gather_sent   an all-gather, and the reduce-scatter of the gradients
all_to_all_sent   an all-to-all, and the same of the gradients
"""

from math import lcm

from nanotrain.spec.layer_sizes import FP32, LayerSizes
from nanotrain.spec.operators import Sent
from nanotrain.spec.scan_cost import ScanSizes


def halo(s: LayerSizes, *, channels: int, kernel_size: int) -> tuple[Sent, ...]:
    """Traffic of the tokens before each of a rank's two chunks, which other ranks hold."""
    num_neighbours = 0
    if s.cp_index > 0:
        num_neighbours += 1
    if s.cp_index < s.cp - 1:
        num_neighbours += 1
    sent = num_neighbours * s.batch_size * (kernel_size - 1) * channels * s.itemsize
    return (Sent("p2p", sent, sent),)


def all_gather_sent(num_bytes: int) -> tuple[Sent, ...]:
    """An all-gather in the forward, and the reduce-scatter of the gradients."""
    return Sent("all_gather", num_bytes, 0), Sent("reduce_scatter", 0, num_bytes)


def all_to_all_sent(num_bytes: int) -> tuple[Sent, ...]:
    """An all-to-all in the forward, and one of the gradients with as many bytes."""
    return (Sent("all_to_all", num_bytes, num_bytes),)


def scan_sent(
    s: LayerSizes,
    sizes: ScanSizes,
    *,
    transition: int,
    num_decays: int = 1,
    output_itemsize: int | None = None,
) -> tuple[Sent, ...]:
    """The messages of a scan over cp (parallel/cp/linear_attention.py).

    Args:
        s: sizes of the layer.
        sizes: heads of the scan.
        transition: elements of the map of a state per head: 1, or the squared channels of a key.
        num_decays: decays of a token per head.
        output_itemsize: bytes per element of the output; None: as many as of the inputs.
    """
    if s.cp == 1:
        return ()
    if s.cp_comm_type != "a2a":
        state = sizes.key * sizes.value
        elements = 2 * s.batch_size * sizes.heads * (transition + state)
        return all_gather_sent((s.cp - 1) * elements * FP32)
    if output_itemsize is None:
        output_itemsize = s.itemsize
    query_key = 2 * lcm(sizes.groups, s.cp) * sizes.key
    value = sizes.heads * sizes.value
    decays = (num_decays + 1) * sizes.heads
    per_token = (query_key + value) * s.itemsize
    per_token += decays * FP32
    per_token += value * output_itemsize
    return all_to_all_sent(s.tokens * per_token * (s.cp - 1) // s.cp)
