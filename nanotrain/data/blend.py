"""Several datasets as one, mixed by weight.

Sample n maps to a dataset and an index in it by a pure function of n, without a table. The datasets are the leaves of a
binary tree. A node sends visit m to its left child exactly when round(m*p) increases, where p is the left child's share
of the weight. So round(m*p) of the first m visits go left, and every leaf index follows from n:

                   n              weights 4 1 1 2
              p = 5/8
             /       \\
        p = 4/5     p = 1/3       the error of a node is at most 1/2 visit, and a child inherits only its share of it:
         /   \\       /   \\        of any n samples a dataset of weight w gets n*w within 1/2 * depth.
        4     1     1     2

Shares are exact fractions, so the error does not grow with n.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from nanotrain.data.batch import Sample, SampleDataset


@dataclass(frozen=True)
class BlendIndex:
    """The source of one sample of the blend."""

    dataset: int  # index of the blended dataset
    sample: int  # sample index in that dataset


@dataclass(frozen=True)
class _Node:
    share: Fraction
    left: "_Node | int"
    right: "_Node | int"

    def visits_left(self, visits: int) -> int:
        share = self.share
        return (2 * visits * share.numerator + share.denominator) // (2 * share.denominator)


def plan_blend(weights: Sequence[Fraction]) -> "_Node | int":
    """The tree of a blend, for `locate`, from one weight above 0 per dataset; they need not sum to 1."""
    return _split(range(len(weights)), weights)


def locate(tree: "_Node | int", index: int) -> BlendIndex:
    """The dataset and sample index of sample `index` of the blend.

    >>> tree = plan_blend([Fraction(2), Fraction(1)])
    >>> [locate(tree, n).dataset for n in range(6)]
    [0, 1, 0, 0, 1, 0]
    """
    while isinstance(tree, _Node):
        num_left = tree.visits_left(index)
        if tree.visits_left(index + 1) > num_left:
            tree, index = tree.left, num_left
        else:
            tree, index = tree.right, index - num_left
    return BlendIndex(tree, index)


def count_visits(tree: "_Node | int", visits: int) -> dict[int, int]:
    """The number of the first `visits` samples that come from each dataset.

    >>> count_visits(plan_blend([Fraction(2), Fraction(1)]), 4)
    {0: 3, 1: 1}
    """
    if not isinstance(tree, _Node):
        return {tree: visits}
    num_left = tree.visits_left(visits)
    return count_visits(tree.left, num_left) | count_visits(tree.right, visits - num_left)


class BlendedDataset:
    """Samples of several datasets, in proportion to weights above 0; each dataset keeps its own epochs and order."""

    def __init__(self, datasets: Sequence[SampleDataset], weights: Sequence[Fraction]) -> None:
        assert len(datasets) == len(weights) > 0, "every dataset needs a weight"
        self.datasets = tuple(datasets)
        self._tree = plan_blend(weights)

    @property
    def samples_per_epoch(self) -> int:
        """Sum over the datasets; how often each has been read by then depends on its weight."""
        return sum(dataset.samples_per_epoch for dataset in self.datasets)

    def source_of(self, index: int) -> int:
        """The dataset of sample `index` >= 0."""
        return locate(self._tree, index).dataset

    def __getitem__(self, index: int) -> Sample:
        """Sample `index` >= 0; indices continue after an epoch."""
        found = locate(self._tree, index)
        return self.datasets[found.dataset][found.sample]


def _split(datasets: Sequence[int], weights: Sequence[Fraction]) -> "_Node | int":
    if len(datasets) == 1:
        return datasets[0]
    middle = len(datasets) // 2
    left, right = datasets[:middle], datasets[middle:]
    left_weight, right_weight = (sum(weights[dataset] for dataset in side) for side in (left, right))
    share = Fraction(left_weight) / (left_weight + right_weight)
    return _Node(share, _split(left, weights), _split(right, weights))
