"""Bytes and calls that this rank sends, per group and operation.

Counted by the textbook formula of the executed collective in a group of d ranks: reduce-scatter and all-gather send
(d-1)/d of the full tensor, an all-reduce twice that. A broadcast counts (d-1)/d on every rank, the mean over the ranks.
Groups of one rank send nothing and are not counted, nor are Python objects.
"""

from collections import defaultdict
from dataclasses import dataclass


@dataclass
class _Entry:
    calls: int = 0
    num_bytes: int = 0


class TrafficCounter:
    """Bytes and calls that this rank has sent since the last reset, per group and operation."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], _Entry] = defaultdict(_Entry)

    def record(self, group: str, op: str, *, num_bytes: int) -> None:
        """Count one call.

        Args:
            group: name of the group.
            op: name of the operation ("reduce_scatter").
            num_bytes: bytes sent by this rank.
        """
        entry = self._entries[group, op]
        entry.calls += 1
        entry.num_bytes += num_bytes

    def bytes(self, group: str | None = None, op: str | None = None) -> int:
        """Bytes sent over `group` by `op`; None means all.

        >>> traffic = TrafficCounter()
        >>> traffic.record("dp", "all_gather", num_bytes=96)
        >>> traffic.record("tp", "all_reduce", num_bytes=64)
        >>> traffic.bytes(), traffic.bytes("tp"), traffic.bytes(op="all_gather")
        (160, 64, 96)
        """
        return sum(entry.num_bytes for entry in self._matching(group, op))

    def calls(self, group: str | None = None, op: str | None = None) -> int:
        """Calls of `op` over `group`; None means all."""
        return sum(entry.calls for entry in self._matching(group, op))

    def reset(self) -> None:
        """Set all counts to zero."""
        self._entries.clear()

    def _matching(self, group: str | None, op: str | None) -> list[_Entry]:
        return [
            entry
            for (entry_group, entry_op), entry in self._entries.items()
            if group in (None, entry_group) and op in (None, entry_op)
        ]


def reduced_bytes(full_bytes: int, size: int) -> int:
    """Bytes one rank sends in a reduce-scatter, an all-gather or (on average) a broadcast of `full_bytes`.

    >>> reduced_bytes(4096, 4)
    3072
    """
    return full_bytes * (size - 1) // size
