"""Grids of ranks with named axes, the fastest-varying first, and how a configuration arranges them.

    Grid(("tp", "pp"), (2, 2))        pp 0: ranks 0 1
                                      pp 1: ranks 2 3

A rank is the mixed-radix number of its coordinates. The methods about one rank compute with the
strides of the axes, so their cost does not depend on the number of ranks; `groups` lists all of
them.

`arrange` returns a dense and an expert grid, or refuses sizes that do not fit:

    dense   tp + TP*(cp + CP*(dp + DP*pp))                        order tp-cp-ep-dp-pp
    expert  etp + ETP*(ep + EP*(expert_dp + EXPERT_DP*pp))

dp and expert_dp are the world size divided by the other axes. `--use-tp-pp-dp-mapping` swaps dp and
pp in both grids.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import gcd, lcm, prod
from typing import Any

from nanotrain.config.option import flag_of
from nanotrain.config.parallel import ParallelConfig
from nanotrain.errors import TopologyError
from nanotrain.quantities import count_of, round_up


@dataclass(frozen=True)
class Grid:
    """Ranks 0 .. world_size-1 arranged along named axes.

    >>> grid = Grid(("tp", "dp", "pp"), (2, 2, 2))
    >>> grid.coords(6)
    {'tp': 0, 'dp': 1, 'pp': 1}
    >>> grid.groups("dp")
    ((0, 2), (1, 3), (4, 6), (5, 7))
    """

    axes: tuple[str, ...]  # names, the fastest-varying axis first
    sizes: tuple[int, ...]  # ranks along each axis

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.sizes)

    def size(self, axis: str) -> int:
        """Ranks along an axis."""
        return self.sizes[self.axes.index(axis)]

    def stride(self, axis: str) -> int:
        """Difference in rank between neighbours along an axis."""
        return prod(self.sizes[: self.axes.index(axis)])

    def coords(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank on every axis."""
        assert 0 <= rank < self.world_size, (
            f"rank {rank} is outside a grid of {self.world_size} ranks"
        )
        coords = {}
        for axis, size in zip(self.axes, self.sizes, strict=True):
            coords[axis] = rank % size
            rank //= size
        return coords

    def rank(self, coords: Mapping[str, int]) -> int:
        """The rank at these coordinates; the inverse of `coords`, other keys are ignored."""
        rank = 0
        stride = 1
        for axis, size in zip(self.axes, self.sizes, strict=True):
            rank += coords[axis] * stride
            stride *= size
        return rank

    def members(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axes` only, ascending, `rank` included."""
        coords = self.coords(rank)
        first = rank
        for axis in axes:
            first -= coords[axis] * self.stride(axis)
        ranks = [first]
        for axis in sorted(axes, key=self.axes.index):  # slower axes last, so that ranks ascend
            length = self.stride(axis) * self.size(axis)
            fast_ranks = ranks
            ranks = []
            for offset in range(0, length, self.stride(axis)):
                ranks += [rank + offset for rank in fast_ranks]
        return tuple(ranks)

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Every group of ranks that differ along `axes` only, ascending, each rank in one."""
        others = (axis for axis in self.axes if axis not in axes)
        offsets = self.members(0, *axes)
        groups = []
        for first in self.members(0, *others):
            groups.append(tuple(first + offset for offset in offsets))
        return tuple(groups)


# the axes that a flag sizes, in the order in which a smaller size is suggested
FIELDS = {
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "tp": "tensor_model_parallel_size",
}


def arrange(
    parallel: ParallelConfig, world_size: int, *, has_experts: bool = True
) -> tuple[Grid, Grid]:
    """Arrange ranks in the dense and the expert grid.

    Args:
        parallel: sizes of the axes.
        world_size: number of ranks.
        has_experts: the expert grid is used, so that a rank must have the same stage in both.

    Raises:
        TopologyError: the ranks cannot form the groups; names the numbers and a fix.
    """
    if world_size < 1:
        raise TopologyError(f"{world_size} ranks cannot run a job", fix="run on at least 1 rank")
    dense = dense_sizes(parallel)
    expert = expert_sizes(parallel)
    if not divides(dense, world_size) or not divides(expert, world_size):
        raise misfit_error(parallel, world_size)
    dense["dp"] = world_size // prod(dense.values())
    expert["expert_dp"] = world_size // prod(expert.values())
    ranks = {"dp*cp": dense["dp"] * dense["cp"], "expert_dp": expert["expert_dp"]}
    check_instances(parallel.num_distributed_optimizer_instances, ranks)
    if not parallel.use_tp_pp_dp_mapping:
        dense_grid = grid_of(dense, ("tp", "cp", "dp", "pp"))
        return dense_grid, grid_of(expert, ("etp", "ep", "expert_dp", "pp"))
    if has_experts:
        check_same_stages(dense, expert)
    dense_grid = grid_of(dense, ("tp", "cp", "pp", "dp"))
    return dense_grid, grid_of(expert, ("etp", "ep", "pp", "expert_dp"))


def dense_sizes(parallel: ParallelConfig) -> dict[str, int]:
    """The configured sizes of the dense grid: all but dp."""
    return {
        "tp": parallel.tensor_model_parallel_size,
        "cp": parallel.context_parallel_size,
        "pp": parallel.pipeline_model_parallel_size,
    }


def expert_sizes(parallel: ParallelConfig) -> dict[str, int]:
    """The configured sizes of the expert grid: all but expert_dp."""
    tp = parallel.tensor_model_parallel_size
    return {
        "etp": parallel.expert_tensor_parallel_size or tp,
        "ep": parallel.expert_model_parallel_size,
        "pp": parallel.pipeline_model_parallel_size,
    }


def grid_of(sizes: dict[str, int], axes: tuple[str, ...]) -> Grid:
    """The grid of these sizes with its axes in order."""
    return Grid(axes, tuple(sizes[axis] for axis in axes))


def divides(sizes: dict[str, int], world_size: int) -> bool:
    """Whether the product of some axes divides the number of ranks."""
    return world_size % prod(sizes.values()) == 0


def misfit_error(parallel: ParallelConfig, world_size: int) -> TopologyError:
    """The error for axes whose product does not divide the world size.

    The fix is one smaller axis, or other ranks.
    """
    dense = dense_sizes(parallel)
    expert = expert_sizes(parallel)
    wrong = expert if divides(dense, world_size) else dense
    fixes = []
    for field, size in smaller_sizes(parallel, world_size):
        change: dict[str, Any] = {field: size}
        if fits(replace(parallel, **change), world_size):
            fixes.append(f"set {flag_of(field)} {size}")
            break
    unit = lcm(prod(dense.values()), prod(expert.values()))
    next_world_size = round_up(world_size, unit)
    fixes.append(f"run on {count_of(next_world_size, 'rank')}")
    axes = [f"{axis}={size}" for axis, size in wrong.items() if size > 1]
    layout = " x ".join(axes)
    factors = "*".join(wrong)
    product = prod(wrong.values())
    return TopologyError(
        f"{count_of(world_size, 'rank')} cannot form {layout}",
        why=f"{factors} = {product} must divide the world size",
        fix=" or ".join(fixes),
    )


def fits(parallel: ParallelConfig, world_size: int) -> bool:
    """Whether the axes of both grids divide the number of ranks."""
    if not divides(dense_sizes(parallel), world_size):
        return False
    return divides(expert_sizes(parallel), world_size)


def smaller_sizes(parallel: ParallelConfig, world_size: int) -> Iterator[tuple[str, int]]:
    """Pairs of a field and a smaller size to try where the world does not fit, the best first."""
    current = dense_sizes(parallel) | expert_sizes(parallel)
    if divides(dense_sizes(parallel), world_size):
        yield "expert_tensor_parallel_size", 1  # whole experts, the usual layout
    for axis, field in FIELDS.items():
        for size in range(min(current[axis] - 1, world_size), 0, -1):
            yield field, size


def check_same_stages(dense: dict[str, int], expert: dict[str, int]) -> None:
    """Check that a rank has the same stage in both grids where pp is before dp.

    It has where pp has the same stride in both.
    """
    if dense["pp"] == 1 or dense["dp"] == expert["expert_dp"]:
        return
    flag = flag_of("use_tp_pp_dp_mapping")
    dense_stride = dense["tp"] * dense["cp"]
    expert_stride = expert["etp"] * expert["ep"]
    raise TopologyError(
        f"{flag} cannot arrange dp={dense['dp']} and expert_dp={expert['expert_dp']} with "
        f"pp={dense['pp']}",
        why=f"tp*cp = {dense_stride} and etp*ep = {expert_stride} differ, so a rank would hold the "
        "experts of one stage and the other layers of another",
        fix=f"drop {flag} or choose sizes with tp*cp = etp*ep",
    )


def check_instances(instances: int, ranks: dict[str, int]) -> None:
    """Check that optimizer instances divide the data-parallel ranks of both named grids."""
    flag = flag_of("num_distributed_optimizer_instances")
    common = gcd(*ranks.values())
    named = " and ".join(f"{name} = {count}" for name, count in ranks.items())
    for name, count in ranks.items():
        if count % instances == 0:
            continue
        divisors = [size for size in range(1, instances) if common % size == 0]
        shared = f"{name} = {count_of(count, 'rank')}"
        raise TopologyError(
            f"{instances} optimizer instances cannot share {shared}",
            why=f"{flag} must divide {named}",
            fix=f"set {flag} {max(divisors)}",
        )
