"""A blend keeps its proportions over every prefix and reads each dataset in order, without gaps."""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanotrain.data.batch import Sample
from nanotrain.data.blend import BlendedDataset, BlendIndex, locate, plan_blend

WEIGHTS = st.lists(
    st.fractions(min_value=Fraction(1, 1000), max_value=1000, max_denominator=1000), min_size=1, max_size=9
)


@settings(deadline=None, max_examples=50)
@given(weights=WEIGHTS)
def test_any_prefix_has_its_share_within_two_samples(weights: list[Fraction]) -> None:
    tree, total = plan_blend(weights), sum(weights)
    counts = [0] * len(weights)
    for number in range(300):
        drawn = locate(tree, number)
        assert drawn.sample == counts[drawn.dataset], "a dataset is read in order, without gaps or repeats"
        counts[drawn.dataset] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - (number + 1) * weight / total) <= 2


@settings(deadline=None)
@given(weights=WEIGHTS, number=st.integers(10**18, 10**19))
def test_nothing_drifts_after_a_quintillion_samples(weights: list[Fraction], number: int) -> None:
    drawn = locate(plan_blend(weights), number)
    assert abs(drawn.sample - number * weights[drawn.dataset] / sum(weights)) <= 2


def test_a_blend_of_one_is_that_corpus() -> None:
    assert locate(plan_blend([Fraction(3)]), 17) == BlendIndex(0, 17)


@dataclass(frozen=True)
class _Numbers:
    corpus: int
    samples_per_epoch: int

    def __getitem__(self, sample_number: int) -> Sample:
        ids = np.array([self.corpus, sample_number])
        return Sample(ids, ids, loss_mask=np.ones(2, dtype=np.float32))


@pytest.mark.parametrize("number", [0, 1, 99, 12345])
def test_blended_samples_come_from_the_drawn_corpus(number: int) -> None:
    weights = [Fraction(7, 10), Fraction(3, 10)]
    blend = BlendedDataset([_Numbers(0, 10), _Numbers(1, 20)], weights)
    drawn = locate(plan_blend(weights), number)
    assert blend.samples_per_epoch == 30
    assert blend[number].tokens.tolist() == [drawn.dataset, drawn.sample]
