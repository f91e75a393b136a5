"""A split read once from end to end."""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from nanotrain.data.batch import Sample
from nanotrain.data.blend import BlendedDataset
from nanotrain.data.whole import WholeSplit


@dataclass(frozen=True)
class Numbers:
    """Samples of one token, which is their number."""

    first: int
    samples_per_epoch: int

    def __getitem__(self, index: int) -> Sample:
        token = np.array([self.first + index % self.samples_per_epoch])
        return Sample(tokens=token, labels=token + 1, loss_mask=np.ones(1, dtype=np.float32))


def test_every_sample_of_a_blend_is_read_once_whatever_its_weight():
    parts = [Numbers(0, 3), Numbers(10, 2)]
    blend = BlendedDataset.by_weight(parts, [Fraction(9, 10), Fraction(1, 10)])
    whole = WholeSplit.of(blend)
    assert whole.samples_per_epoch == 5
    tokens = [int(whole[index].tokens[0]) for index in range(5)]
    assert tokens == [0, 1, 2, 10, 11]
    assert all(whole[index].loss_mask.all() for index in range(5))


def test_samples_behind_the_end_have_no_targets():
    whole = WholeSplit.of(Numbers(4, 2))
    for index in (2, 3, 100):
        sample = whole[index]
        assert sample.tokens.shape == (1,) and not sample.loss_mask.any()
    assert whole[1].loss_mask.all()
