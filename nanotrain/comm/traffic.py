"""Bytes and calls that this rank sends, per group and operation.

Counted by the textbook formula of the executed collective in a group of d ranks: reduce-scatter and all-gather send
(d-1)/d of the full tensor, an all-reduce twice that.
Groups of one rank send nothing and are not counted, nor are Python objects.
"""

from collections import Counter


class TrafficCounter:
    """Bytes and calls that this rank has sent since the last reset, per group and operation."""

    def __init__(self) -> None:
        self._bytes: Counter[tuple[str, str]] = Counter()
        self._calls: Counter[tuple[str, str]] = Counter()

    def record(self, group: str, op: str, *, num_bytes: int) -> None:
        """Count one call of an operation ("reduce_scatter") over a group, and the bytes sent by this rank."""
        self._bytes[group, op] += num_bytes
        self._calls[group, op] += 1

    def bytes(self, group: str | None = None, op: str | None = None) -> int:
        """Bytes sent over `group` by `op`; None means all.

        >>> traffic = TrafficCounter()
        >>> traffic.record("dp", "all_gather", num_bytes=96)
        >>> traffic.record("tp", "all_reduce", num_bytes=64)
        >>> traffic.bytes(), traffic.bytes("tp"), traffic.bytes(op="all_gather")
        (160, 64, 96)
        """
        return _total(self._bytes, group=group, op=op)

    def calls(self, group: str | None = None, op: str | None = None) -> int:
        """Calls of `op` over `group`; None means all."""
        return _total(self._calls, group=group, op=op)

    def reset(self) -> None:
        """Set all counts to zero."""
        self._bytes.clear()
        self._calls.clear()


def _total(counts: Counter[tuple[str, str]], *, group: str | None, op: str | None) -> int:
    return sum(count for (over, name), count in counts.items() if group in (None, over) and op in (None, name))


def reduced_bytes(full_bytes: int, size: int) -> int:
    """Bytes one rank sends in a reduce-scatter or an all-gather of `full_bytes`.

    >>> reduced_bytes(4096, 4)
    3072
    """
    return full_bytes * (size - 1) // size
