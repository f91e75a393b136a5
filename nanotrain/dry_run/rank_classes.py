"""`RankClasses`: the ranks that run the same program, and the ranks that are run.

A class is the ranks of one pipeline rank and one context-parallel rank with equally many rows of
the vocabulary. Its first and last rank are run, and stand for all; in a small world all ranks are.
The shards of replicated parameters and of tied embeddings differ between data-parallel ranks, so
sums over tp and embed are compared between ranks of one of them.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from nanotrain.config.config import Config
from nanotrain.spec.shape import ModelShape
from nanotrain.topology.topology import Topology

MAX_ALL = 8  # ranks of a world that are all run
# with more context-parallel ranks the first, the last and one of the others are run
MAX_CP_CLASSES = 8


class RankClass(NamedTuple):
    """Properties that ranks of the same program have in common."""

    pp: int
    cp_kind: int  # context-parallel rank, or the rank that stands for it
    vocabulary_rows: int  # 0 in stages without embedding and head


class ClassBounds(NamedTuple):
    """The first and the last rank of a class, which are run for all."""

    first: int
    last: int


@dataclass(frozen=True)
class RankClasses:
    """The equivalence classes of the ranks of a run."""

    config: Config
    topology: Topology

    @cached_property
    def _classes(self) -> list[RankClass]:
        """The class of every rank."""
        classes = []
        for rank in range(self.topology.world_size):
            coords = self.topology.dense.coords(rank)
            has_rows = coords["pp"] in self.topology.end_ranks
            rows = self._rows_of_tp_rank[coords["tp"]] if has_rows else 0
            classes.append(RankClass(coords["pp"], self._cp_kind(coords["cp"]), rows))
        return classes

    @cached_property
    def _dp_ranks(self) -> list[int]:
        """The data-parallel index of every rank."""
        grid = self.topology.dense
        return [grid.coords(rank)["dp"] for rank in range(self.topology.world_size)]

    @cached_property
    def _rows_of_tp_rank(self) -> list[int]:
        """Rows of the vocabulary of every tp rank, without padding."""
        shape = ModelShape.of(self.config.model)
        tp = self.topology.size("tp")
        rows = shape.padded_vocab_size // tp
        return [min(rows, max(0, shape.vocab_size - index * rows)) for index in range(tp)]

    def _cp_kind(self, cp_rank: int) -> int:
        """The context-parallel rank that stands for another one."""
        size = self.topology.size("cp")
        if size <= MAX_CP_CLASSES or cp_rank == size - 1:
            return cp_rank
        return min(cp_rank, 1)

    @cached_property
    def bounds(self) -> dict[RankClass, ClassBounds]:
        """The first and the last rank of every class."""
        bounds: dict[RankClass, ClassBounds] = {}
        for rank, rank_class in enumerate(self._classes):
            first = bounds[rank_class].first if rank_class in bounds else rank
            bounds[rank_class] = ClassBounds(first, rank)
        return bounds

    @property
    def first_ranks(self) -> list[int]:
        """The first ranks of all classes."""
        return [bounds.first for bounds in self.bounds.values()]

    @property
    def other_ranks(self) -> list[int]:
        """The last ranks of all classes, or in a small world all others."""
        firsts = self.first_ranks
        lasts = [bounds.last for bounds in self.bounds.values()]
        num_ranks = self.topology.world_size
        others = range(num_ranks) if num_ranks <= MAX_ALL else lasts
        return [rank for rank in others if rank not in firsts]

    def stand_in(self, rank: int) -> int:
        """The rank that is run in place of a rank.

        In a small world it is the rank itself, else the first or the last rank of its class: the
        one with the same data-parallel rank, if there is one.
        """
        if self.topology.world_size <= MAX_ALL:
            return rank
        first, last = self.bounds[self._classes[rank]]
        dp = self._dp_ranks[rank]
        is_of_last = self._dp_ranks[last] == dp and self._dp_ranks[first] != dp
        return last if rank == last or is_of_last else first
