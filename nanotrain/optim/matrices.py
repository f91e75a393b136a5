"""Assignment of hidden matrices to ranks: the owner of a matrix and the pieces of each rank. Pure.

    matrices_of        the matrices of a parameter: one, or one per expert of a stack
    Matrix             a matrix, and the blocks of rows that are updated apart: one per head
    assign_owners      matrices -> owners, with balanced FLOPs
    OwnedMatrix        a matrix, its owner, and its pieces in the shards of its bucket
    assign_matrices    all matrices of several buffer layouts
    describe_balance   matrices and FLOPs per rank, for the log

A matrix is divided over a grid of ranks (replicate, shard, tensor):

    replicate   optimizer instances, or all data-parallel ranks of no_shard: all have equal pieces
    shard       the data-parallel ranks that a bucket is sharded over: each has flat pieces of the
                local matrix; all data-parallel ranks, instance after instance, where optimizer
                state is sharded across instances too
    tensor      tensor-parallel ranks: each has rows or columns, or all of a replicated matrix
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    sharded_dim: int | None  # the dim that tensor-parallel ranks share; None if it is replicated
    num_blocks: int  # tensor-parallel ranks that share it
    # rows of the slices of one head, each of which is updated as a matrix; empty: all rows together
    head_rows: tuple[int, ...] = ()

    @property
    def local_numel(self) -> int:
        """Elements on one tensor-parallel rank."""
        return prod(self.local_shape)

    @property
    def shape(self) -> Shape:
        """Rows and columns of the full matrix."""
        rows, columns = self.local_shape
        if self.sharded_dim == 0:
            rows *= self.num_blocks
        if self.sharded_dim == 1:
            columns *= self.num_blocks
        return rows, columns

    @property
    def slice_shapes(self) -> tuple[Shape, ...]:
        """Shapes of the matrices that are updated apart: the slices of one head, or all of it."""
        if not self.head_rows:
            return (self.shape,)
        columns = self.shape[1]
        return tuple((rows, columns) for rows in self.head_rows)

    @property
    def num_heads(self) -> int:
        """How often the slices repeat."""
        return self.shape[0] // sum(self.head_rows) if self.head_rows else 1


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a local matrix in one shard of its bucket."""

    start: int  # the first element, counted in the part of the bucket that the rank updates
    elements: slice  # elements of the local matrix

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.elements.stop - self.elements.start

    @property
    def stop(self) -> int:
        """The end of the elements, counted as `start`."""
        return self.start + self.numel


@dataclass(frozen=True)
class OwnedMatrix:
    """A matrix, its pieces, and the rank that computes its update."""

    matrix: Matrix
    bucket: int  # number of the bucket, over all layouts
    # pieces by index in the shard axis of the grid, in the order of the local matrix
    pieces: Mapping[int, Piece]
    owner: Coordinate
    flops: int  # FLOPs of the update


def matrices_of(
    param: LocalParam, *, splits_tensors: bool, splits_heads: bool = False
) -> list[Matrix]:
    """The matrices of a local parameter: its last two dims.

    A 3-D parameter is a stack of matrices, one per expert.

    Args:
        param: the local parameter.
        splits_tensors: False where every tensor-parallel rank treats its rows or columns as a
            matrix.
        splits_heads: whether heads are updated apart.
    """
    spec = param.spec
    shape = param.box.shape
    assert len(shape) in (2, 3), (
        f"{spec.name} of shape {shape} is neither a matrix nor a stack of matrices"
    )
    is_stack = len(shape) == 3
    first_dim = 1 if is_stack else 0  # the rows
    axis = "etp" if spec.is_expert else "tp"
    sharded_dim = None
    num_blocks = 1
    for shard in spec.shards:
        num_shards = spec.shape[shard.dim] // shape[shard.dim]
        if shard.axis == axis and splits_tensors and num_shards > 1:
            sharded_dim = shard.dim - first_dim
            num_blocks = num_shards
            break
    head_rows = spec.head_rows if splits_heads else ()
    matrices = []
    for index in range(shape[0] if is_stack else 1):
        local_shape = (shape[-2], shape[-1])
        matrices.append(Matrix(param, index, local_shape, sharded_dim, num_blocks, head_rows))
    return matrices


def assign_owners(flops: Sequence[int], sizes: Coordinate) -> list[Coordinate]:
    """The owner of every matrix: the largest first, each to the rank with the least work so far.

    >>> [owner.shard for owner in assign_owners([5, 4, 3, 2, 2], Coordinate(1, 2, 1))]
    [0, 1, 1, 0, 0]
    """
    axes = (range(sizes.replicate), range(sizes.shard), range(sizes.tensor))
    ranks = [Coordinate(*index) for index in product(*axes)]
    loads = [(0, index) for index in range(len(ranks))]  # a heap of (FLOPs, index in `ranks`)
    owners = [ranks[0]] * len(flops)
    largest_first = sorted(range(len(flops)), key=lambda index: -flops[index])
    for index in largest_first:
        load, rank = heapq.heappop(loads)
        owners[index] = ranks[rank]
        heapq.heappush(loads, (load + flops[index], rank))
    return owners


def describe_balance(matrices: Sequence[OwnedMatrix], sizes: Coordinate) -> str:
    """Describe the matrices and FLOPs per rank of a grid."""
    counts: Counter[Coordinate] = Counter()
    flops: Counter[Coordinate] = Counter()
    for owned in matrices:
        counts[owned.owner] += 1
        flops[owned.owner] += owned.flops
    num_ranks = sizes.replicate * sizes.shard * sizes.tensor
    most = max(counts.values())
    fewest = min(counts.values()) if len(counts) == num_ranks else 0
    imbalance = max(flops.values()) * num_ranks / flops.total()
    return (
        f"{len(matrices)} matrices over {count_of(num_ranks, 'rank')}, "
        f"{fewest} to {most} per rank, FLOPs of the busiest rank {imbalance:.2f} times the mean"
    )


def split_matrix(matrix: Matrix, entry: FlatRange, *, bucket: BucketLayout) -> dict[int, Piece]:
    """The pieces of a matrix by shard of its bucket."""
    length = bucket.update_numel
    first = entry.start - bucket.start + matrix.index * matrix.local_numel
    last = first + matrix.local_numel
    pieces = {}
    for number in range(first // length, -(-last // length)):
        offset = number * length
        start = max(first, offset)
        stop = min(last, offset + length)
        # Parts of one shard are adjacent in the bucket, ranks of one instance in their group.
        shard, outer = divmod(number, bucket.num_outer_shards)
        rank = outer * bucket.num_shards + shard
        pieces[rank] = Piece(start - offset, slice(start - first, stop - first))
    return pieces


def assign_matrices(
    layouts: Sequence[BufferLayout],
    *,
    sizes: Coordinate,
    flops_of: Callable[[Shape], int],
    splits_tensors: bool,
    splits_heads: bool = False,
) -> tuple[OwnedMatrix, ...]:
    """All matrices of layouts with their pieces and owners.

    Args:
        layouts: layouts of the buffers that are sharded over one grid.
        sizes: sizes of the grid.
        flops_of: FLOPs of the update of a matrix of a shape.
        splits_tensors, splits_heads: see `matrices_of`.
    """
    located = []
    for entry, bucket_index, layout in _matrix_params(layouts):
        matrices = matrices_of(
            entry.param, splits_tensors=splits_tensors, splits_heads=splits_heads
        )
        for matrix in matrices:
            located.append((matrix, bucket_index, split_matrix(matrix, entry, bucket=layout)))
    flops = []
    for matrix, _, _ in located:
        head_flops = sum(flops_of(shape) for shape in matrix.slice_shapes)
        flops.append(matrix.num_heads * head_flops)
    owners = assign_owners(flops, sizes)
    owned = []
    for (matrix, bucket, pieces), owner, cost in zip(located, owners, flops, strict=True):
        owned.append(OwnedMatrix(matrix, bucket, pieces, owner, cost))
    return tuple(owned)


def _matrix_params(
    layouts: Sequence[BufferLayout],
) -> Iterator[tuple[FlatRange, int, BucketLayout]]:
    """The parameters with matrices, as ranges of a bucket, its index and the bucket."""
    buckets = [bucket for layout in layouts for bucket in layout.buckets]
    for bucket_index, bucket in enumerate(buckets):
        for entry in bucket.params:
            if entry.param.spec.needs_whole_matrix:
                yield entry, bucket_index, bucket
