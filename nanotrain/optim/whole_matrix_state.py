"""State of whole matrices: one number or one row of numbers per matrix, held apart from shards.

It is stored in one flat fp32 tensor per grid of ranks, at the owner of each matrix or, where the
rule says so, on every rank of the grid. Checkpoints have it as [1, n] per matrix, or [experts, n],
saved by the owner alone; any layout loads it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nanotrain.optim.matrices import Coordinate, OwnedMatrix
from nanotrain.optim.rule import WholeMatrixState
from nanotrain.spec.boxes import Box, TensorBox

FP32_BYTES = 4


class WholeMatrixStates:
    """The state of the matrices of one grid that this rank holds.

    Args:
        matrices: all matrices of the grid.
        state: name and sizes.
        rank: this rank in the grid.
        device: device of the state.
    """

    def __init__(
        self,
        matrices: Sequence[OwnedMatrix],
        state: WholeMatrixState,
        *,
        rank: Coordinate,
        device: torch.device,
    ) -> None:
        self._matrices = matrices
        self._name = state.name
        self._rank = rank
        sizes = _held_sizes(matrices, state, rank=rank)
        self.flat = torch.zeros(sum(sizes.values()), device=device)
        parts = self.flat.split(list(sizes.values()))
        self._views = dict(zip(sizes, parts, strict=True))

    def __getitem__(self, matrix_id: int) -> Tensor:
        """[n] fp32 of a matrix that this rank holds."""
        return self._views[matrix_id]

    def tensors(self, *, once: bool) -> Iterator[tuple[TensorBox, Tensor]]:
        """The state by its names in checkpoints.

        Args:
            once: whether only the owner yields the state of a matrix.
        """
        for matrix_id, tensor in self._views.items():
            owned = self._matrices[matrix_id]
            if owned.owner == self._rank or not once:
                yield self._box(owned, len(tensor)), tensor[None]

    def _box(self, owned: OwnedMatrix, numel: int) -> TensorBox:
        """The state of a matrix as one row of a tensor of a checkpoint."""
        param = owned.matrix.param
        name = f"optimizer/{self._name}/{param.spec.name}"
        row = owned.matrix.index
        num_rows = 1
        if len(param.spec.shape) == 3:  # a stack of experts
            row += param.box.start[0]
            num_rows = param.spec.shape[0]
        return TensorBox(name, (num_rows, numel), Box((row, 0), (row + 1, numel)))


def whole_matrix_bytes(
    matrices: Sequence[OwnedMatrix], state: WholeMatrixState, *, rank: Coordinate
) -> int:
    """Bytes of the state on a rank."""
    return FP32_BYTES * sum(_held_sizes(matrices, state, rank=rank).values())


def _held_sizes(
    matrices: Sequence[OwnedMatrix], state: WholeMatrixState, *, rank: Coordinate
) -> dict[int, int]:
    """Elements of the state of every matrix that a rank holds."""
    sizes = {}
    for matrix_id, owned in enumerate(matrices):
        if state.is_replicated or owned.owner == rank:
            sizes[matrix_id] = state.numel(owned.matrix.shape)
    return sizes
