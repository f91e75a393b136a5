"""What a started collective returns, and how its failure is told.

`Pending` keeps torch's Work handles alive until `wait`: on NCCL a dropped handle lets memory be reused while it is
still being read. `wait` on NCCL makes the current stream wait, not the host; on gloo it blocks the host.
`watch` turns a lost or late peer into an error that names the group and the rank.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.errors import EnvironmentFault


class Work:
    """A collective on its way; `wait` may be called any number of times.

    Args:
        op: name of the collective, for messages.
        group: whom it runs over; None for one that is finished.
        works: torch's handles.
        finish: what is left to do on this rank once all of them are through.
        keep: tensors that must outlive the transfer.
    """

    def __init__(
        self,
        op: str = "",
        group: Group | None = None,
        *,
        works: Sequence[dist.Work] = (),
        finish: Callable[[], None] | None = None,
        keep: Sequence[Tensor] = (),
    ) -> None:
        self._op, self._group, self._works, self._finish, self._keep = op, group, works, finish, keep
        self._failure: EnvironmentFault | None = None

    def wait(self) -> None:
        """Return once the results may be used on the current stream.

        Raises:
            EnvironmentFault: a member was lost or too late; every further `wait` raises it again.
        """
        if self._failure is not None:
            raise self._failure
        if self._group is None:
            return
        try:
            with watch(self._op, self._group):
                for work in self._works:
                    work.wait()
                if self._finish is not None:
                    self._finish()
        except EnvironmentFault as failure:
            self._failure = failure
            raise
        finally:
            self._group, self._works, self._finish, self._keep = None, (), None, ()


DONE = Work()


@contextmanager
def watch(op: str, group: Group) -> Iterator[None]:
    """Give torch's errors inside the block the names of the collective, the group and this rank."""
    try:
        yield
    except RuntimeError as error:
        place = f" ({group.place})" if group.place else ""
        members = ", ".join(map(str, group.ranks))
        raise EnvironmentFault(
            f"{op} over group {group.name} (ranks {members}) failed on rank {group.rank}{place}",
            why=str(error).splitlines()[0],
            fix="look for the first error among these ranks; if one of them is only slow, "
            "raise --distributed-timeout-minutes",
        ) from error
