"""`--invariant`: the reason of a step that leaves the range in which sums are exact.

A sum of which an addend is too large is NaN (kernels/exact_sums.py), so that the step is skipped in
every layout alike: its weights would depend on the layout.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from nanotrain.optim.distributed import Update
from nanotrain.train.parts.part import BuiltModel, StepPart

REASON = (
    "with --invariant a step is skipped too if its sums are not exact: the mean gradient of a "
    "weight over a block of positions, or that of a norm, bias or embedding by one token, is 256 "
    "or more (per token of the loss), or the loss of a token is 512 or more; lower --lr or "
    "--init-method-std, find a first tensor that is not finite with --debug-nan, or leave "
    "--invariant out"
)


class ExactRange(StepPart):
    """Says of a skipped step that its sums may have left the range."""

    def __init__(self, model: BuiltModel) -> None:
        """Nothing is kept."""

    @staticmethod
    def is_enabled(model: BuiltModel) -> bool:
        return model.config.precision.invariant

    def after_update(self, update: Update, sums: Tensor, *, is_logged: bool) -> Tensor:
        """[1], whether the step was skipped."""
        return update.skipped[None]

    def metrics(self, numbers: Sequence[float]) -> dict[str, Any]:
        return {"skip_reason": REASON} if numbers[0] else {}
