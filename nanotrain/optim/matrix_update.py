"""`MatrixUpdate`: apply a `MatrixRule` to the hidden matrices of one grid of ranks.

directions    elementwise, on this rank's shards: state is updated, the direction goes into a buffer of the bucket
transform     at the owner of each matrix (`WholeMatrices`); the pieces replace the directions
main params   main = main * (1 - lr * weight_decay) - lr * scale * piece

Gathering matrices at their owners and returning the pieces:

    rank (r, s, t) of the grid (replicate, shard, tensor)           owner (r*, s*, t*)

    gather    over shard, where r = r*     flat pieces      -> local matrix at (r*, s*, t)
    join      over tensor, where s = s*    rows or columns  -> full matrix at (r*, s*, t*)
              transform
    split     over tensor                  full matrix      -> local matrix at (r*, s*, t)
    scatter   over shard                   local matrix     -> flat pieces at (r*, s, t)
    spread    over replicate               pieces           -> the same pieces at every r

Each step is one all-to-all for all matrices, in the same order on every rank; a group of one rank
sends nothing. Every matrix is transformed once in the grid, so replicas receive equal bits.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanotrain.comm.all_to_all import start_all_to_all
from nanotrain.comm.group import Group
from nanotrain.config.config import OptimConfig
from nanotrain.optim.matrices import Coordinate, Piece, Placed, describe, place
from nanotrain.optim.rule import MatrixRule, ParamRange, Shape, UpdateStep
from nanotrain.optim.state import PartState
from nanotrain.parallel.dp.layout import BufferLayout
from nanotrain.topology.groups import GroupName, GroupSpec


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


# by rank of the group, the numbers of matrices and how many of their elements are sent or received
MatrixSlices = Sequence[Sequence[tuple[int, int]]]


class Route:
    """One all-to-all of parts of matrices.

    Args:
        group: group of the all-to-all.
        sends: slices that this rank sends to each rank.
        receives: slices that it receives from each rank.
    """

    def __init__(
        self, group: Group | GroupSpec, *, sends: MatrixSlices, receives: MatrixSlices
    ) -> None:
        self._group, self._sends, self._receives = group, sends, receives
        self._input_splits = [sum(numel for _, numel in blocks) for blocks in sends]
        self._output_splits = [sum(numel for _, numel in blocks) for blocks in receives]

    @property
    def sent_numel(self) -> int:
        """Elements that leave this rank."""
        return sum(self._input_splits) - self._input_splits[self._group.index]

    def run(self, part: Callable[[int, int], Tensor], *, like: Tensor) -> list[tuple[int, Tensor]]:
        """Send `part(number, rank)` of every matrix; returns (number, received elements), ordered
        by sender.

        Args:
            part: function that returns a part of any shape, in the dtype of `like`.
            like: example for dtype and device.
        """
        parts = [
            part(number, rank).reshape(-1)
            for rank, by in enumerate(self._sends)
            for number, _ in by
        ]
        flat = torch.cat([like.new_empty(0), *parts])
        output = flat
        if self._group.size > 1:
            assert isinstance(self._group, Group), "a spec is for plans"
            output = flat.new_empty(sum(self._output_splits))
            splits = {"output_splits": self._output_splits, "input_splits": self._input_splits}
            start_all_to_all(output, flat, group=self._group, **splits).wait()
        received = [block for by_rank in self._receives for block in by_rank]
        views = output.split([numel for _, numel in received])
        return [(number, view) for (number, _), view in zip(received, views, strict=True)]


class WholeMatrices:
    """The routes of one grid.

    Args:
        placed: all matrices of the grid, the same list on every rank.
        groups: groups of this rank.
    """

    def __init__(self, placed: Sequence[Placed], groups: GridGroups) -> None:
        self._placed, self._me = placed, groups.rank
        numbered = list(enumerate(placed))
        here = [(n, p) for n, p in numbered if p.owner.replicate == self._me.replicate]
        local = [(n, p) for n, p in here if p.owner.shard == self._me.shard]
        shards, tensors = range(groups.sizes.shard), range(groups.sizes.tensor)

        pieces_sent = [
            _pieces(((n, p) for n, p in here if p.owner.shard == s), self._me.shard) for s in shards
        ]
        pieces_received = [_pieces(local, shard) for shard in shards]
        self._gather = Route(groups.shard, sends=pieces_sent, receives=pieces_received)
        self._scatter = Route(groups.shard, sends=pieces_received, receives=pieces_sent)

        by_tensor = [[(n, p) for n, p in local if p.owner.tensor == t] for t in tensors]
        mine = by_tensor[self._me.tensor]
        # A replicated matrix is read at its owner only, and returned to all.
        sends = [_locals(by_tensor[t], reads_replicas=t == self._me.tensor) for t in tensors]
        receives = [_locals(mine, reads_replicas=t == self._me.tensor) for t in tensors]
        self._join = Route(groups.tensor, sends=sends, receives=receives)
        mine_to_each, all_of_each = (
            [_locals(mine) for _ in tensors],
            [_locals(each) for each in by_tensor],
        )
        self._split = Route(groups.tensor, sends=mine_to_each, receives=all_of_each)

        replicas = [
            [(n, p) for n, p in numbered if p.owner.replicate == r]
            for r in range(groups.sizes.replicate)
        ]
        by_replicate = [_pieces(replica, self._me.shard) for replica in replicas]
        mine_to_all = [by_replicate[self._me.replicate]] * len(by_replicate)
        self._spread = Route(groups.replicate, sends=mine_to_all, receives=by_replicate)

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
    ) -> list[tuple[int, Tensor]]:
        """Transform every matrix of the grid at its owner.

        Args:
            piece: function that returns this rank's elements of a matrix, by number.
            like: example of a piece for dtype and device.
            transform: function of a full matrix and its number that returns a full matrix.

        Returns:
            Number and transformed elements of this rank's pieces.
        """
        gathered = _by_number(self._gather.run(lambda number, _: piece(number), like=like))
        local = {number: self._local(number, parts) for number, parts in gathered.items()}
        joined = _by_number(self._join.run(lambda number, _: local[number], like=like))
        results = {
            number: transform(self._full(number, blocks), number)
            for number, blocks in joined.items()
        }
        local = dict(
            self._split.run(
                lambda number, rank: self._block(results[number], number, rank=rank), like=like
            )
        )

        def elements(number: int, rank: int) -> Tensor:
            return local[number][self._placed[number].pieces[rank].elements]

        scattered = dict(self._scatter.run(elements, like=like))
        return self._spread.run(lambda number, _: scattered[number], like=like)

    def _local(self, number: int, parts: Sequence[Tensor]) -> Tensor:
        """The local matrix from its pieces, which arrive ordered by rank.

        Where optimizer state is sharded across instances, neighbouring pieces are on ranks of
        different instances, so the order of the ranks is not that of the pieces.
        """
        pieces = self._placed[number].pieces
        by_rank = dict(zip(sorted(pieces), parts, strict=True))
        return torch.cat([by_rank[shard] for shard in pieces])

    def _full(self, number: int, blocks: Sequence[Tensor]) -> Tensor:
        """[rows, columns] from the blocks of the tensor-parallel ranks."""
        matrix = self._placed[number].matrix
        shaped = [block.view(matrix.local_shape) for block in blocks]
        return (
            shaped[0] if matrix.sharded_dim is None else torch.cat(shaped, dim=matrix.sharded_dim)
        )

    def _block(self, full: Tensor, number: int, *, rank: int) -> Tensor:
        """The rows or columns of one tensor-parallel rank."""
        matrix = self._placed[number].matrix
        return (
            full
            if matrix.sharded_dim is None
            else full.chunk(matrix.num_blocks, dim=matrix.sharded_dim)[rank]
        )


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
        self._rule, self._config, self._buckets = rule, config, buckets
        # element of the shard
        self._first = [parts[0].part.start if parts else 0 for parts in buckets]
        self._placed = plan_matrices(layouts, rule, config=config, groups=groups)
        self.balance = describe(self._placed, groups.sizes) if self._placed else None
        self._whole, me = WholeMatrices(self._placed, groups), groups.shard.index
        self._pieces = {
            number: each.pieces[me] for number, each in enumerate(self._placed) if me in each.pieces
        }
        self._in_bucket: dict[int, list[tuple[Piece, Placed]]] = defaultdict(list)
        for number, piece in self._pieces.items():
            self._in_bucket[self._placed[number].bucket].append((piece, self._placed[number]))

    def run(self, step: UpdateStep, *, device: torch.device) -> None:
        """Update the state and the main params of all parts."""
        like = torch.empty(0, dtype=self._rule.dtype(self._config), device=device)
        directions = [self._direct(parts, like=like, step=step) for parts in self._buckets]

        def piece(number: int) -> Tensor:
            bucket, mine = self._placed[number].bucket, self._pieces[number]
            return directions[bucket][mine.start - self._first[bucket] :][: mine.numel]

        results = self._whole.run(
            piece, like=like, transform=lambda full, _: self._rule.transform(full, self._config)
        )
        for number, values in results:
            piece(number).copy_(values)
        for bucket, parts in enumerate(self._buckets):
            for part in parts:
                self._apply(part, directions[bucket], bucket=bucket, step=step)

    def _direct(self, parts: Sequence[PartState], *, like: Tensor, step: UpdateStep) -> Tensor:
        """Update the state of the matrix parts of a bucket; returns [from the first to the last of
        them] directions.
        """
        directions = like.new_empty(parts[-1].part.stop - parts[0].part.start if parts else 0)
        for part in parts:
            rest = directions[part.part.start - parts[0].part.start :]
            for start, stop in part.chunks():
                with part.loaded(start, stop) as ranges:
                    for each in ranges:
                        self._neutralize(each, step)
                        rest[: each.grad.numel()].copy_(self._rule.direction(each, self._config))
                        rest = rest[each.grad.numel() :]
        return directions

    def _neutralize(self, part: ParamRange, step: UpdateStep) -> None:
        """In a skipped step, replace the gradient by one that leaves the state unchanged."""
        name, skipped = self._rule.momentum, step.is_skipped.to(part.grad.device)
        neutral = torch.zeros((), device=part.grad.device) if name is None else part.state[name]
        torch.where(skipped, neutral, part.grad, out=part.grad)

    def _apply(self, part: PartState, directions: Tensor, *, bucket: int, step: UpdateStep) -> None:
        """Update the main params of a part from the transformed directions of its bucket."""
        applied, offset = 1.0 - step.found_inf.double(), self._first[bucket]
        for start, stop in part.chunks():
            main, first, last = (
                part.main.read(start, stop),
                part.part.start + start,
                part.part.start + stop,
            )
            for piece, placed in self._in_bucket[bucket]:
                begin, end = max(piece.start, first), min(piece.start + piece.numel, last)
                if begin >= end:
                    continue
                elements, direction = (
                    main[begin - first : end - first],
                    directions[begin - offset : end - offset],
                )
                if placed.matrix.param.spec.weight_decay:
                    elements.mul_((1 - step.lr * step.weight_decay * applied).to(main.device))
                scale = self._rule.scale(placed.matrix.shape, self._config)
                # A skipped step adds zeros.
                elements.add_((direction * applied).to(main.device), alpha=-step.lr * scale)
            part.main.write(main, start)


def plan_matrices(
    layouts: Sequence[BufferLayout], rule: MatrixRule, *, config: OptimConfig, groups: GridGroups
) -> tuple[Placed, ...]:
    """The matrices of a grid with their pieces and owners."""
    splits_tensors = config.muon_tp_mode != "blockwise"

    def flops_of(shape: Shape) -> int:
        return rule.flops(shape, config)

    return place(layouts, sizes=groups.sizes, flops_of=flops_of, splits_tensors=splits_tensors)


def grid_groups(
    shard: Group | GroupSpec,
    replicate: Group | GroupSpec,
    *,
    groups: Mapping[GroupName, Group] | Mapping[GroupName, GroupSpec],
    config: OptimConfig,
    shards_across: bool,
) -> GridGroups:
    """The grid of a buffer's ranks. In blockwise mode every tensor-parallel rank has a grid of its
    own.

    Args:
        shard: group that buckets are sharded over.
        replicate: group of the optimizer instances.
        groups: groups of this rank.
        config: options with the mode of tensor-parallel matrices.
        shards_across: whether optimizer state is sharded across instances too.
    """
    name: GroupName = "etp" if shard.name.startswith("expert") else "tp"
    tensor: Group | GroupSpec = groups[name]
    if config.muon_tp_mode == "blockwise":
        tensor = Group.single_rank(name, tensor.rank)
    if not shards_across:
        return GridGroups(replicate, shard, tensor)
    all_shards = groups["expert_dp" if shard.name.startswith("expert") else "dp_cp"]
    assert all_shards.index == replicate.index * shard.size + shard.index, (
        "pieces would reach the wrong rank"
    )
    return GridGroups(Group.single_rank(replicate.name, replicate.rank), all_shards, tensor)


def _pieces(placed: Iterable[tuple[int, Placed]], shard: int) -> list[tuple[int, int]]:
    """The pieces of matrices in one shard; matrices without elements in it are left out."""
    return [(number, each.pieces[shard].numel) for number, each in placed if shard in each.pieces]


def _locals(
    placed: Iterable[tuple[int, Placed]], *, reads_replicas: bool = True
) -> list[tuple[int, int]]:
    """The local matrices; replicated ones only if `reads_replicas`."""
    chosen = (
        (n, each.matrix)
        for n, each in placed
        if reads_replicas or each.matrix.sharded_dim is not None
    )
    return [(number, matrix.local_numel) for number, matrix in chosen]


def _by_number(received: Iterable[tuple[int, Tensor]]) -> dict[int, list[Tensor]]:
    """The parts of each matrix, in the order of the senders."""
    parts: dict[int, list[Tensor]] = defaultdict(list)
    for number, tensor in received:
        parts[number].append(tensor)
    return parts
