"""Several datasets as one, mixed by weights that may change in stages.

Sample n maps to a dataset and an index in it by a pure function of n, without a table. The datasets
are the leaves of a binary tree. A node sends visit m to its left child exactly when round(m*p)
increases, where p is the left child's share of the weight. So round(m*p) of the first m visits go
left, and every leaf index follows from n:

                   n              weights 4 1 1 2
              p = 5/8
             /       \\
        p = 4/5     p = 1/3
         /   \\       /   \\
        4     1     1     2

The error of a node is at most 1/2 visit, and a child inherits only its share of it: of any n
samples a dataset of weight w gets n*w within 1/2 * depth.

Shares are exact fractions, so the error does not grow with n.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Self

import numpy as np

from nanotrain.data.batch import Sample, SampleDataset

# parts of a linear change of weights, whose weights are at most half a percent off
LINEAR_PARTS = 100


@dataclass(frozen=True)
class _Node:
    """An inner node of a binary tree whose leaves are indices of corpora."""

    share: Fraction  # weight of the left child over the weight of the node
    left: "_Node | int"
    right: "_Node | int"

    def visits_left(self, visits: int) -> int:
        """round(visits * share)."""
        share = self.share
        return (2 * visits * share.numerator + share.denominator) // (2 * share.denominator)


def plan_blend(weights: Sequence[Fraction], first: int = 0) -> "_Node | int":
    """The tree of a blend, for `locate`.

    Args:
        weights: one weight above 0 per dataset; they need not sum to 1.
        first: number of the first dataset.
    """
    if len(weights) == 1:
        return first
    middle = len(weights) // 2
    share = Fraction(sum(weights[:middle])) / sum(weights)
    left = plan_blend(weights[:middle], first)
    right = plan_blend(weights[middle:], first + middle)
    return _Node(share, left, right)


def locate(tree: "_Node | int", index: int) -> tuple[int, int]:
    """The dataset and sample index of sample `index` of the blend.

    >>> tree = plan_blend([Fraction(2), Fraction(1)])
    >>> [locate(tree, n)[0] for n in range(6)]
    [0, 1, 0, 0, 1, 0]
    """
    while isinstance(tree, _Node):
        num_left = tree.visits_left(index)
        if tree.visits_left(index + 1) > num_left:
            tree, index = tree.left, num_left
        else:
            tree, index = tree.right, index - num_left
    return tree, index


def count_visits(tree: "_Node | int", visits: int) -> dict[int, int]:
    """The number of the first `visits` samples that come from each dataset.

    >>> count_visits(plan_blend([Fraction(2), Fraction(1)]), 4)
    {0: 3, 1: 1}
    """
    if not isinstance(tree, _Node):
        return {tree: visits}
    num_left = tree.visits_left(visits)
    return count_visits(tree.left, num_left) | count_visits(tree.right, visits - num_left)


@dataclass(frozen=True)
class StageBlend:
    """The blend of one stage."""

    name: str  # empty for the only blend of a run
    start: int  # its first sample
    sources: tuple[int, ...]  # indices of the sources that it reads
    weights: tuple[Fraction, ...]  # above 0, one per source
    # the first sample with these weights, which change linearly from the stage before; None: at
    # once
    end: int | None = None

    def share_of(self, source: int) -> Fraction:
        """The fraction of the samples that come from a source."""
        if source not in self.sources:
            return Fraction(0)
        return Fraction(self.weights[self.sources.index(source)]) / sum(self.weights)


def _constant_parts(stages: Sequence[StageBlend]) -> Iterator[StageBlend]:
    """Stages of constant weights; a linear change becomes LINEAR_PARTS stages."""
    before: StageBlend | None = None
    for stage in stages:
        if stage.end is not None and before is not None:
            yield from _linear_parts(before, stage, end=stage.end)
            yield replace(stage, start=stage.end)
        else:
            yield stage
        before = stage


def _linear_parts(before: StageBlend, stage: StageBlend, *, end: int) -> Iterator[StageBlend]:
    """The parts of a linear change, each with the weights of its middle."""
    sources = tuple(sorted({*before.sources, *stage.sources}))
    length = end - stage.start
    for part in range(LINEAR_PARTS):
        first = stage.start + length * part // LINEAR_PARTS
        last = stage.start + length * (part + 1) // LINEAR_PARTS
        if first == last:
            continue
        done = Fraction(2 * part + 1, 2 * LINEAR_PARTS)
        weights = []
        for source in sources:
            old, new = before.share_of(source), stage.share_of(source)
            weights.append(old * (1 - done) + new * done)
        yield StageBlend(stage.name, first, sources, tuple(weights))


def _parts_from(parts: Sequence[StageBlend], first: int) -> tuple[StageBlend, ...]:
    """The parts of stages that hold samples from `first` on."""
    ends = [*(part.start for part in parts[1:]), None]
    kept = []
    for part, end in zip(parts, ends, strict=True):
        if end is None or end > first:
            kept.append(replace(part, start=max(part.start, first)))
    return tuple(kept)


class BlendedDataset:
    """Samples of several datasets, in proportions that may change at given samples.

        samples         0 ............... start 1 ............ start 2 ......
        blend           stage 0           stage 1              stage 2
        source a        0 1 2 ... 41      42 43 ... 60         (none)
        source b        (none)            0 1 2 ...            ...

    Every source continues where it stopped. The source of sample n, and its index there, follow
    from n, the weights and the starts alone, so a run resumes anywhere. The samples of a source in
    earlier stages are counted, not stored, so none is read again before its epoch ends.

    Args:
        datasets: the sources; each keeps its own epochs and order.
        stages: the blends, in order; the first starts at sample 0.
        first: the first sample that is read; the run has read other data before.
        read: samples of every source that were read before `first`; empty for none.
        loss_weights: weights of the sources in the loss; empty: as their samples.
    """

    def __init__(
        self,
        datasets: Sequence[SampleDataset],
        stages: Sequence[StageBlend],
        *,
        first: int = 0,
        read: Sequence[int] = (),
        loss_weights: Sequence[Fraction] = (),
    ) -> None:
        assert stages and stages[0].start == 0, "the first stage starts at sample 0"
        self.datasets = tuple(datasets)
        self.stages = tuple(stages)
        self.first = first
        self.loss_weights = tuple(loss_weights)
        self._parts = _parts_from(tuple(_constant_parts(stages)), first)
        self._starts = [part.start for part in self._parts]
        self._trees = [plan_blend(part.weights) for part in self._parts]
        # samples read in earlier stages, by stage and source
        self._read_before = [list(read) or [0] * len(self.datasets)]
        for end in self._starts[1:]:
            self._read_before.append(self._read_at(end))

    @classmethod
    def by_weight(cls, datasets: Sequence[SampleDataset], weights: Sequence[Fraction]) -> Self:
        """One blend of all datasets, in proportion to weights above 0."""
        sources = tuple(range(len(datasets)))
        return cls(datasets, [StageBlend("", 0, sources, tuple(weights))])

    def starting_at(self, bounds: Sequence[tuple[int, int | None]]) -> "BlendedDataset":
        """The blends with other stage bounds: first sample, and end of a linear change or None."""
        stages = []
        for stage, (start, end) in zip(self.stages, bounds, strict=True):
            stages.append(replace(stage, start=start, end=end))
        return self.with_stages(stages)

    def with_stages(self, stages: Sequence[StageBlend]) -> "BlendedDataset":
        """The same sources, read from the same sample on by other stages."""
        read = self._read_before[0]
        return BlendedDataset(
            self.datasets, stages, first=self.first, read=read, loss_weights=self.loss_weights
        )

    def with_loss_weights(self, weights: Sequence[Fraction]) -> "BlendedDataset":
        """The same samples with weights in the loss, above 0, one per source."""
        read = self._read_before[0]
        return BlendedDataset(
            self.datasets, self.stages, first=self.first, read=read, loss_weights=weights
        )

    def continued(self, first: int, read: Sequence[int]) -> "BlendedDataset":
        """The same blends, read from sample `first` on.

        Args:
            first: the first sample that is read.
            read: samples of every source that were read before.
        """
        return BlendedDataset(
            self.datasets, self.stages, first=first, read=read, loss_weights=self.loss_weights
        )

    @property
    def samples_per_epoch(self) -> int:
        """Sum over the sources; how often each has been read by then depends on its weights."""
        return sum(dataset.samples_per_epoch for dataset in self.datasets)

    def stage_at(self, index: int) -> StageBlend:
        """The stage of sample `index` >= 0."""
        return self._parts[self._stage_index(index)]

    def locate(self, index: int) -> tuple[int, int]:
        """The index of the source of sample `index` >= 0, and the sample index in that source."""
        stage_index = self._stage_index(index)
        stage = self._parts[stage_index]
        dataset, sample = locate(self._trees[stage_index], index - stage.start)
        source = stage.sources[dataset]
        return source, self._read_before[stage_index][source] + sample

    def read_by(self, index: int) -> list[int]:
        """Number of samples per source among the first `index` of the blend."""
        return self._read_at(index) if index > self.first else self._read_before[0]

    def __getitem__(self, index: int) -> Sample:
        """Sample `index` >= 0; indices continue after an epoch."""
        source, sample = self.locate(index)
        read = self.datasets[source][sample]
        if not self.loss_weights:
            return read
        factor = np.float32(self.loss_factor(source, index))
        return replace(read, loss_mask=read.loss_mask * factor)

    def loss_factor(self, source: int, index: int) -> float:
        """How often a target token of a source counts in the loss: its weight / its share.

        Args:
            source: index of the source.
            index: index of a sample of the blend, for its stage.
        """
        stage = self.stage_at(index)
        total = sum(self.loss_weights[other] for other in stage.sources)
        return float(self.loss_weights[source] / total / stage.share_of(source))

    def _stage_index(self, index: int) -> int:
        return bisect_right(self._starts, index) - 1

    def _read_at(self, end: int) -> list[int]:
        """The samples per source among the first `end`, which is above `first`."""
        stage_index = self._stage_index(end - 1)
        stage = self._parts[stage_index]
        read = list(self._read_before[stage_index])
        for dataset, count in count_visits(self._trees[stage_index], end - stage.start).items():
            read[stage.sources[dataset]] += count
        return read
