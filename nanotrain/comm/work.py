"""`Work`, the handle of an asynchronous operation, and the translation of torch's errors.

Until `wait`, a `Work` keeps torch's handles and every tensor that is read or written alive: memory
that is freed earlier may be allocated again while a transfer on another stream still uses it.
`comm/recorder.py` checks this. On NCCL `wait` makes the current stream wait, not the host; on gloo
it blocks the host.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from nanotrain.comm.group import Group
from nanotrain.errors import EnvironmentFault
from nanotrain.quantities import ranks_text

T = TypeVar("T")
U = TypeVar("U")


class CommunicationFault(EnvironmentFault):
    """A collective that failed: a rank was lost, or did not take part in time."""


class Work(Generic[T]):
    """An asynchronous operation; `wait` returns its result and may be called any number of times.

    Args:
        finish: computes the result on this rank, once, after all handles are complete.
        op: name of the collective, for error messages.
        group: the group it runs over, for error messages; None if nothing is sent.
        handles: torch's handles.
        keep: all tensors that the transfer reads or writes.
        peer: global rank that sends the message; None for a collective.
    """

    def __init__(
        self,
        finish: Callable[[], T],
        *,
        op: str = "",
        group: Group | None = None,
        handles: Sequence[dist.Work] = (),
        keep: Sequence[Any] = (),
        peer: int | None = None,
    ) -> None:
        self._finish: Callable[[], T] | None = finish
        self._op = op
        self._group = group
        self._handles = handles
        self._keep = keep  # tensors that must live until the collective is complete
        self._peer = peer
        self._sequence = group.heartbeat.sequence(group.name) if group else 0
        self._result: T
        self._failure: EnvironmentFault | None = None

    @classmethod
    def completed(cls, result: T) -> "Work[T]":
        """A handle that is complete.

        >>> Work.completed(3).wait()
        3
        """
        return cls(lambda: result)

    def then(self, convert: Callable[[T], U]) -> "Work[U]":
        """A handle that waits for this one and returns `convert(result)`; `convert` runs once.

        >>> Work.completed(3).then(str).wait()
        '3'
        """
        return Work(lambda: convert(self.wait()))

    def wait(self) -> T:
        """Return the result, valid on the current stream.

        Raises:
            CommunicationFault: a rank of the group was lost or timed out; further calls raise it
                again.
        """
        if self._failure is not None:
            raise self._failure
        if self._finish is None:
            return self._result
        try:
            if self._group is None:  # nothing is sent, as over a group of one rank
                self._result = self._finish()
            else:
                with waiting(self._op, self._group, sequence=self._sequence, peer=self._peer):
                    for handle in self._handles:
                        self._group.wait(handle)
                    self._result = self._finish()
        except EnvironmentFault as failure:
            self._failure = failure
            raise
        finally:
            self._finish = None
            self._group = None
            self._handles = ()
            self._keep = ()
        return self._result


@contextmanager
def waiting(op: str, group: Group, *, sequence: int, peer: int | None = None) -> Iterator[None]:
    """Record that this rank waits for a collective inside the block, and translate its errors."""
    group.heartbeat.wait_begins(group.name, op, sequence=sequence, peer=peer)
    with translate_errors(op, group, sequence=sequence):
        yield
    group.heartbeat.wait_ended()


@contextmanager
def translate_errors(op: str, group: Group, *, sequence: int | None = None) -> Iterator[None]:
    """Raise torch's errors inside the block as `CommunicationFault`.

    Args:
        op: name of the collective.
        group: the group it runs over.
        sequence: number of the collective in the group, counted by this rank; None for the newest.
    """
    try:
        yield
    except RuntimeError as error:
        sequence_number = group.heartbeat.sequence(group.name) if sequence is None else sequence
        size = group.heartbeat.num_bytes(group.name, sequence_number)
        sent = "" if size is None else f" of {size:,} bytes"
        coords = f" ({group.coords_text})" if group.coords_text else ""
        ranks = ranks_text(group.ranks, most=8)
        raise CommunicationFault(
            f"{op} #{sequence_number}{sent} over group {group.name} (ranks {ranks}) "
            f"failed on rank {group.rank}{coords}",
            why=str(error).splitlines()[0],
            fix="look for the first error among these ranks; if one of them is only slow, "
            "raise --distributed-timeout-minutes or --distributed-timeout-seconds-after-init",
        ) from error
