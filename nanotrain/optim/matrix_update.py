"""`MatrixUpdate`: apply a `MatrixRule` to the hidden matrices of one grid of ranks.

directions    elementwise, on this rank's shards: state is updated, the direction goes into a buffer of the bucket
transform     at the owner of each matrix (`whole_matrices.py`); the pieces replace the directions
main params   main = main * (1 - lr * weight_decay) - lr * scale * piece
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanotrain.comm.group import Group
from nanotrain.config.config import MuonTPMode, OptimConfig
from nanotrain.optim.matrices import Balance, Piece, Placed, assign, balance, list_matrices, place
from nanotrain.optim.part_state import PartState
from nanotrain.optim.rule import MatrixRule, ParamRange, UpdateStep
from nanotrain.optim.whole_matrices import GridGroups, WholeMatrices
from nanotrain.parallel.dp.layout import BufferLayout
from nanotrain.topology.groups import GroupName, GroupSpec


@dataclass(frozen=True)
class _Directions:
    """Directions, later transformed, of the matrix parts of one bucket shard."""

    values: Tensor
    first: int  # element of the shard that `values` begins at

    def of(self, piece: Piece) -> Tensor:
        """The elements of one piece."""
        return self.values[piece.start - self.first : piece.start - self.first + piece.numel]


class MatrixUpdate:
    """The matrices of the buffers that are sharded over the same ranks.

    Args:
        layouts: of these buffers.
        buckets: this rank's matrix parts of every bucket of the layouts, in order.
        rule: the rule for matrices.
        config: its options.
        groups: of the grid.
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
        self._placed, self.balance = plan_matrices(layouts, rule, config=config, groups=groups)
        self._whole = WholeMatrices(self._placed, groups)
        self._pieces: dict[int, list[tuple[Piece, Placed]]] = defaultdict(list)  # this rank's, by bucket
        self._piece_of: dict[int, Piece] = {}
        for number, placed in enumerate(self._placed):
            piece = placed.piece_of(groups.shard.index)
            if piece is not None:
                self._pieces[placed.bucket].append((piece, placed))
                self._piece_of[number] = piece

    def run(self, step: UpdateStep, *, device: torch.device) -> None:
        """Update the state and the main params of all parts."""
        like = torch.empty(0, dtype=self._rule.dtype(self._config), device=device)
        directions = [self._direct(parts, like=like, step=step) for parts in self._buckets]

        def piece(number: int) -> Tensor:
            return directions[self._placed[number].bucket].of(self._piece_of[number])

        results = self._whole.run(piece, like=like, transform=lambda full, _: self._rule.transform(full, self._config))
        for number, values in results:
            piece(number).copy_(values)
        for bucket, parts in enumerate(self._buckets):
            for part in parts:
                self._apply(part, directions[bucket], pieces=self._pieces[bucket], step=step)

    def _direct(self, parts: Sequence[PartState], *, like: Tensor, step: UpdateStep) -> _Directions:
        """Update the state of the matrix parts of a bucket and return their directions."""
        if not parts:
            return _Directions(like, 0)
        first, last = parts[0].part.start, parts[-1].part.stop
        directions = _Directions(like.new_empty(last - first), first)
        for part in parts:
            for start, stop in part.chunks():
                begin = part.part.start - first + start
                with part.loaded(start, stop) as ranges:
                    for each in ranges:
                        self._neutralize(each, step)
                        end = begin + each.grad.numel()
                        directions.values[begin:end].copy_(self._rule.direction(each, self._config))
                        begin = end
        return directions

    def _neutralize(self, part: ParamRange, step: UpdateStep) -> None:
        """In a skipped step, replace the gradient by one that leaves the state unchanged."""
        name, skipped = self._rule.momentum, step.is_skipped.to(part.grad.device)
        neutral = torch.zeros((), device=part.grad.device) if name is None else part.state[name]
        torch.where(skipped, neutral, part.grad, out=part.grad)

    def _apply(
        self, part: PartState, directions: _Directions, *, pieces: Sequence[tuple[Piece, Placed]], step: UpdateStep
    ) -> None:
        """Update the main params of a part from transformed directions."""
        applied = 1.0 - step.found_inf.double()
        for start, stop in part.chunks():
            main = part.main.read(start, stop)
            for piece, placed in _inside(pieces, start=part.part.start + start, stop=part.part.start + stop):
                begin = piece.start - part.part.start - start
                elements = main[begin : begin + piece.numel]
                if placed.matrix.param.spec.weight_decay:
                    elements.mul_((1 - step.lr * step.weight_decay * applied).to(main.device))
                scale = self._rule.scale(placed.matrix.shape, self._config)
                # A skipped step adds zeros.
                elements.add_((directions.of(piece) * applied).to(main.device), alpha=-step.lr * scale)
            part.main.write(main, start)


def plan_matrices(
    layouts: Sequence[BufferLayout], rule: MatrixRule, *, config: OptimConfig, groups: GridGroups
) -> tuple[tuple[Placed, ...], Balance | None]:
    """The matrices of a grid with their owners, and their balance; None without matrices."""
    splits_tensors = config.muon_tp_mode is not MuonTPMode.blockwise
    listed = list_matrices(layouts, splits_tensors=splits_tensors)
    flops = [rule.flops(matrix.shape, config) for matrix, _, _ in listed]
    owners = assign(flops, groups.sizes)
    placed = place(layouts, owners=owners, splits_tensors=splits_tensors)
    return placed, balance(flops, owners, sizes=groups.sizes) if placed else None


def grid_groups(
    shard: Group | GroupSpec,
    replicate: Group | GroupSpec,
    *,
    groups: Mapping[GroupName, Group] | Mapping[GroupName, GroupSpec],
    config: OptimConfig,
    shards_across: bool,
) -> GridGroups:
    """The grid of a buffer's ranks. In blockwise mode every tensor-parallel rank has a grid of its own.

    Args:
        shard: the ranks that buckets are sharded over.
        replicate: the optimizer instances.
        groups: of this rank.
        config: the mode.
        shards_across: whether optimizer state is sharded across instances too.
    """
    name: GroupName = "etp" if shard.name.startswith("expert") else "tp"
    tensor: Group | GroupSpec = groups[name]
    if config.muon_tp_mode is MuonTPMode.blockwise:
        tensor = Group.single_rank(name, tensor.rank)
    if not shards_across:
        return GridGroups(replicate, shard, tensor)
    all_shards = groups["expert_dp" if shard.name.startswith("expert") else "dp_cp"]
    assert all_shards.index == replicate.index * shard.size + shard.index, "pieces would reach the wrong rank"
    return GridGroups(Group.single_rank(replicate.name, replicate.rank), all_shards, tensor)


def _inside(pieces: Sequence[tuple[Piece, Placed]], *, start: int, stop: int) -> Iterator[tuple[Piece, Placed]]:
    """The pieces inside [start, stop) of the shard, clipped."""
    for piece, placed in pieces:
        first, last = max(piece.start, start), min(piece.start + piece.numel, stop)
        if first < last:
            yield Piece(piece.shard, first, last - first), placed
