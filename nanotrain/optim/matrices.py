"""Assignment of hidden matrices to ranks: which rank updates a matrix, and which pieces each rank
holds. Pure.

    matrices_of   the matrices of a parameter: one, or one per expert of a stack
    assign        matrices -> owners, with balanced FLOPs
    Placed        a matrix, its owner, and its pieces in the shards of its bucket
    place         all matrices of several buffer layouts
    describe      matrices and FLOPs per rank, for the log

A matrix is divided over a grid of ranks (replicate, shard, tensor):

    replicate   optimizer instances, or all data-parallel ranks of no_shard: each holds the same pieces
    shard       the data-parallel ranks that a bucket is sharded over: each holds flat pieces of the local matrix; all
                data-parallel ranks, instance after instance, where optimizer state is sharded across instances too
    tensor      tensor-parallel ranks: each holds rows or columns, or all of a replicated matrix
"""

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from nanotrain.optim.rule import Shape
from nanotrain.parallel.dp.layout import BucketLayout, BufferLayout, FlatRange
from nanotrain.quantities import count_of
from nanotrain.spec.params import LocalParam


@dataclass(frozen=True)
class Coordinate:
    """A rank of the grid, or the sizes of the grid."""

    replicate: int
    shard: int
    tensor: int


@dataclass(frozen=True)
class Matrix:
    """One matrix of a parameter."""

    param: LocalParam
    index: int  # in a stack of experts; 0 for a parameter of one matrix
    local_shape: Shape  # on one tensor-parallel rank
    # the dim that tensor-parallel ranks share; None if each holds all of it
    sharded_dim: int | None
    num_blocks: int  # tensor-parallel ranks that share it

    @property
    def local_numel(self) -> int:
        """Elements on one tensor-parallel rank."""
        return prod(self.local_shape)

    @property
    def shape(self) -> Shape:
        """Rows and columns of the full matrix."""
        rows, columns = self.local_shape
        return (
            rows * (self.num_blocks if self.sharded_dim == 0 else 1),
            columns * (self.num_blocks if self.sharded_dim == 1 else 1),
        )


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a local matrix in one shard of its bucket."""

    start: int  # first element in what the rank of the shard updates of the bucket
    elements: slice  # of the local matrix

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.elements.stop - self.elements.start


@dataclass(frozen=True)
class Placed:
    """A matrix, where it lies and who computes its update."""

    matrix: Matrix
    bucket: int  # number of the bucket, over all layouts
    # by the index of the rank in the shard axis of the grid; in their order in the local matrix,
    # which they make up
    pieces: Mapping[int, Piece]
    owner: Coordinate
    flops: int  # of its update


def matrices_of(param: LocalParam, *, splits_tensors: bool) -> list[Matrix]:
    """The matrices of a local parameter: its last two dims; a 3-D parameter is a stack of them, one
    per expert.

    `splits_tensors` is False where every tensor-parallel rank treats its rows or columns as a
    matrix.
    """
    spec, shape = param.spec, param.box.shape
    assert len(shape) in (2, 3), (
        f"{spec.name} of shape {shape} is neither a matrix nor a stack of matrices"
    )
    first = len(shape) - 2
    axis = "etp" if spec.is_expert else "tp"
    dims = [shard.dim - first for shard in spec.shards if shard.axis == axis]
    num_blocks = (
        spec.shape[dims[0] + first] // shape[dims[0] + first] if dims and splits_tensors else 1
    )
    sharded_dim = dims[0] if num_blocks > 1 else None
    count = shape[0] if first else 1
    return [
        Matrix(param, index, (shape[-2], shape[-1]), sharded_dim, num_blocks)
        for index in range(count)
    ]


def assign(flops: Sequence[int], sizes: Coordinate) -> list[Coordinate]:
    """The owner of every matrix: the largest first, each to the rank with the least work so far.

    >>> [owner.shard for owner in assign([5, 4, 3, 2, 2], Coordinate(1, 2, 1))]
    [0, 1, 1, 0, 0]
    """
    ranks = [
        Coordinate(*index)
        for index in product(range(sizes.replicate), range(sizes.shard), range(sizes.tensor))
    ]
    loads = [(0, number) for number in range(len(ranks))]
    owners = [ranks[0]] * len(flops)
    for index in sorted(range(len(flops)), key=lambda index: -flops[index]):
        load, number = heapq.heappop(loads)
        owners[index] = ranks[number]
        heapq.heappush(loads, (load + flops[index], number))
    return owners


def describe(placed: Sequence[Placed], sizes: Coordinate) -> str:
    """How many matrices and FLOPs the ranks of a grid have."""
    num_ranks, counts = (
        sizes.replicate * sizes.shard * sizes.tensor,
        Counter(each.owner for each in placed),
    )
    flops: Counter[Coordinate] = Counter()
    for each in placed:
        flops[each.owner] += each.flops
    fewest = min(counts.values()) if len(counts) == num_ranks else 0
    return (
        f"{len(placed)} matrices over {count_of(num_ranks, 'rank')}, {fewest} to {max(counts.values())} per rank, "
        f"FLOPs of the busiest rank {max(flops.values()) * num_ranks / flops.total():.2f} times the mean"
    )


def split_matrix(matrix: Matrix, entry: FlatRange, *, bucket: BucketLayout) -> dict[int, Piece]:
    """The pieces of a matrix by shard of its bucket."""
    first = entry.start - bucket.start + matrix.index * matrix.local_numel
    last, length = first + matrix.local_numel, bucket.update_numel
    pieces = {}
    for number in range(first // length, -(-last // length)):
        start, stop = max(first, number * length), min(last, (number + 1) * length)
        # Parts of one shard follow each other in the bucket; ranks of one instance in their group.
        shard, outer = divmod(number, bucket.num_outer_shards)
        pieces[outer * bucket.num_shards + shard] = Piece(
            start - number * length, slice(start - first, stop - first)
        )
    return pieces


def place(
    layouts: Sequence[BufferLayout],
    *,
    sizes: Coordinate,
    flops_of: Callable[[Shape], int],
    splits_tensors: bool,
) -> tuple[Placed, ...]:
    """All matrices of layouts with their pieces and owners.

    Args:
        layouts: layouts of the buffers that are sharded over one grid.
        sizes: sizes of the grid.
        flops_of: FLOPs of the update of a matrix of this shape.
        splits_tensors: see `matrices_of`.
    """
    buckets = [bucket for layout in layouts for bucket in layout.buckets]
    listed = [
        (matrix, number, split_matrix(matrix, entry, bucket=bucket))
        for number, bucket in enumerate(buckets)
        for entry in bucket.params
        if entry.param.spec.needs_whole_matrix
        for matrix in matrices_of(entry.param, splits_tensors=splits_tensors)
    ]
    flops = [flops_of(matrix.shape) for matrix, _, _ in listed]
    owners = assign(flops, sizes)
    return tuple(
        Placed(*each, owner, cost) for each, owner, cost in zip(listed, owners, flops, strict=True)
    )
