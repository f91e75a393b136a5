"""What one attention layer sends per microbatch and rank, in closed form: pure, for plans and for tests.

AttentionShape   one layer on one rank
Sent             bytes of forward and backward
SENT_BYTES       by the value of --cp-comm-type
"""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionShape:
    """One attention layer as a rank of cp sees it.

    Args:
        positions: B * S / cp, the positions that the rank holds.
        heads: query heads on this tp rank.
        groups: key/value heads on this tp rank.
        width: of a query or key head.
        value_width: of a value head.
        itemsize: bytes of an activation's element.
    """

    positions: int
    heads: int
    groups: int
    width: int
    value_width: int
    itemsize: int

    @property
    def key_value_elements(self) -> int:
        """Elements of the keys and values that the rank holds."""
        return self.positions * self.groups * (self.width + self.value_width)


@dataclass(frozen=True)
class Sent:
    """Bytes that leave a rank."""

    forward: int
    backward: int


def all_gather_bytes(shape: AttentionShape, size: int) -> Sent:
    """Keys and values to every other rank; their gradients from every other rank.

    >>> all_gather_bytes(AttentionShape(1024, 32, 8, 128, 128, itemsize=2), 4)
    Sent(forward=12582912, backward=12582912)
    """
    hops = (size - 1) * shape.key_value_elements * shape.itemsize
    return Sent(hops, hops)


def ring_bytes(shape: AttentionShape, size: int) -> Sent:
    """Keys and values cp - 1 hops, in the backward again; their gradients cp hops, in fp32 or wider.

    >>> ring_bytes(AttentionShape(1024, 32, 8, 128, 128, itemsize=2), 4)
    Sent(forward=12582912, backward=46137344)
    """
    hops = (size - 1) * shape.key_value_elements * shape.itemsize
    return Sent(hops, hops + size * shape.key_value_elements * max(4, shape.itemsize))


def heads_bytes(shape: AttentionShape, size: int) -> Sent:
    """Queries, keys, values and outputs but for the part that stays; their gradients likewise.

    >>> heads_bytes(AttentionShape(1024, 32, 8, 128, 128, itemsize=2), 4)
    Sent(forward=15728640, backward=15728640)
    """
    groups = math.lcm(shape.groups, size)
    elements = shape.positions * (shape.heads + groups) * (shape.width + shape.value_width)
    traded = elements * shape.itemsize * (size - 1) // size
    return Sent(traded, traded)


SENT_BYTES: dict[str, Callable[[AttentionShape, int], Sent]] = {
    "allgather": all_gather_bytes,
    "p2p": ring_bytes,
    "a2a": heads_bytes,
}
