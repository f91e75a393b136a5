"""Blends that follow each other: a curriculum over one list of sources.

    samples         0 ............... start 1 ............ start 2 ......
    blend           stage 0           stage 1              stage 2
    source a        0 1 2 ... 41      42 43 ... 60         (none)          every source continues where it stopped
    source b        (none)            0 1 2 ...            ...

The source of sample n, and its index there, follow from n, the weights and the starts alone, so a run resumes anywhere.
The samples of a source in earlier stages are counted, not stored, so none is read again before its epoch ends.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from nanotrain.data.batch import Sample, SampleDataset
from nanotrain.data.blend import count_visits, locate, plan_blend


@dataclass(frozen=True)
class StageBlend:
    """The blend of one stage."""

    name: str
    start: int  # its first sample
    sources: tuple[int, ...]  # indices of the sources that it reads
    weights: tuple[Fraction, ...]  # above 0, one per source


class StagedDataset:
    """Samples of several sources, in proportions that change at given samples.

    Args:
        datasets: the sources.
        stages: their blends, in order; the first starts at sample 0.
    """

    def __init__(self, datasets: Sequence[SampleDataset], stages: Sequence[StageBlend]) -> None:
        assert stages and stages[0].start == 0, "the first stage starts at sample 0"
        self.datasets, self.stages = tuple(datasets), tuple(stages)
        self._starts = [stage.start for stage in stages]
        self._trees = [plan_blend(stage.weights) for stage in stages]
        self._read_before = [[0] * len(self.datasets)]  # by stage and source: samples read in earlier stages
        for stage, tree, end in zip(stages, self._trees, self._starts[1:], strict=False):
            read = list(self._read_before[-1])
            for place, count in count_visits(tree, end - stage.start).items():
                read[stage.sources[place]] += count
            self._read_before.append(read)

    def starting_at(self, starts: Sequence[int]) -> "StagedDataset":
        """The same blends with other first samples."""
        stages = [replace(stage, start=start) for stage, start in zip(self.stages, starts, strict=True)]
        return StagedDataset(self.datasets, stages)

    @property
    def samples_per_epoch(self) -> int:
        """Sum over the sources; how often each has been read by then depends on its weights."""
        return sum(dataset.samples_per_epoch for dataset in self.datasets)

    def stage_at(self, index: int) -> StageBlend:
        """The stage of sample `index` >= 0."""
        return self.stages[self._stage_index(index)]

    def locate(self, index: int) -> tuple[int, int]:
        """The source of sample `index` >= 0 and the sample index in it."""
        number = self._stage_index(index)
        stage = self.stages[number]
        found = locate(self._trees[number], index - stage.start)
        source = stage.sources[found.dataset]
        return source, self._read_before[number][source] + found.sample

    def source_of(self, index: int) -> int:
        """The source of sample `index` >= 0."""
        return self.locate(index)[0]

    def __getitem__(self, index: int) -> Sample:
        """Sample `index` >= 0; indices continue after an epoch."""
        source, sample = self.locate(index)
        return self.datasets[source][sample]

    def _stage_index(self, index: int) -> int:
        return bisect_right(self._starts, index) - 1
