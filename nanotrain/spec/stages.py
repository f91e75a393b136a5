"""Pipeline stages: consecutive layers, the embedding on the first and the head on the last."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, Self


@dataclass(frozen=True)
class StageSpec:
    """Consecutive layers of a model."""

    index: int  # index of the stage in the pipeline
    first_layer: int  # first transformer block
    last_layer: int  # one past the last transformer block
    has_embedding: bool  # whether the stage embeds tokens
    has_head: bool  # whether the stage computes the loss

    @property
    def layers(self) -> range:
        """Indices of the stage's transformer blocks in the model."""
        return range(self.first_layer, self.last_layer)

    @classmethod
    def single(cls, num_layers: int) -> Self:
        """The only stage of a model without pipeline parallelism."""
        return cls(0, 0, num_layers, has_embedding=True, has_head=True)


def split_layers(
    num_layers: int,
    num_stages: int,
    *,
    first: int | None = None,
    last: int | None = None,
    stages_per_rank: int = 1,
    counted_ends: tuple[int, int] = (0, 0),
) -> tuple[StageSpec, ...]:
    """Split a model into stages of equal length, of which the first may have one more layer.

    The last stage also computes the head and the loss, so it never gets one of the additional
    layers.

    Args:
        num_layers: number of layers of the model.
        num_stages: number of stages of all pipeline ranks.
        first: layers of the first pipeline rank, which its virtual stages share evenly; None for an
            equal split.
        last: layers of the last one of several pipeline ranks. The stages of the other ranks share
            the rest.
        stages_per_rank: number of virtual stages per rank; stage s is on rank s % (num_stages /
            stages_per_rank).
        counted_ends: layers that embedding and head count as; only without `first` and `last`.

    >>> [(stage.first_layer, stage.last_layer) for stage in split_layers(5, 2)]
    [(0, 3), (3, 5)]
    >>> [len(stage.layers) for stage in split_layers(13, 4, first=4, last=2)]
    [4, 4, 3, 2]
    >>> [len(stage.layers) for stage in split_layers(34, 4, last=4, stages_per_rank=2)]
    [15, 2, 15, 2]
    >>> [len(stage.layers) for stage in split_layers(94, 4, counted_ends=(1, 1))]
    [23, 24, 24, 23]
    """
    if any(counted_ends):
        shares = even_shares(num_layers + sum(counted_ends), num_stages)
        shares[0] -= counted_ends[0]
        shares[-1] -= counted_ends[1]  # perhaps the same stage
        return stages_of_lengths(shares)
    num_ranks = num_stages // stages_per_rank
    length_of_rank = {}
    if last is not None:
        length_of_rank[num_ranks - 1] = last
    if first is not None:
        length_of_rank[0] = first
    assert num_layers >= num_stages, "checked by the rules of layouts"
    for length in length_of_rank.values():
        assert length % stages_per_rank == 0, "checked by the rules of layouts"
    num_between = num_stages - len(length_of_rank) * stages_per_rank
    between = _shares_between(num_layers - sum(length_of_rank.values()), num_between)
    lengths = []
    for index in range(num_stages):
        size = length_of_rank.get(index % num_ranks)
        lengths.append(next(between) if size is None else size // stages_per_rank)
    return stages_of_lengths(lengths)


def _shares_between(num_layers: int, num_stages: int) -> Iterator[int]:
    """Layers of the stages between the first and the last rank."""
    if num_stages == 0:
        assert num_layers == 0, "checked by the rules of layouts"
        return iter(())
    assert num_layers >= num_stages, "checked by the rules of layouts"
    return iter(even_shares(num_layers, num_stages))


def stages_of_lengths(lengths: Sequence[int]) -> tuple[StageSpec, ...]:
    """Stages with these numbers of layers, in order; a stage may have no layers.

    >>> [stage.layers for stage in stages_of_lengths((0, 2, 1))]
    [range(0, 0), range(0, 2), range(2, 3)]
    """
    stages = []
    first_layer = 0
    for index, length in enumerate(lengths):
        stage = StageSpec(
            index=index,
            first_layer=first_layer,
            last_layer=first_layer + length,
            has_embedding=index == 0,
            has_head=index == len(lengths) - 1,
        )
        stages.append(stage)
        first_layer = stage.last_layer
    return tuple(stages)


@lru_cache(maxsize=64)
def balanced_lengths(costs: tuple[int, ...], num_stages: int) -> tuple[int, ...]:
    """The number of layers of every stage, of which the most costly one costs the least.

    Args:
        costs: cost of every layer, at least as many as stages.
        num_stages: number of stages, of at least one layer each.

    >>> balanced_lengths((1, 1, 1, 1, 4, 1, 1), 3)
    (4, 1, 2)
    """
    sums = [0, *accumulate(costs)]
    # the best split of the first layers into the first stages, by the number of layers
    best = {0: _Split(0, ())}
    for stage in range(1, num_stages + 1):
        longer = {}
        for end in range(stage, len(sums)):
            longer[end] = min(_with_stage(best, sums, end=end))
        best = longer
    return best[len(costs)].lengths


class _Split(NamedTuple):
    """Lengths of the first stages."""

    highest_cost: int  # cost of the most expensive stage
    lengths: tuple[int, ...]


def _with_stage(best: Mapping[int, _Split], sums: Sequence[int], *, end: int) -> Iterator[_Split]:
    """The best splits of the layers before `end` into one stage more than the splits in `best`.

    `sums` are the costs of the first layers, by their number.
    """
    for start, split in best.items():
        if start < end:
            cost = max(split.highest_cost, sums[end] - sums[start])
            yield _Split(cost, (*split.lengths, end - start))


def even_shares(total: int, count: int) -> list[int]:
    """Split `total` into `count` shares that differ by at most one, larger shares first.

    >>> even_shares(8, 3)
    [3, 3, 2]
    """
    share, num_longer = divmod(total, count)
    return [share + 1] * num_longer + [share] * (count - num_longer)
