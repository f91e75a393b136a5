"""Gather hidden matrices at their owners, transform them there, and return the pieces to all ranks.

    rank (r, s, t) of the grid (replicate, shard, tensor)           owner (r*, s*, t*)

    gather    over shard, where r = r*     flat pieces      -> local matrix at (r*, s*, t)
    join      over tensor, where s = s*    rows or columns  -> full matrix at (r*, s*, t*)
              transform
    split     over tensor                  full matrix      -> local matrix at (r*, s*, t)
    scatter   over shard                   local matrix     -> flat pieces at (r*, s, t)
    spread    over replicate               pieces           -> the same pieces at every r

Each step is one all-to-all for all matrices, in the same order on every rank; a group of one rank sends nothing. Every
matrix is transformed once in the grid, so replicas receive equal bits.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanotrain.comm.all_to_all import start_all_to_all
from nanotrain.comm.group import Group
from nanotrain.optim.matrices import Coordinate, Placed
from nanotrain.topology.groups import GroupSpec


@dataclass(frozen=True)
class GridGroups:
    """The groups of the three axes of the grid; specs suffice to count what is sent."""

    replicate: Group | GroupSpec
    shard: Group | GroupSpec
    tensor: Group | GroupSpec

    @property
    def rank(self) -> Coordinate:
        """This rank's coordinate."""
        return Coordinate(self.replicate.index, self.shard.index, self.tensor.index)

    @property
    def sizes(self) -> Coordinate:
        """The sizes of the grid."""
        return Coordinate(self.replicate.size, self.shard.size, self.tensor.size)


@dataclass(frozen=True)
class MatrixSlice:
    """The number of a matrix, and how many of its elements are sent or received."""

    number: int
    numel: int


MatrixSlices = tuple[tuple[MatrixSlice, ...], ...]  # by rank of the group


class Route:
    """One all-to-all of parts of matrices.

    Args:
        group: its ranks.
        sends: what this rank sends to each rank.
        receives: what it receives from each rank.
    """

    def __init__(self, group: Group | GroupSpec, *, sends: MatrixSlices, receives: MatrixSlices) -> None:
        self._group, self._sends, self._receives = group, sends, receives
        self._input_splits, self._output_splits = (
            [sum(block.numel for block in blocks) for blocks in by_rank] for by_rank in (sends, receives)
        )

    @property
    def sent_numel(self) -> int:
        """Elements that leave this rank."""
        return sum(self._input_splits) - self._input_splits[self._group.index]

    def run(self, part: Callable[[int, int], Tensor], *, like: Tensor) -> list[tuple[int, Tensor]]:
        """Send `part(number, rank)` of every matrix; returns (number, received elements), ordered by sender.

        Args:
            part: any shape, in the dtype of `like`.
            like: an example for dtype and device.
        """
        parts = [part(block.number, rank).reshape(-1) for rank, by in enumerate(self._sends) for block in by]
        flat = torch.cat([like.new_empty(0), *parts])
        output = flat
        if self._group.size > 1:
            assert isinstance(self._group, Group), "a spec is for plans"
            output = flat.new_empty(sum(self._output_splits))
            start_all_to_all(
                output,
                flat,
                output_splits=self._output_splits,
                input_splits=self._input_splits,
                group=self._group,
            ).wait()
        received = [block for by_rank in self._receives for block in by_rank]
        views = output.split([block.numel for block in received])
        return [(block.number, view) for block, view in zip(received, views, strict=True)]


class WholeMatrices:
    """The routes of one grid.

    Args:
        placed: all matrices of the grid, the same list on every rank.
        groups: of this rank.
    """

    def __init__(self, placed: Sequence[Placed], groups: GridGroups) -> None:
        self._placed, self._me = placed, groups.rank
        numbered = list(enumerate(placed))
        here = [(n, p) for n, p in numbered if p.owner.replicate == self._me.replicate]
        local = [(n, p) for n, p in here if p.owner.shard == self._me.shard]
        shards, tensors = range(groups.sizes.shard), range(groups.sizes.tensor)

        pieces_sent = tuple(_pieces(((n, p) for n, p in here if p.owner.shard == s), self._me.shard) for s in shards)
        pieces_received = tuple(_pieces(local, shard) for shard in shards)
        self._gather = Route(groups.shard, sends=pieces_sent, receives=pieces_received)
        self._scatter = Route(groups.shard, sends=pieces_received, receives=pieces_sent)

        by_tensor = [[(n, p) for n, p in local if p.owner.tensor == t] for t in tensors]
        mine = by_tensor[self._me.tensor]
        # A replicated matrix is read at its owner only, and returned to all.
        sends = tuple(_locals(by_tensor[t], reads_replicas=t == self._me.tensor) for t in tensors)
        receives = tuple(_locals(mine, reads_replicas=t == self._me.tensor) for t in tensors)
        self._join = Route(groups.tensor, sends=sends, receives=receives)
        sends = tuple(_locals(mine) for _ in tensors)
        self._split = Route(groups.tensor, sends=sends, receives=tuple(map(_locals, by_tensor)))

        by_replicate = tuple(
            _pieces(((n, p) for n, p in numbered if p.owner.replicate == r), self._me.shard)
            for r in range(groups.sizes.replicate)
        )
        mine_to_all = (by_replicate[self._me.replicate],) * len(by_replicate)
        self._spread = Route(groups.replicate, sends=mine_to_all, receives=by_replicate)

    def sent_numel(self) -> dict[str, int]:
        """Elements that this rank sends per step, by axis."""
        return {
            "shard": self._gather.sent_numel + self._scatter.sent_numel,
            "tensor": self._join.sent_numel + self._split.sent_numel,
            "replicate": self._spread.sent_numel,
        }

    def run(
        self, piece: Callable[[int], Tensor], *, like: Tensor, transform: Callable[[Tensor, int], Tensor]
    ) -> list[tuple[int, Tensor]]:
        """Transform every matrix of the grid at its owner.

        Args:
            piece: this rank's elements of a matrix, by number.
            like: an example of a piece for dtype and device.
            transform: full matrix and number -> full matrix.

        Returns:
            Number and transformed elements of this rank's pieces.
        """
        gathered = _by_number(self._gather.run(lambda number, _: piece(number), like=like))
        local = {number: self._local(number, parts) for number, parts in gathered.items()}
        joined = _by_number(self._join.run(lambda number, _: local[number], like=like))
        results = {number: transform(self._full(number, blocks), number) for number, blocks in joined.items()}
        local = dict(self._split.run(lambda number, rank: self._block(results[number], number, rank=rank), like=like))
        scattered = dict(
            self._scatter.run(lambda number, rank: self._piece(local[number], number, shard=rank), like=like)
        )
        return self._spread.run(lambda number, _: scattered[number], like=like)

    def _local(self, number: int, parts: Sequence[Tensor]) -> Tensor:
        """The local matrix from its pieces, which arrive ordered by rank.

        Where optimizer state is sharded across instances, neighbouring pieces are on ranks of different instances, so
        the order of the ranks is not that of the pieces.
        """
        pieces = self._placed[number].pieces
        by_rank = dict(zip(sorted(piece.shard for piece in pieces), parts, strict=True))
        return torch.cat([by_rank[piece.shard] for piece in pieces])

    def _full(self, number: int, blocks: Sequence[Tensor]) -> Tensor:
        """[rows, columns] from the blocks of the tensor-parallel ranks."""
        matrix = self._placed[number].matrix
        shaped = [block.view(matrix.local_shape) for block in blocks]
        return shaped[0] if matrix.sharded_dim is None else torch.cat(shaped, dim=matrix.sharded_dim)

    def _block(self, full: Tensor, number: int, *, rank: int) -> Tensor:
        """The rows or columns of one tensor-parallel rank."""
        matrix = self._placed[number].matrix
        return full if matrix.sharded_dim is None else full.chunk(matrix.num_blocks, dim=matrix.sharded_dim)[rank]

    def _piece(self, local: Tensor, number: int, *, shard: int) -> Tensor:
        """The elements of one shard."""
        return local[self._placed[number].elements_of(shard)]


def _pieces(placed: Iterable[tuple[int, Placed]], shard: int) -> tuple[MatrixSlice, ...]:
    """The pieces of matrices in one shard; those of other matrices are left out."""
    pieces = ((number, each.piece_of(shard)) for number, each in placed)
    return tuple(MatrixSlice(number, piece.numel) for number, piece in pieces if piece is not None)


def _locals(placed: Iterable[tuple[int, Placed]], *, reads_replicas: bool = True) -> tuple[MatrixSlice, ...]:
    """The local matrices; replicated ones only if `reads_replicas`."""
    return tuple(
        MatrixSlice(number, each.matrix.local_numel)
        for number, each in placed
        if reads_replicas or each.matrix.sharded_dim is not None
    )


def _by_number(received: Iterable[tuple[int, Tensor]]) -> dict[int, list[Tensor]]:
    """The parts of each matrix, in the order of the senders."""
    parts: dict[int, list[Tensor]] = defaultdict(list)
    for number, tensor in received:
        parts[number].append(tensor)
    return parts
