"""A run has the arithmetic of its dtypes; the optimizer itself names no feature."""

from pathlib import Path

import torch

from nanotrain.optim import distributed
from nanotrain.optim.arithmetic import step_arithmetic
from nanotrain.optim.invariant import EXACT_ARITHMETIC
from nanotrain.optim.rule import PLAIN_ARITHMETIC
from nanotrain.precision.dtypes import Precision


def test_sums_are_exact_where_gradients_are_fp64() -> None:
    assert step_arithmetic(Precision(torch.bfloat16)) is PLAIN_ARITHMETIC
    exact = Precision(torch.bfloat16, grads=torch.float64, main_grads=torch.float64)
    assert step_arithmetic(exact) is EXACT_ARITHMETIC


def test_the_optimizer_names_no_arithmetic() -> None:
    assert "invariant" not in Path(distributed.__file__).read_text(encoding="utf-8")
