"""Several corpora as one, mixed by weight.

Sample number n must go to a corpus, and to a number in it, by a pure function of n that costs nothing to set up.
The corpora are the leaves of a binary tree. A node hands its m-th visitor to the left exactly when round(m*p)
steps, p being the left side's share, so among its first m visitors exactly round(m*p) went left and a leaf knows
how often it was reached without any table:

                   n              weights 4 1 1 2
              p = 5/8
             /       \\
        p = 4/5     p = 1/3       each node is off by at most 1/2 visitor, and passes on only its share of that:
         /   \\       /   \\        over any n samples a corpus of weight w got n*w within 1/2 * depth.
        4     1     1     2

Shares are exact fractions: nothing drifts, whatever n.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from nanotrain.data.batch import Sample, SampleDataset


@dataclass(frozen=True)
class Draw:
    """Where a sample of the blend comes from.

    Args:
        corpus: which of the blended ones.
        number: the sample number there.
    """

    corpus: int
    number: int


@dataclass(frozen=True)
class _Node:
    share: Fraction
    left: "_Node | int"
    right: "_Node | int"

    def visitors_left(self, visitors: int) -> int:
        share = self.share
        return (2 * visitors * share.numerator + share.denominator) // (2 * share.denominator)


def plan_blend(weights: Sequence[Fraction]) -> "_Node | int":
    """The tree of a blend; draw from it with `draw`.

    Args:
        weights: one per corpus, above 0; they need not sum to 1.
    """
    return _split(range(len(weights)), weights)


def draw(tree: "_Node | int", number: int) -> Draw:
    """The corpus and number of the blend's sample `number`.

    >>> tree = plan_blend([Fraction(2), Fraction(1)])
    >>> [draw(tree, n).corpus for n in range(6)]
    [0, 1, 0, 0, 1, 0]
    """
    while isinstance(tree, _Node):
        went_left = tree.visitors_left(number)
        if tree.visitors_left(number + 1) > went_left:
            tree, number = tree.left, went_left
        else:
            tree, number = tree.right, number - went_left
    return Draw(tree, number)


class BlendedDataset:
    """Samples of several corpora in fixed proportions; each corpus keeps epochs and an order of its own.

    Args:
        parts: the corpora.
        weights: their shares, above 0.
    """

    def __init__(self, parts: Sequence[SampleDataset], weights: Sequence[Fraction]) -> None:
        assert len(parts) == len(weights) > 0, "every corpus needs a weight"
        self.parts = tuple(parts)
        self._tree = plan_blend(weights)

    @property
    def samples_per_epoch(self) -> int:
        """Samples of all parts together; how often each part has been seen by then depends on its weight."""
        return sum(part.samples_per_epoch for part in self.parts)

    def __getitem__(self, sample_number: int) -> Sample:
        """The sample of that number, for any number from 0 on."""
        drawn = draw(self._tree, sample_number)
        return self.parts[drawn.corpus][drawn.number]


def _split(corpora: Sequence[int], weights: Sequence[Fraction]) -> "_Node | int":
    if len(corpora) == 1:
        return corpora[0]
    middle = len(corpora) // 2
    left, right = corpora[:middle], corpora[middle:]
    left_weight, right_weight = (sum(weights[corpus] for corpus in side) for side in (left, right))
    share = Fraction(left_weight) / (left_weight + right_weight)
    return _Node(share, _split(left, weights), _split(right, weights))
