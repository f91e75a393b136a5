"""`GatherOrder`: which buckets are all-gathered and freed when, by index; the plan counts what the run carries out.

    before the forward of unit i     all-gather i, start the next ones, free all others
    after it                         free i
    before the backward of unit i    all-gather i, start the previous ones, free all others
    before unit i is run again       all-gather i; keep what the backward that runs it again has gathered
    after the last                   free all

Only the parameters of the current unit and of those gathered ahead have storage. Weight gradients that are computed
later (W of a zero-bubble schedule) read no parameters. Without resharding after the forward a unit is kept until the
backwards of all microbatches that ran forward are complete, and the backward gathers nothing.

A backward that recomputes a group of layers first runs the group forward. Besides the running layer only the layer
whose backward waits, and the units that it has gathered ahead, stay gathered:

    group 1 2 3    backward 3: gather 3 | forward 1: gather 1 | forward 2: gather 2, free 1 | forward 3, backward 3
                   backward 2: gather 2, if it was not kept as the one ahead | backward 1: gather 1

Source: Zhao et al. 2023 (PyTorch FSDP), sections 3.2 and 3.3.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from nanotrain.parallel.dp.layout import BufferLayout
from nanotrain.parallel.dp.options import DataParallelOptions


@dataclass(frozen=True)
class GatherChange:
    """Buckets by index."""

    freed: tuple[int, ...]
    started: tuple[int, ...] = ()  # their all-gathers, in this order


class GatherOrder:
    """The gathered buckets of one buffer, while its units run one after another.

    Args:
        units: the buckets that each unit reads, in forward order; two units may read the same bucket.
        num_prefetched: units gathered ahead.
        reshards: free a unit after its forward and gather it again for its backward.
        blocks: of every bucket, the block of memory that it shares with others; empty where each has its own.
    """

    def __init__(
        self, units: Iterable[Sequence[int]], *, num_prefetched: int, reshards: bool = True, blocks: Sequence[str] = ()
    ) -> None:
        self.units = [tuple(unit) for unit in units]
        self._num_next, self._reshards, self._blocks = num_prefetched, reshards, blocks
        self._gathered: dict[int, None] = {}  # in the order in which they were gathered
        self._num_backwards: Counter[int] = Counter()  # by bucket: backwards that are still to read it
        self._last_backward = 0  # the unit whose backward began last
        self._keeps_all = False  # between `gather_all` and `free_all`

    @classmethod
    def of(cls, units: Iterable[Sequence[int]], layout: BufferLayout, *, options: DataParallelOptions) -> Self:
        """The order of the units of a buffer."""
        blocks = layout.gather_blocks(options.num_gather_blocks).places if options.num_gather_blocks else ()
        return cls(
            units,
            num_prefetched=options.num_prefetched_units,
            reshards=options.reshards_after_forward,
            blocks=[name for name, _ in blocks],
        )

    def begin_step(self) -> GatherChange:
        """Expect no backward of an earlier step."""
        self._num_backwards.clear()
        return self.free()

    def gather_all(self) -> tuple[int, ...]:
        """Keep every bucket gathered until `free_all`; returns all of them."""
        self._keeps_all = True
        self._gathered |= dict.fromkeys(bucket for unit in self.units for bucket in unit)
        return tuple(self._gathered)

    def free_all(self) -> GatherChange:
        """End what `gather_all` began."""
        self._keeps_all = False
        return self.free()

    def free(self, *, but: Collection[int] = ()) -> GatherChange:
        """Free all buckets except `but` and those that still wait for a backward."""
        if self._keeps_all:
            return GatherChange(())
        freed = tuple(bucket for bucket in self._gathered if bucket not in but and not self._num_backwards[bucket])
        for bucket in freed:
            del self._gathered[bucket]
        return GatherChange(freed)

    def before_forward(self, index: int) -> GatherChange:
        """Gather a unit for its forward."""
        return self._gather(index, ahead=range(index + 1, index + 1 + self._num_next))

    def after_forward(self, index: int, *, has_backward: bool) -> GatherChange:
        """Free a unit after its forward, unless a backward is to find it gathered."""
        if has_backward and not self._reshards:
            self._num_backwards.update(self.units[index])
        return self.free(but=self._of(range(index + 1, index + 1 + self._num_next)))

    def before_backward(self, index: int) -> GatherChange:
        """Gather a unit for its backward."""
        self._last_backward = index
        if not self._reshards:
            self._num_backwards.subtract(self.units[index])
        return self._gather(index, ahead=range(index - self._num_next, index))

    def before_recomputation(self, index: int) -> GatherChange:
        """Gather a unit that runs again inside a backward."""
        last, current = self._last_backward, self.units[index]
        num_ahead = self._num_next if index == last else 0
        # A unit that shares its block with the current one is recomputed later, and gathered again then.
        in_use = [
            bucket
            for bucket in self._of(range(last - num_ahead, last + 1))
            if bucket in self._gathered and not self._is_excluded(bucket, current)
        ]
        return GatherChange(self.free(but=(*current, *in_use)).freed, self._start(current))

    def _gather(self, index: int, *, ahead: range) -> GatherChange:
        wanted = (*self.units[index], *self._of(ahead))
        return GatherChange(self.free(but=wanted).freed, self._start(wanted))

    def _start(self, buckets: Iterable[int]) -> tuple[int, ...]:
        started = tuple(bucket for bucket in dict.fromkeys(buckets) if bucket not in self._gathered)
        self._gathered |= dict.fromkeys(started)
        return started

    def _of(self, indices: range) -> list[int]:
        return [bucket for index in indices if 0 <= index < len(self.units) for bucket in self.units[index]]

    def _is_excluded(self, bucket: int, current: Sequence[int]) -> bool:
        """Whether a bucket lies in the memory of the unit that is to be gathered."""
        return bool(self._blocks) and any(self._blocks[bucket] == self._blocks[other] for other in current)
