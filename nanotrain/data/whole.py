"""A split read once from end to end, for `--full-validation`."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from nanotrain.data.batch import JoinedDatasets, Sample, SampleDataset


@dataclass(frozen=True)
class WholeSplit:
    """Every sample of the corpora once, whatever their weights in a blend.

    An index behind the last sample is a fully masked one: a global batch may pass the end.
    """

    datasets: tuple[SampleDataset, ...]

    @classmethod
    def of(cls, samples: SampleDataset) -> Self:
        """The corpora of a split, one after another."""
        parts: Iterable[SampleDataset] = [samples]
        if isinstance(samples, JoinedDatasets):
            parts = samples.datasets
        return cls(tuple(parts))

    @property
    def samples_per_epoch(self) -> int:
        """The samples of all corpora."""
        return sum(dataset.samples_per_epoch for dataset in self.datasets)

    def __getitem__(self, index: int) -> Sample:
        """Sample `index` >= 0."""
        for dataset in self.datasets:
            if index < dataset.samples_per_epoch:
                return dataset[index]
            index -= dataset.samples_per_epoch
        sample = self.datasets[0][0]
        return replace(sample, loss_mask=np.zeros_like(sample.loss_mask))
