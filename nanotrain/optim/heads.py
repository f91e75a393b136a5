"""`--muon-split-qkv-per-head`: the slices of rows of every head, each updated as a matrix."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def transform_heads(
    full: Tensor, head_rows: Sequence[int], *, transform: Callable[[Tensor], Tensor]
) -> Tensor:
    """Transform each slice of every head by itself.

    Args:
        full: [rows, columns].
        head_rows: rows of the slices of one head; empty: the matrix is transformed as a whole.
        transform: function of [rows, columns] or of [heads, rows, columns], with equal shape.
    """
    if not head_rows:
        return transform(full)
    heads = full.unflatten(0, (-1, sum(head_rows)))
    transformed = [transform(part) for part in heads.split(list(head_rows), dim=1)]
    return torch.cat(transformed, dim=1).flatten(0, 1)


def row_factors(
    scales: Sequence[float], head_rows: Sequence[int], *, elements: slice, columns: int
) -> Tensor | None:
    """Factors of elements of a matrix, relative to the first slice of each head.

    Args:
        scales: factor of every slice of a head.
        head_rows: rows of every slice of a head.
        elements: range of elements of the matrix, whose rows are heads one after another.
        columns: columns of the matrix.

    Returns:
        [n], one factor per element; None if all slices have the same factor.
    """
    if len(set(scales)) == 1:
        return None
    relative: list[float] = []
    for scale, num_rows in zip(scales, head_rows, strict=True):
        relative += [scale / scales[0]] * num_rows
    rows = torch.arange(elements.start, elements.stop) // columns
    return torch.tensor(relative)[rows % len(relative)]
