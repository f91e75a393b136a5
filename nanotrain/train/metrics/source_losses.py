"""The loss on each corpus of a blend: summed on the device with the loss, read at logged steps."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from nanotrain.model.transformer import Head


class SourceLosses:
    """Sums of losses and of target tokens by corpus, since the last logged step.

    Args:
        names: of the corpora, in the order of `Batch.source_ids`.
        heads: of this rank's stages; they add to the sums in the forward passes of training.
        device: of the sums.
    """

    def __init__(self, names: Sequence[str], *, heads: Iterable[Head], device: torch.device) -> None:
        self.names = tuple(names)
        self._sums = torch.zeros(2, len(names), dtype=torch.float64, device=device)
        for head in heads:
            head.source_sums = self._sums

    @property
    def size(self) -> int:
        """Numbers that `take` returns."""
        return 2 * len(self.names)

    def take(self) -> Tensor:
        """[2 * sources] fp64, this rank's part of the sums, to be summed over all ranks; resets them."""
        taken = self._sums.flatten().clone()
        self._sums.zero_()
        return taken

    def by_name(self, sums: Sequence[float]) -> dict[str, float]:
        """The mean loss of every corpus that had target tokens, from the sums over all ranks."""
        losses, tokens = sums[: len(self.names)], sums[len(self.names) :]
        return {name: loss / count for name, loss, count in zip(self.names, losses, tokens, strict=True) if count}
