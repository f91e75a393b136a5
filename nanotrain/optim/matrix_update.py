"""`MatrixUpdate`: apply a `MatrixRule` to the hidden matrices of one grid of ranks.

directions    elementwise, on this rank's shards: state is updated, the direction goes into a buffer
transform     at the owner of each matrix (`MatrixRoutes`); the pieces replace the directions
main params   main = main * (1 - lr * weight_decay) - lr * scale * piece
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanotrain.config.config import OptimConfig
from nanotrain.optim.heads import row_factors, transform_heads
from nanotrain.optim.matrices import OwnedMatrix, describe_balance
from nanotrain.optim.matrix_routes import GridGroups, MatrixRoutes, plan_matrices
from nanotrain.optim.rule import MatrixRule, ParamRange, UpdateStep
from nanotrain.optim.state import PartState
from nanotrain.parallel.dp.layout import BufferLayout


class LocalPiece(NamedTuple):
    """Elements [start, stop) that this rank updates, counted in its part of the bucket."""

    owned: OwnedMatrix
    start: int
    stop: int


class MatrixBucket:
    """The matrix parameters in this rank's shard of one bucket, and the elements of each matrix."""

    def __init__(self, parts: Sequence[PartState]) -> None:
        self.parts = parts
        self.pieces: list[LocalPiece] = []
        self.start = 0  # first element of the parts, counted in this rank's part of the bucket
        self.numel = 0  # from the first part to the end of the last one
        if parts:
            self.start = parts[0].part.start
            self.numel = parts[-1].part.stop - self.start


class MatrixUpdate:
    """The matrices of the buffers that are sharded over the same ranks.

    Args:
        layouts: layouts of the buffers.
        buckets: this rank's matrix parts of every bucket of the layouts, in order.
        rule: rule for matrices.
        config: options of the rule.
        groups: groups of the grid.
    """

    def __init__(
        self,
        layouts: Sequence[BufferLayout],
        buckets: Sequence[Sequence[PartState]],
        *,
        rule: MatrixRule,
        config: OptimConfig,
        groups: GridGroups,
    ) -> None:
        self._rule = rule
        self._config = config
        matrices = plan_matrices(layouts, rule, config=config, groups=groups)
        self.balance = describe_balance(matrices, groups.sizes) if matrices else None
        self._matrices = matrices
        self._routes = MatrixRoutes(matrices, groups)
        self._buckets = [MatrixBucket(parts) for parts in buckets]
        self._shard = groups.shard.index
        self._pieces: dict[int, LocalPiece] = {}  # local pieces by matrix_id
        for matrix_id, owned in enumerate(matrices):
            piece = owned.pieces.get(self._shard)
            if piece is not None:
                local = LocalPiece(owned, piece.start, piece.stop)
                self._pieces[matrix_id] = local
                self._buckets[owned.bucket].pieces.append(local)

    def run(self, step: UpdateStep, *, device: torch.device) -> None:
        """Update the state and the main params of all parts."""
        like = torch.empty(0, dtype=self._rule.dtype(self._config), device=device)
        directions = [self._directions(bucket, like=like, step=step) for bucket in self._buckets]

        def direction_of(matrix_id: int) -> Tensor:
            piece = self._pieces[matrix_id]
            first = self._buckets[piece.owned.bucket].start
            return directions[piece.owned.bucket][piece.start - first : piece.stop - first]

        def transform(full: Tensor, matrix_id: int) -> Tensor:
            head_rows = self._matrices[matrix_id].matrix.head_rows
            return transform_heads(
                full, head_rows, transform=lambda heads: self._rule.transform(heads, self._config)
            )

        for matrix_id, elements in self._routes.run(direction_of, like=like, transform=transform):
            direction_of(matrix_id).copy_(elements)
        for bucket, transformed in zip(self._buckets, directions, strict=True):
            for part in bucket.parts:
                self._update_main_params(part, bucket, directions=transformed, step=step)

    def _directions(self, bucket: MatrixBucket, *, like: Tensor, step: UpdateStep) -> Tensor:
        """Update the state of the parts of a bucket; returns [numel], their directions."""
        directions = like.new_empty(bucket.numel)
        for part in bucket.parts:
            offset = part.part.start - bucket.start
            for start, stop in part.chunks():
                with part.loaded(start, stop) as ranges:
                    for param_range in ranges:
                        self._neutralize_grad(param_range, step)
                        direction = self._rule.direction(param_range, self._config)
                        numel = param_range.grad.numel()
                        directions[offset : offset + numel].copy_(direction)
                        offset += numel
        return directions

    def _neutralize_grad(self, param_range: ParamRange, step: UpdateStep) -> None:
        """Replace the gradient of a skipped step by one that leaves the state unchanged."""
        grad = param_range.grad
        if self._rule.momentum is None:
            neutral = torch.zeros((), device=grad.device)
        else:
            neutral = param_range.state[self._rule.momentum]
        is_skipped = step.is_skipped.to(grad.device)
        torch.where(is_skipped, neutral, grad, out=grad)

    def _update_main_params(
        self, part: PartState, bucket: MatrixBucket, *, directions: Tensor, step: UpdateStep
    ) -> None:
        """Update the main params of a part from the transformed directions of its bucket."""
        applied = 1.0 - step.found_inf.double()
        for start, stop in part.chunks():
            main = part.main.read(start, stop)
            first = part.part.start + start
            last = part.part.start + stop
            for piece in bucket.pieces:
                begin = max(piece.start, first)
                end = min(piece.stop, last)
                if begin >= end:
                    continue
                elements = main[begin - first : end - first]
                direction = directions[begin - bucket.start : end - bucket.start]
                if piece.owned.matrix.param.spec.weight_decay:
                    elements.mul_((1 - step.lr * step.weight_decay * applied).to(main.device))
                scale, factors = self._scales(piece, slice(begin, end))
                if factors is not None:
                    direction = direction * factors.to(direction.device)
                # A skipped step adds zeros.
                elements.add_((direction * applied).to(main.device), alpha=-step.lr * scale)
            part.main.write(main, start)

    def _scales(self, piece: LocalPiece, elements: slice) -> tuple[float, Tensor | None]:
        """The factor of the update of elements of a piece, counted as `piece.start`.

        Returns:
            the factor of the first slice of a head, and factors [n] of the elements relative to it
            where slices have different ones.
        """
        matrix = piece.owned.matrix
        scales = [self._rule.scale(shape, self._config) for shape in matrix.slice_shapes]
        first = piece.owned.pieces[self._shard].elements.start - piece.start
        in_matrix = slice(first + elements.start, first + elements.stop)
        factors = row_factors(
            scales, matrix.head_rows, elements=in_matrix, columns=matrix.local_shape[1]
        )
        return scales[0], factors
