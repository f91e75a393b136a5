"""The keyed permutation is a bijection for every size and key, and looks random."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nanotrain.data.permutation import Permutation

KEYS = st.integers(0, 2**64 - 1)


@settings(deadline=None)
@given(size=st.integers(1, 400), seed=KEYS, epoch=st.integers(0, 1000))
def test_every_size_and_key_gives_a_bijection(size: int, seed: int, epoch: int) -> None:
    order = Permutation(size, seed=seed, epoch=epoch)
    assert sorted(order[index] for index in range(size)) == list(range(size))


@settings(deadline=None)
@given(size=st.integers(2**30, 2**60), data=st.data(), seed=KEYS)
def test_huge_sizes_stay_in_range_and_never_collide(size: int, data: st.DataObject, seed: int) -> None:
    order = Permutation(size, seed=seed, epoch=0)
    indices = data.draw(st.sets(st.integers(0, size - 1), max_size=20))
    images = {order[index] for index in indices}
    assert len(images) == len(indices)
    assert all(0 <= image < size for image in images)


def test_epochs_and_seeds_have_different_orders() -> None:
    orders = {
        tuple(Permutation(50, seed=seed, epoch=epoch)[index] for index in range(50))
        for seed in range(4)
        for epoch in range(4)
    }
    assert len(orders) == 16


def test_the_order_does_not_change_between_versions() -> None:
    # A run that resumes under a newer nanotrain must go on with the same data.
    order = Permutation(1000, seed=1234, epoch=3)
    assert [order[index] for index in range(6)] == [529, 905, 47, 504, 990, 313]


def test_images_are_spread_evenly() -> None:
    # Mean image of each tenth of the indices, against the standard error of a random order.
    size, order = 10_000, Permutation(10_000, seed=5, epoch=0)
    images = np.array([order[index] for index in range(size)]).reshape(10, -1)
    standard_error = size / np.sqrt(12) / np.sqrt(size / 10)
    assert np.all(np.abs(images.mean(axis=1) - size / 2) < 4 * standard_error)
    correlation = np.corrcoef(images.ravel()[:-1], images.ravel()[1:])[0, 1]
    assert abs(correlation) < 0.04
