"""The loss of a manifest."""

import math

import pytest

from nanotrain.train.hooks.save_content import _finite_loss
from tests.train.small_run import KnownOutput


class Report:
    def __init__(self, loss: float) -> None:
        self.output = KnownOutput(loss=loss)


@pytest.mark.parametrize(
    ("report", "loss"), [(None, None), (Report(2.5), 2.5), (Report(math.nan), None)]
)
def test_a_loss_is_recorded_where_it_is_finite(report: Report | None, loss: float | None) -> None:
    assert _finite_loss(report) == loss  # type: ignore[arg-type]
