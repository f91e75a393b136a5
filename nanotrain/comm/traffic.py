"""What this rank sends: bytes and calls per (group, operation).

Counted by the textbook formula of what is executed, d being the group's size: reduce-scatter and all-gather send
(d-1)/d of the full tensor, an all-reduce twice that. A broadcast is booked on every rank with (d-1)/d, its mean over
the ranks. Groups of one send nothing and are not booked. Objects and barriers are control traffic and not counted.
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
        """Book one call.

        Args:
            group: name of the group it ran over.
            op: name of the operation ("reduce_scatter").
            num_bytes: bytes that left this rank.
        """
        entry = self._entries[group, op]
        entry.calls += 1
        entry.num_bytes += num_bytes

    def bytes(self, group: str | None = None, op: str | None = None) -> int:
        """Bytes sent over `group` by `op`; None stands for any.

        >>> traffic = TrafficCounter()
        >>> traffic.record("dp", "all_gather", num_bytes=96)
        >>> traffic.record("tp", "all_reduce", num_bytes=64)
        >>> traffic.bytes(), traffic.bytes("tp"), traffic.bytes(op="all_gather")
        (160, 64, 96)
        """
        return sum(entry.num_bytes for entry in self._chosen(group, op))

    def calls(self, group: str | None = None, op: str | None = None) -> int:
        """How often `op` ran over `group`; None stands for any."""
        return sum(entry.calls for entry in self._chosen(group, op))

    def reset(self) -> None:
        """Forget everything booked so far."""
        self._entries.clear()

    def _chosen(self, group: str | None, op: str | None) -> list[_Entry]:
        return [
            entry
            for (its_group, its_op), entry in self._entries.items()
            if group in (None, its_group) and op in (None, its_op)
        ]


def reduced_bytes(full_bytes: int, size: int) -> int:
    """Bytes one rank sends in a reduce-scatter, an all-gather or (on average) a broadcast of `full_bytes`.

    >>> reduced_bytes(4096, 4)
    3072
    """
    return full_bytes * (size - 1) // size
