"""`--rerun-mode validate_results`: a step whose loss is not finite is taken again, and compared.

    the repetition is finite      the fault was transient: of the hardware, or of an operator whose
                                  results differ from run to run. The repetition counts
    it is not finite either       the step is skipped, as without this part

The log names the ranks whose loss was not finite. Megatron-LM ends the run in both cases, and
repeats a step that is not finite again on another GPU once the run resumes.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from nanotrain.log import get_logger
from nanotrain.optim.distributed import Update
from nanotrain.train.parts.faulty_ranks import ranks_at_fault
from nanotrain.train.parts.part import BuiltModel, StepPart

log = get_logger(__name__)


class RepeatedStep(StepPart):
    """Repeats a step whose loss is not finite, and logs whether the fault was transient."""

    may_repeat = True

    def __init__(self, model: BuiltModel) -> None:
        self._is_repetition = False
        self._logs = model.context.rank == 0
        self._all_ranks = model.context.control

    @staticmethod
    def is_enabled(model: BuiltModel) -> bool:
        return model.config.train.rerun_mode == "validate_results"

    def after_update(self, update: Update, sums: Tensor, *, is_logged: bool) -> Tensor:
        """[2], the loss summed over the tokens of the global batch, and whether it was skipped."""
        return torch.stack([update.sums[0], update.skipped.double()])

    def metrics(self, numbers: Sequence[float]) -> dict[str, Any]:
        """Whether the loss is not finite, and whether the step is a repetition.

        A step that is not skipped has changed weights, so it is not taken again.
        """
        entries: dict[str, Any] = {}
        loss, skipped = numbers
        if skipped and not isfinite(loss):
            entries["loss_not_finite"] = 1
        if self._is_repetition:
            entries["repeated"] = 1
        return entries

    def wants_repeat(self, metrics: Mapping[str, Any]) -> bool:
        """Whether the loss is not finite."""
        return "loss_not_finite" in metrics

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Mark the step as a repetition; it lacks nothing."""
        self._is_repetition = True
        yield

    def repeated(self, metrics: Mapping[str, Any], *, local_fault: int) -> None:
        """Log whether the loss is finite in the repetition; collective."""
        self._is_repetition = False
        ranks = ranks_at_fault(local_fault, self._all_ranks)
        where = f" on {ranks}" if ranks else ""
        if not self._logs:
            return
        if "loss_not_finite" in metrics:
            log.warning(
                "the loss was not finite%s, and is not in a repetition of the step either, so the "
                "fault is not transient: it lies in data, settings or weights, or in a GPU that "
                "always errs",
                where,
            )
        else:
            log.warning(
                "the loss was not finite%s, and is in a repetition of the step, which counts: a "
                "transient fault of the hardware, or an operator that is not deterministic",
                where,
            )
