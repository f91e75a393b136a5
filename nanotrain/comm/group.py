"""A group: the ranks one part of the model talks to, as seen from this rank.

A layer, a buffer or an optimizer holds the one `Group` it speaks over and nothing else of the topology. A group of
one has no process group behind it: every collective answers it with its own input.
"""

from dataclasses import dataclass, field

import torch.distributed as dist

from nanotrain.comm.scratch import Scratch
from nanotrain.comm.traffic import TrafficCounter


@dataclass(frozen=True)
class Group:
    """Handle of one process group.

    Args:
        name: the axis or axes it spans, "dp_shard".
        ranks: global ranks of the members, ascending.
        index: this rank's place in `ranks`.
        process_group: torch's handle; None for a group of one.
        ledger: where sent bytes are booked.
        scratch: memory that collectives receive into, shared by the groups of a rank.
        place: this rank's coordinates for messages ("pp1 dp3 tp0"); empty in a job of one rank.
    """

    name: str
    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None = field(default=None, compare=False, repr=False)
    traffic: TrafficCounter = field(default_factory=TrafficCounter, compare=False, repr=False)
    scratch: Scratch = field(default_factory=Scratch, compare=False, repr=False)
    place: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        assert 0 <= self.index < len(self.ranks), "a rank only holds groups that it belongs to"
        assert self.process_group is not None or self.size == 1, "without a process group its collectives would not run"

    @classmethod
    def single_rank(cls, name: str, rank: int = 0) -> "Group":
        """The group of one rank, with a ledger of its own.

        >>> Group.single_rank("tp", rank=3).next
        3
        """
        return cls(name=name, ranks=(rank,), index=0)

    def release(self) -> None:
        """Let go of the process group, at the end of the job; collectives of a larger group then fail."""
        object.__setattr__(self, "process_group", None)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """This rank's number in the world."""
        return self.ranks[self.index]

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first member."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank is the last member."""
        return self.index == self.size - 1

    @property
    def next(self) -> int:
        """Global rank of the member after this one, the first one after the last."""
        return self.ranks[(self.index + 1) % self.size]

    @property
    def prev(self) -> int:
        """Global rank of the member before this one, the last one before the first."""
        return self.ranks[self.index - 1]
