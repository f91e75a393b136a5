"""The partner of each rank: a rank of another host, in another rack where racks are known.

ranks ordered by rack, host, number     a0 a1 | b0 b1 | c0 c1
each with the one half a world further  a0 b1, a1 c0, b0 c1
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """The machine of a rank."""

    name: str
    rack: str = ""  # "" where racks are unknown


def plan_partners(hosts: Sequence[Host]) -> tuple[int | None, ...]:
    """The partner of every rank, which keeps a copy of its state.

    As many partners are in other racks as an order by racks permits. There are none on one host.

    Args:
        hosts: the host of each rank.

    >>> plan_partners([Host("a"), Host("a"), Host("b"), Host("b")])
    (2, 3, 0, 1)
    >>> plan_partners([Host("a"), Host("b"), Host("c")])
    (1, 0, 1)
    >>> plan_partners([Host("a"), Host("a")])
    (None, None)
    """
    order = sorted(range(len(hosts)), key=lambda rank: (hosts[rank].rack, hosts[rank].name, rank))
    half = len(order) // 2
    partners: list[int | None] = [None] * len(hosts)
    for index, rank in enumerate(order):
        opposite = index + half if index < half else index - half
        for candidate in (order[opposite], order[-1], order[0]):
            if hosts[candidate].name != hosts[rank].name:
                partners[rank] = candidate
                break
    return tuple(partners)
