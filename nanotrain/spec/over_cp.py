"""Bytes that convolutions and scans send over context-parallel ranks (parallel/cp).

halo        the tokens before each chunk, for a convolution
scan_sent   the states or the heads of a scan
"""

from math import lcm
from typing import NamedTuple

from nanotrain.spec.layer_sizes import FP32, LayerSizes
from nanotrain.spec.operators import Sent


class Heads(NamedTuple):
    """Heads of a tp rank."""

    number: int
    dim: int


def halo(s: LayerSizes, *, channels: int, kernel_size: int) -> tuple[Sent, ...]:
    """The tokens before both chunks of a rank, from and to its neighbours, and their gradients."""
    num_neighbours = 0
    if s.cp_index > 0:
        num_neighbours += 1
    if s.cp_index < s.cp - 1:
        num_neighbours += 1
    sent = num_neighbours * s.batch_size * (kernel_size - 1) * channels * s.itemsize
    return (Sent("p2p", sent, sent),)


def scan_sent(
    s: LayerSizes,
    *,
    keys: Heads,
    values: Heads,
    transition: int,
    num_decays: int = 1,
    output_itemsize: int | None = None,
) -> tuple[Sent, ...]:
    """What a scan sends (parallel/cp/linear_attention.py).

    Args:
        s: sizes of the layer.
        keys: heads of queries and keys.
        values: heads of values.
        transition: elements of the map of a state per head: 1, or the squared channels of a key.
        num_decays: decays of a token per head.
        output_itemsize: bytes per element of the output; None for those of the inputs.
    """
    if s.cp == 1:
        return ()
    if s.cp_comm_type == "a2a":
        query_key = 2 * lcm(keys.number, s.cp) * keys.dim
        value = values.number * values.dim
        per_token = (query_key + value) * s.itemsize
        per_token += (num_decays + 1) * values.number * FP32
        output_bytes = s.itemsize if output_itemsize is None else output_itemsize
        per_token += value * output_bytes
        sent = s.tokens * per_token * (s.cp - 1) // s.cp
        return (Sent("all_to_all", sent, sent),)
    elements = 2 * s.batch_size * values.number * (transition + keys.dim * values.dim)
    sent = (s.cp - 1) * elements * FP32
    return Sent("all_gather", sent, 0), Sent("reduce_scatter", 0, sent)
