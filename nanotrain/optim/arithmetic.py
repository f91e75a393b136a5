"""The choice of the arithmetic of an optimizer step by the dtypes of a run."""

from nanotrain.optim.invariant import EXACT_ARITHMETIC
from nanotrain.optim.rule import PLAIN_ARITHMETIC, StepArithmetic
from nanotrain.precision.dtypes import Precision


def step_arithmetic(precision: Precision) -> StepArithmetic:
    """The arithmetic of a run: exact where gradients are multiples of a grid."""
    return EXACT_ARITHMETIC if precision.sums_exactly else PLAIN_ARITHMETIC
