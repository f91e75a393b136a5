"""Inputs of linear attention, and its documents as kernels want them.

DeltaInputs       of the gated delta rule, and of the scan of Mamba-2
PackedDocuments   the documents of a batch, one after the other

B batch   S sequence   G heads of queries and keys   N heads of values (a multiple of G)
K, V head dims of keys and values
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class DeltaInputs:
    """Inputs of the gated delta rule (delta_rule.py), and of the scan of Mamba-2 (ssd.py)."""

    query: Tensor  # [B, S, G, K]
    key: Tensor  # [B, S, G, K]
    value: Tensor  # [B, S, N, V]
    decay: Tensor  # [B, S, N, 1 or K], logarithms of the factors, at most 0
    beta: Tensor  # [B, S, N, 1], the step of the correction
    # [B, S] bool on any device, the first token of every document; None: one document
    starts: Tensor | None = None
    # [N], of Mamba-2: decay = beta A; None where only the decay is known
    A: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """A copy with `function` of every tensor per token; `A` is left out."""
        changed: dict[str, Tensor | None] = {"A": None}
        for field in fields(self):
            tensor = getattr(self, field.name)
            if tensor is not None and field.name != "A":
                changed[field.name] = function(tensor)
        return replace(self, **changed)  # type: ignore[arg-type]


@dataclass(frozen=True)
class PackedDocuments:
    """The documents of a batch whose rows are concatenated; a row ends its last document."""

    bounds: np.ndarray  # [documents + 1] int64, cumulative lengths
    first: np.ndarray  # [B] int64, the first document of each row
    last: np.ndarray  # [B] int64, the last document of each row
    continues: np.ndarray  # [B] bool, whether the first document began before the row

    @classmethod
    def of(cls, starts: np.ndarray) -> "PackedDocuments":
        """The documents of [B, S] bool, True for the first token of a document."""
        rows = np.arange(len(starts)) * starts.shape[1]  # the first token of each row
        document_starts = np.flatnonzero(starts)
        bounds = np.union1d(document_starts, [*rows, starts.size])
        first = np.searchsorted(bounds, rows)
        num_documents = len(bounds) - 1
        next_first = np.append(first[1:], num_documents)
        continues = ~starts[:, 0]
        return cls(bounds, first, next_first - 1, continues)

    @property
    def number(self) -> int:
        """The number of documents."""
        return len(self.bounds) - 1
