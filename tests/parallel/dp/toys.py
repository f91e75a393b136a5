"""A module of odd sizes whose gradients are known in closed form, and a data-parallel wrapper of
it.
"""

import math
from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor, nn

from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.parallel.dp.data_parallel import DataParallel
from nanotrain.parallel.dp.layout import BufferLayout, LayoutRules, plan_layout
from nanotrain.parallel.dp.options import STRATEGIES, DataParallelOptions, ReduceGroups
from nanotrain.precision.dtypes import Precision
from nanotrain.spec.boxes import Box
from nanotrain.spec.params import LocalParam, Normal, ParamSpec

# Products and lengths that neither 64 nor a number of ranks divides.
SHAPES = ((7, 19), (13,), (11, 23), (5, 5, 5), (301,), (2, 3))
# Strategies whose modules may run in any order; tests of optim_grads_params are in test_units.py.
RESIDENT_STRATEGIES = [name for name, strategy in STRATEGIES.items() if not strategy.shard_params]
BUCKET_SIZE = 200  # three buckets of these units, all of them padded
NUM_BUCKETS = 3


class Unit(nn.Module):
    """A weight whose gradient is `scale * pattern`."""

    def __init__(self, shape: tuple[int, ...], *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype))

    def forward(self, scale: float) -> Tensor:
        return (self.weight.float() * pattern_of(self.weight)).sum() * scale


class Toy(nn.Module):
    """Units that run in the order of the argument; gradients are ready in the opposite order.

    `head_rows` are the slices of one head in matrices with a multiple of so many rows.
    """

    def __init__(
        self,
        *,
        dtype: torch.dtype = torch.float32,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        head_rows: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.head_rows = head_rows
        self.units = nn.ModuleList(Unit(shape, dtype=dtype) for shape in shapes)

    def forward(self, scale: float, order: Iterable[int] | None = None) -> Tensor:
        total = torch.zeros(())
        for index in range(len(self.units)) if order is None else order:
            total = total + self.units[index](scale)
        return total


def pattern_of(weight: Tensor) -> Tensor:
    """Small integers, another row of them for every shape, so that sums are exact and a shifted
    element shows.
    """
    return _row_of(weight.numel()).view(weight.shape)


@cache
def _row_of(numel: int) -> Tensor:
    return ((torch.arange(numel) + numel) % 11 + 1).float()


def local_params(stage: nn.Module, *, tied: Sequence[str] = ()) -> list[LocalParam]:
    head_rows: tuple[int, ...] = getattr(stage, "head_rows", ())

    def has_heads(p: nn.Parameter) -> bool:
        return p.ndim == 2 and bool(head_rows) and len(p) % sum(head_rows) == 0

    return [
        LocalParam(
            ParamSpec(
                name,
                tuple(p.shape),
                dtype="fp32",
                init=Normal(0.02),
                weight_decay=p.ndim >= 2,
                unit=name.removesuffix(".weight"),
                is_shared=name in tied,
                needs_whole_matrix=p.ndim >= 2,
                head_rows=head_rows if has_heads(p) else (),
            ),
            Box.full(tuple(p.shape)),
        )
        for name, p in stage.named_parameters()
    ]


def groups_of(ctx: ParallelContext, strategy: str) -> ReduceGroups:
    """The groups of a strategy in a world of a sharded strategy; `no_shard` replicates over all
    ranks.
    """
    if STRATEGIES[strategy].shard_optim:
        return ReduceGroups(ctx.group("dp_shard"), ctx.group("dp_replicate"))
    return ReduceGroups(Group.single_rank("dp_shard", ctx.rank), ctx.group("dp_cp"))


def layout_of(
    stage: nn.Module, *, num_shards: int = 1, bucket_size: int = BUCKET_SIZE
) -> BufferLayout:
    return plan_layout(
        local_params(stage), LayoutRules(num_shards=num_shards, bucket_size=bucket_size)
    )


def wrap(
    ctx: ParallelContext,
    stage: nn.Module,
    *,
    strategy: str,
    overlap: bool = False,
    dtype: torch.dtype = torch.float32,
    bucket_size: int = BUCKET_SIZE,
) -> DataParallel:
    groups = groups_of(ctx, strategy)
    options = DataParallelOptions(
        strategy=STRATEGIES[strategy],
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and STRATEGIES[strategy].shard_optim,
    )
    return DataParallel(
        stage,
        layout_of(stage, num_shards=groups.shard.size, bucket_size=bucket_size),
        groups=groups,
        options=options,
        precision=Precision(params=dtype),
        device=torch.device("cuda" if next(stage.parameters()).is_cuda else "cpu"),
    )


def backward(parallel: DataParallel, loss: Tensor, *, is_last: bool = True) -> None:
    parallel.backward_begins(is_last=is_last)
    loss.backward()
    parallel.backward_ended()


def expected_shards(parallel: DataParallel, grads: dict[str, Tensor]) -> list[Tensor]:
    """Expected shard of every bucket on this rank, zero in gaps and padding, from global gradients
    by name.
    """
    shards = []
    for bucket in parallel.buckets:
        shard = torch.zeros(bucket.layout.shard_numel)
        for part in bucket.layout.update_ranges(parallel.groups.shard.index):
            shard[part.elements] = grads[part.name].flatten()[
                part.param_start : part.param_start + part.numel
            ]
        shards.append(shard)
    return shards


def assert_shards(parallel: DataParallel, grads: dict[str, Tensor]) -> None:
    for number, (bucket, expected) in enumerate(
        zip(parallel.buckets, expected_shards(parallel, grads), strict=True)
    ):
        assert torch.equal(bucket.grads.shard, expected), (
            f"bucket {number} of {parallel.options.strategy}"
        )


def numel_of(shapes: Sequence[tuple[int, ...]] = SHAPES) -> int:
    return sum(math.prod(shape) for shape in shapes)
