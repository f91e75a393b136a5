"""`MatrixUpdate`: apply a `MatrixRule` to the hidden matrices of one grid of ranks.

directions    elementwise, on this rank's shards: state is updated, the direction goes into a buffer
transform     at the owner of each matrix (`MatrixRoutes`); the pieces replace the directions
main params   main = main * (1 - lr * weight_decay) - lr * scale * piece, or the update of
              fixed_norm.py
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanotrain.config.config import OptimConfig
from nanotrain.optim.fixed_norm import FixedNorms, NormFactors
from nanotrain.optim.heads import row_factors, transform_heads
from nanotrain.optim.matrices import OwnedMatrix, describe_balance
from nanotrain.optim.matrix_routes import GridGroups, MatrixRoutes, plan_matrices
from nanotrain.optim.rule import MatrixRule, ParamRange, UpdateStep
from nanotrain.optim.state import PartState
from nanotrain.optim.whole_matrix_state import WholeMatrixStates
from nanotrain.parallel.dp.layout import BufferLayout


class LocalPiece(NamedTuple):
    """Elements [start, stop) that this rank updates, counted in its part of the bucket."""

    matrix_id: int  # index of the matrix
    owned: OwnedMatrix
    start: int
    stop: int


class PieceChunk(NamedTuple):
    """Elements of a piece in a chunk of main params."""

    piece: LocalPiece
    elements: slice  # counted as the start of the piece
    main: Tensor  # [n] fp32 view of the chunk
    update: Tensor  # [n], the transformed direction


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
        device: device of the state of whole matrices.

    Attributes:
        balance: description of the distribution; None if nothing is sent to owners.
        state: state of whole matrices, where the rule has one.
    """

    def __init__(
        self,
        layouts: Sequence[BufferLayout],
        buckets: Sequence[Sequence[PartState]],
        *,
        rule: MatrixRule,
        groups: GridGroups,
        device: torch.device,
        config: OptimConfig,
    ) -> None:
        self._rule = rule
        self._config = config
        matrices = plan_matrices(layouts, rule, config=config, groups=groups)
        has_owners = bool(matrices) and rule.transform is not None
        self.balance = describe_balance(matrices, groups.sizes) if has_owners else None
        self._matrices = matrices
        self._routes = MatrixRoutes(matrices, groups)
        self._buckets = [MatrixBucket(parts) for parts in buckets]
        self.state: WholeMatrixStates | None = None
        self._norms: FixedNorms | None = None
        if rule.state is not None:
            self.state = WholeMatrixStates(matrices, rule.state, rank=groups.rank, device=device)
        if rule.fixes_norm:
            assert self.state is not None, "norms are state"
            radius = self.state.flat
            self._norms = FixedNorms(matrices, groups, radius=radius, arithmetic=rule.arithmetic)
        self._shard = groups.shard.index
        self._pieces: dict[int, LocalPiece] = {}  # local pieces by matrix_id
        for matrix_id, owned in enumerate(matrices):
            piece = owned.pieces.get(self._shard)
            if piece is not None:
                local = LocalPiece(matrix_id, owned, piece.start, piece.stop)
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
            return self._transform(full, matrix_id, step=step)

        if self._rule.transform is not None:
            received = self._routes.run(direction_of, like=like, transform=transform)
            for matrix_id, elements in received:
                direction_of(matrix_id).copy_(elements)
        factors = self._norm_factors(directions, step)
        for bucket, updates in zip(self._buckets, directions, strict=True):
            for part in bucket.parts:
                self._update_main_params(part, bucket, updates=updates, step=step, factors=factors)

    def _transform(self, full: Tensor, matrix_id: int, *, step: UpdateStep) -> Tensor:
        """The update of a matrix at its owner."""
        rule = self._rule
        head_rows = self._matrices[matrix_id].matrix.head_rows

        def transform(heads: Tensor) -> Tensor:
            assert rule.transform is not None, "matrices are sent to be transformed"
            return rule.transform(heads, self._config)

        update = transform_heads(full, head_rows, transform=transform)
        if rule.normalize is None:
            return update
        assert self.state is not None, "normalization has a state"
        return rule.normalize(update, self.state[matrix_id], head_rows=head_rows, step=step)

    def _norm_factors(self, directions: Sequence[Tensor], step: UpdateStep) -> NormFactors | None:
        """The factors that keep the norms of all matrices; None if the rule does not fix them."""
        if self._norms is None:
            return None
        for bucket, updates in zip(self._buckets, directions, strict=True):
            for part in bucket.parts:
                for start, stop in part.chunks():
                    main = part.main.read(start, stop)
                    for chunk in _piece_chunks(
                        part, bucket, main=main, start=start, updates=updates
                    ):
                        matrix_id = chunk.piece.matrix_id
                        self._norms.add(matrix_id, chunk.main, update=chunk.update)
        return self._norms.factors(step)

    def _directions(self, bucket: MatrixBucket, *, like: Tensor, step: UpdateStep) -> Tensor:
        """Update the state of the parts of a bucket; returns [numel], their directions."""
        directions = like.new_empty(bucket.numel)
        for part in bucket.parts:
            offset = part.part.start - bucket.start
            for start, stop in part.chunks():
                with part.loaded(start, stop) as ranges:
                    for param_range in ranges:
                        self._neutralize_grad(param_range, step)
                        direction = self._rule.direction(param_range, step)
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
        self,
        part: PartState,
        bucket: MatrixBucket,
        *,
        updates: Tensor,
        step: UpdateStep,
        factors: NormFactors | None,
    ) -> None:
        """Update the main params of a part from the updates of its bucket."""
        for start, stop in part.chunks():
            main = part.main.read(start, stop)
            for chunk in _piece_chunks(part, bucket, main=main, start=start, updates=updates):
                if factors is None:
                    self._add_update(chunk, step)
                else:
                    _keep_norm(chunk, factors)
            part.main.write(main, start)

    def _add_update(self, chunk: PieceChunk, step: UpdateStep) -> None:
        """Decay some elements and add their update; a skipped step adds zeros."""
        main = chunk.main
        applied = 1.0 - step.found_inf.double()
        if chunk.piece.owned.matrix.param.spec.weight_decay:
            main.mul_((1 - step.lr * step.weight_decay * applied).to(main.device))
        scale, factors = self._scales(chunk.piece, chunk.elements)
        update = chunk.update
        if factors is not None:
            update = update * factors.to(update.device)
        added = (update * applied).to(main.device)
        self._rule.arithmetic.add_scaled(main, added, factor=-step.lr * scale)

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


def _piece_chunks(
    part: PartState, bucket: MatrixBucket, *, main: Tensor, start: int, updates: Tensor
) -> Iterator[PieceChunk]:
    """The elements of every piece in a chunk of main params.

    Args:
        part: the part of the chunk.
        bucket: its bucket.
        main: [n] fp32, the chunk.
        start: first element of the chunk in the part.
        updates: [numel of the bucket].
    """
    first = part.part.start + start
    last = first + len(main)
    for piece in bucket.pieces:
        begin = max(piece.start, first)
        end = min(piece.stop, last)
        if begin < end:
            elements = main[begin - first : end - first]
            update = updates[begin - bucket.start : end - bucket.start]
            yield PieceChunk(piece, slice(begin, end), elements, update)


def _keep_norm(chunk: PieceChunk, factors: NormFactors) -> None:
    """Update some elements of a matrix with a fixed norm."""
    main = chunk.main
    matrix_id = chunk.piece.matrix_id
    update = chunk.update.double() * factors.update[matrix_id]
    updated = (main.double() - update.to(main.device)) * factors.weight[matrix_id].to(main.device)
    main.copy_(updated)
