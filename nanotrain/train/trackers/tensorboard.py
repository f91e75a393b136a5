"""TensorBoard."""

from functools import partial
from typing import Any

import numpy as np

from nanotrain.train.run import Run


class TensorBoardTracker:
    """Event files in `train.tensorboard_dir`, or in `tensorboard/` of the run folder.

    A start purges the steps that it is going to repeat from what TensorBoard shows of the files of
    earlier starts.
    """

    def __init__(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes 2 s to import

        folder = run.config.train.tensorboard_dir or run.folder.path / "tensorboard"
        self._open = partial(SummaryWriter, str(folder))
        self._writer: Any = None  # opened by the first step, which is the first to purge

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Record the numbers of a step, and lists as histograms."""
        if self._writer is None:
            self._writer = self._open(purge_step=step)
        for name, value in values.items():
            if isinstance(value, list):
                self._writer.add_histogram(name, np.array(value, dtype=float), step)
            else:
                self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()
