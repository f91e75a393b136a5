"""`--ema-decay`: the moving average of the weights (`optim/state.py`), after every update."""

from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from nanotrain.checkpoint.manifest import Manifest
from nanotrain.log import get_logger
from nanotrain.optim.distributed import Update
from nanotrain.spec.boxes import TensorBox
from nanotrain.train.parts.part import BuiltModel, StepPart

log = get_logger(__name__)

PREFIX = "ema/"  # in a checkpoint, where the average is among the tensors of the optimizer


class MovingAverage(StepPart):
    """Adds the main params of every step to their average."""

    def __init__(self, model: BuiltModel) -> None:
        self._average = model.optimizer.average
        self._is_absent = True  # whether the checkpoint that is read has no average

    @staticmethod
    def is_enabled(model: BuiltModel) -> bool:
        return model.config.optim.ema_decay is not None

    def after_update(self, update: Update, sums: Tensor, *, is_logged: bool) -> Tensor:
        self._average.update(update.skipped)
        return sums

    def missing(
        self, targets: Collection[TensorBox], manifest: Manifest, *, weights_alone: bool
    ) -> Collection[TensorBox]:
        """The whole average, if only weights are loaded or the checkpoint has none."""
        is_saved = any(name.startswith(PREFIX) for name in manifest.tensors)
        self._is_absent = weights_alone or not is_saved
        if not self._is_absent:
            return ()
        return [box for box in targets if box.name.startswith(PREFIX)]

    def restored(self, missing: Collection[TensorBox], *, checkpoint: Path | None) -> None:
        """Begin at the loaded weights where the average was not read."""
        names = {box.name.removeprefix(PREFIX) for box in missing if box.name.startswith(PREFIX)}
        if not self._is_absent:
            self._average.restart_params(names)
            return
        if checkpoint is not None:
            log.info(
                "%s has no moving average of the weights: it begins at the weights", checkpoint
            )
        self._average.restart()
