"""`MatrixRoutes`: the all-to-alls that bring hidden matrices to their owners and back.

A matrix of 4 rows, of which rank (r, s, t) of the grid (replicate, shard, tensor) has one piece
each, and its way to its owner (r, s, t) = (r*, 1, 0) and back:

                     t = 0                 t = 1
    s = 0           [a]                   [c]
                     | gather              | gather       over shard: flat pieces -> local matrix
    s = 1           [b] -> [ab]           [d] -> [cd]
                              <--- join -----/            over tensor: local -> full matrix
                           [abcd]
                              |  transform                at the owner
                           [ABCD]
                              \\--- split ---->            over tensor: full -> local matrix
    s = 1           [B] <- [AB]           [D] <- [CD]
                     | scatter             | scatter      over shard: local matrix -> flat pieces
    s = 0           [A]                   [C]

    every rank (r*, s, t)  --- spread --->  (r, s, t)     over replicate: its piece, to every r

Each step is one all-to-all (`Route`) for all matrices, in the same order on every rank; a group of
one rank sends nothing. Every matrix is transformed once in the grid, so replicas receive equal
bits. A replicated matrix is read at its owner only and returned to every tensor-parallel rank.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nanotrain.comm.all_to_all import start_all_to_all
from nanotrain.comm.group import Group
from nanotrain.config.config import OptimConfig
from nanotrain.optim.matrices import Coordinate, OwnedMatrix, assign_matrices
from nanotrain.optim.rule import MatrixRule, Shape
from nanotrain.parallel.dp.layout import BufferLayout
from nanotrain.topology.groups import GroupName, GroupSpec


@dataclass(frozen=True)
class GridGroups:
    """The groups of the three axes of the grid; specs suffice to count sent elements."""

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


class Slice(NamedTuple):
    """Elements of one matrix in a message."""

    matrix_id: int  # index of the matrix
    numel: int


class ReceivedSlice(NamedTuple):
    """Elements of one matrix that arrived."""

    matrix_id: int  # index of the matrix
    elements: Tensor


Message = Sequence[Slice]  # slices that one rank sends to another


class Route:
    """One all-to-all of slices of matrices.

    Args:
        group: group of the all-to-all.
        sends: the message to each rank.
        receives: the message from each rank.
    """

    def __init__(
        self, group: Group | GroupSpec, *, sends: Sequence[Message], receives: Sequence[Message]
    ) -> None:
        self._group = group
        self._sends = sends
        self._receives = receives
        self._input_splits = [_numel(message) for message in sends]
        self._output_splits = [_numel(message) for message in receives]

    def reverse(self) -> "Route":
        """The route back."""
        return Route(self._group, sends=self._receives, receives=self._sends)

    @property
    def sent_numel(self) -> int:
        """Elements that leave this rank."""
        return sum(self._input_splits) - self._input_splits[self._group.index]

    def run(self, part: Callable[[int, int], Tensor], *, like: Tensor) -> list[ReceivedSlice]:
        """Send `part(matrix_id, rank)` of every matrix; returns what arrives, ordered by sender.

        Args:
            part: function that returns a part of any shape, in the dtype of `like`.
            like: example for dtype and device.
        """
        parts = [like.new_empty(0)]
        for rank, message in enumerate(self._sends):
            for sent in message:
                parts.append(part(sent.matrix_id, rank).reshape(-1))
        output = self._all_to_all(torch.cat(parts))
        received = []
        start = 0
        for message in self._receives:
            for arrived in message:
                elements = output[start : start + arrived.numel]
                received.append(ReceivedSlice(arrived.matrix_id, elements))
                start += arrived.numel
        return received

    def _all_to_all(self, flat: Tensor) -> Tensor:
        """Exchange elements of a flat tensor, by the sizes for and from each rank."""
        if self._group.size == 1:
            return flat
        assert isinstance(self._group, Group), "a spec is for plans"
        output = flat.new_empty(sum(self._output_splits))
        work = start_all_to_all(
            output,
            flat,
            output_splits=self._output_splits,
            input_splits=self._input_splits,
            group=self._group,
        )
        return work.wait()


def _numel(message: Message) -> int:
    return sum(part.numel for part in message)


class MatrixRoutes:
    """The routes of all matrices of one grid.

    Args:
        matrices: all matrices of the grid, the same list on every rank; a matrix is named by its
            index in it.
        groups: groups of this rank.
    """

    def __init__(self, matrices: Sequence[OwnedMatrix], groups: GridGroups) -> None:
        self._matrices = matrices
        me = groups.rank
        sizes = groups.sizes
        every = range(len(matrices))
        by_replicate = self._by_owner(every, lambda owner: owner.replicate, size=sizes.replicate)
        in_replicate = by_replicate[me.replicate]
        by_shard = self._by_owner(in_replicate, lambda owner: owner.shard, size=sizes.shard)
        in_shard = by_shard[me.shard]
        by_tensor = self._by_owner(in_shard, lambda owner: owner.tensor, size=sizes.tensor)
        mine = by_tensor[me.tensor]

        to_owners = [self._pieces(matrix_ids, shard=me.shard) for matrix_ids in by_shard]
        from_shards = [self._pieces(in_shard, shard=shard) for shard in range(sizes.shard)]
        self._gather = Route(groups.shard, sends=to_owners, receives=from_shards)
        self._scatter = self._gather.reverse()

        to_owners = []
        from_tensors = []
        for tensor, matrix_ids in enumerate(by_tensor):
            is_me = tensor == me.tensor
            to_owners.append(self._blocks(matrix_ids, reads_replicas=is_me))
            from_tensors.append(self._blocks(mine, reads_replicas=is_me))
        self._join = Route(groups.tensor, sends=to_owners, receives=from_tensors)

        to_tensors = [self._blocks(mine)] * sizes.tensor
        from_owners = [self._blocks(matrix_ids) for matrix_ids in by_tensor]
        self._split = Route(groups.tensor, sends=to_tensors, receives=from_owners)

        from_replicates = [self._pieces(matrix_ids, shard=me.shard) for matrix_ids in by_replicate]
        to_replicates = [from_replicates[me.replicate]] * sizes.replicate
        self._spread = Route(groups.replicate, sends=to_replicates, receives=from_replicates)

    def _by_owner(
        self, matrix_ids: Iterable[int], index_of: Callable[[Coordinate], int], *, size: int
    ) -> list[list[int]]:
        """Group matrices by the index of their owner on one axis of the grid."""
        groups: list[list[int]] = [[] for _ in range(size)]
        for matrix_id in matrix_ids:
            index = index_of(self._matrices[matrix_id].owner)
            groups[index].append(matrix_id)
        return groups

    def _pieces(self, matrix_ids: Iterable[int], *, shard: int) -> Message:
        """The pieces of matrices in one shard; matrices without elements in it are left out."""
        message = []
        for matrix_id in matrix_ids:
            piece = self._matrices[matrix_id].pieces.get(shard)
            if piece is not None:
                message.append(Slice(matrix_id, piece.numel))
        return message

    def _blocks(self, matrix_ids: Iterable[int], *, reads_replicas: bool = True) -> Message:
        """The local matrices; replicated ones only if `reads_replicas`."""
        message = []
        for matrix_id in matrix_ids:
            matrix = self._matrices[matrix_id].matrix
            if reads_replicas or matrix.sharded_dim is not None:
                message.append(Slice(matrix_id, matrix.local_numel))
        return message

    def sent_numel(self) -> dict[str, int]:
        """Elements that this rank sends per step, by axis."""
        return {
            "shard": self._gather.sent_numel + self._scatter.sent_numel,
            "tensor": self._join.sent_numel + self._split.sent_numel,
            "replicate": self._spread.sent_numel,
        }

    def run(
        self,
        piece: Callable[[int], Tensor],
        *,
        like: Tensor,
        transform: Callable[[Tensor, int], Tensor],
    ) -> list[ReceivedSlice]:
        """Transform every matrix of the grid at its owner; returns this rank's pieces of them.

        Args:
            piece: function that returns this rank's elements of a matrix, by index.
            like: example of a piece for dtype and device.
            transform: function of a full matrix and its index that returns a full matrix.
        """
        gathered = self._gather.run(lambda matrix_id, _: piece(matrix_id), like=like)
        local = {}
        for matrix_id, pieces in _by_matrix(gathered).items():
            local[matrix_id] = self._join_pieces(matrix_id, pieces)

        joined = self._join.run(lambda matrix_id, _: local[matrix_id], like=like)
        results = {}
        for matrix_id, blocks in _by_matrix(joined).items():
            results[matrix_id] = transform(self._join_blocks(matrix_id, blocks), matrix_id)

        def block_of(matrix_id: int, rank: int) -> Tensor:
            return self._block(results[matrix_id], matrix_id, rank=rank)

        local = dict(self._split.run(block_of, like=like))

        def piece_of(matrix_id: int, rank: int) -> Tensor:
            return local[matrix_id][self._matrices[matrix_id].pieces[rank].elements]

        scattered = dict(self._scatter.run(piece_of, like=like))
        return self._spread.run(lambda matrix_id, _: scattered[matrix_id], like=like)

    def _join_pieces(self, matrix_id: int, parts: Sequence[Tensor]) -> Tensor:
        """The local matrix from its pieces, which arrive ordered by rank.

        Where optimizer state is sharded across instances, neighbouring pieces are on ranks of
        different instances, so the order of the ranks is not the order of the pieces.
        """
        pieces = self._matrices[matrix_id].pieces
        by_rank = dict(zip(sorted(pieces), parts, strict=True))
        return torch.cat([by_rank[shard] for shard in pieces])

    def _join_blocks(self, matrix_id: int, blocks: Sequence[Tensor]) -> Tensor:
        """[rows, columns] from the blocks of the tensor-parallel ranks."""
        matrix = self._matrices[matrix_id].matrix
        shaped = [block.view(matrix.local_shape) for block in blocks]
        if matrix.sharded_dim is None:
            return shaped[0]
        return torch.cat(shaped, dim=matrix.sharded_dim)

    def _block(self, full: Tensor, matrix_id: int, *, rank: int) -> Tensor:
        """The rows or columns of one tensor-parallel rank."""
        matrix = self._matrices[matrix_id].matrix
        if matrix.sharded_dim is None:
            return full
        return full.chunk(matrix.num_blocks, dim=matrix.sharded_dim)[rank]


def _by_matrix(received: Iterable[ReceivedSlice]) -> dict[int, list[Tensor]]:
    """The slices of each matrix, in the order of the senders."""
    slices: dict[int, list[Tensor]] = defaultdict(list)
    for matrix_id, elements in received:
        slices[matrix_id].append(elements)
    return slices


def plan_matrices(
    layouts: Sequence[BufferLayout], rule: MatrixRule, *, config: OptimConfig, groups: GridGroups
) -> tuple[OwnedMatrix, ...]:
    """The matrices of a grid with their pieces and owners."""

    def flops_of(shape: Shape) -> int:
        return rule.flops(shape, config)

    return assign_matrices(
        layouts,
        sizes=groups.sizes,
        flops_of=flops_of,
        splits_tensors=config.muon_tp_mode != "blockwise",
        splits_heads=config.muon_split_qkv_per_head,
    )


def grid_groups(
    shard: Group | GroupSpec,
    replicate: Group | GroupSpec,
    *,
    groups: Mapping[GroupName, Group] | Mapping[GroupName, GroupSpec],
    config: OptimConfig,
    shards_across: bool,
) -> GridGroups:
    """Groups over which Muon's matrices are distributed; in blockwise mode one set per tp rank.

    Args:
        shard: group that buckets are sharded over.
        replicate: group of the optimizer instances.
        groups: groups of this rank.
        config: options with the mode of tensor-parallel matrices.
        shards_across: whether optimizer state is sharded across instances too.
    """
    is_expert = shard.name.startswith("expert")
    name: GroupName = "etp" if is_expert else "tp"
    tensor: Group | GroupSpec = groups[name]
    if config.muon_tp_mode == "blockwise":
        tensor = Group.single_rank(name, tensor.rank)
    if not shards_across:
        return GridGroups(replicate, shard, tensor)
    all_shards = groups["expert_dp" if is_expert else "dp_cp"]
    assert all_shards.index == replicate.index * shard.size + shard.index, (
        "pieces would reach the wrong rank"
    )
    single = Group.single_rank(replicate.name, replicate.rank)
    return GridGroups(single, all_shards, tensor)
