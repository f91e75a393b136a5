"""Grids of ranks with named axes, the fastest-varying first, and their arrangement from the sizes
of a configuration.

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

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from math import lcm, prod
from typing import Any

from nanotrain.config.option import flag_of
from nanotrain.config.parallel import ParallelConfig
from nanotrain.errors import TopologyError
from nanotrain.quantities import count_of


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
        return {axis: rank // self.stride(axis) % self.size(axis) for axis in self.axes}

    def rank(self, coords: Mapping[str, int]) -> int:
        """The rank at these coordinates; the inverse of `coords`, other keys are ignored."""
        return sum(coords[axis] * self.stride(axis) for axis in self.axes)

    def members(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axes` only, ascending, `rank` included."""
        coords = self.coords(rank)
        ranks = [rank - sum(coords[axis] * self.stride(axis) for axis in axes)]
        for axis in sorted(axes, key=self.axes.index):  # slower axes last, so that ranks ascend
            stride = self.stride(axis)
            ranks = [step * stride + first for step in range(self.size(axis)) for first in ranks]
        return tuple(ranks)

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Every group of ranks that differ along `axes` only, ascending; each rank is in exactly
        one.
        """
        others = (axis for axis in self.axes if axis not in axes)
        offsets = self.members(0, *axes)
        return tuple(
            tuple(first + offset for offset in offsets) for first in self.members(0, *others)
        )


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
    if not _fits(parallel, world_size):
        raise _misfit(parallel, world_size)
    dense, expert = _sizes(parallel)
    dense["dp"], expert["expert_dp"] = (
        world_size // prod(dense.values()),
        world_size // prod(expert.values()),
    )
    ranks = {"dp*cp": dense["dp"] * dense["cp"], "expert_dp": expert["expert_dp"]}
    _check_instances(parallel.num_distributed_optimizer_instances, ranks)
    if not parallel.use_tp_pp_dp_mapping:
        return _grid(dense, ("tp", "cp", "dp", "pp")), _grid(
            expert, ("etp", "ep", "expert_dp", "pp")
        )
    if has_experts:
        _check_same_stages(dense, expert)
    return _grid(dense, ("tp", "cp", "pp", "dp")), _grid(expert, ("etp", "ep", "pp", "expert_dp"))


def _sizes(parallel: ParallelConfig) -> tuple[dict[str, int], dict[str, int]]:
    """The configured sizes of the dense and the expert grid: all but dp."""
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    expert = {
        "etp": parallel.expert_tensor_parallel_size or tp,
        "ep": parallel.expert_model_parallel_size,
        "pp": pp,
    }
    return {"tp": tp, "cp": parallel.context_parallel_size, "pp": pp}, expert


def _grid(sizes: dict[str, int], axes: tuple[str, ...]) -> Grid:
    return Grid(axes, tuple(sizes[axis] for axis in axes))


def _fits(parallel: ParallelConfig, world_size: int, **changes: Any) -> bool:
    return all(
        world_size % prod(sizes.values()) == 0 for sizes in _sizes(replace(parallel, **changes))
    )


def _misfit(parallel: ParallelConfig, world_size: int) -> TopologyError:
    """The error for axes whose product does not divide the world size; the fix is one smaller axis,
    or other ranks.
    """
    dense, expert = _sizes(parallel)
    wrong = dense if world_size % prod(dense.values()) else expert
    current = dense | expert
    candidates = [
        (field, size)
        for axis, field in FIELDS.items()
        for size in range(min(current[axis] - 1, world_size), 0, -1)
    ]
    if wrong is expert:
        candidates.insert(0, ("expert_tensor_parallel_size", 1))  # whole experts, the usual layout
    fitting = (each for each in candidates if _fits(parallel, world_size, **dict([each])))
    fixes = [f"set {flag_of(field)} {size}" for field, size in islice(fitting, 1)]
    unit = lcm(prod(dense.values()), prod(expert.values()))
    shown = " x ".join(f"{axis}={size}" for axis, size in wrong.items() if size > 1)
    return TopologyError(
        f"{count_of(world_size, 'rank')} cannot form {shown}",
        why=f"{'*'.join(wrong)} = {prod(wrong.values())} must divide the world size",
        fix=" or ".join([*fixes, f"run on {count_of(unit * -(-world_size // unit), 'rank')}"]),
    )


def _check_same_stages(dense: dict[str, int], expert: dict[str, int]) -> None:
    """With pp before dp, a rank has the same stage in both grids only if pp has the same stride in
    both.
    """
    if dense["pp"] == 1 or dense["dp"] == expert["expert_dp"]:
        return
    flag = flag_of("use_tp_pp_dp_mapping")
    raise TopologyError(
        f"{flag} cannot arrange dp={dense['dp']} and expert_dp={expert['expert_dp']} with pp={dense['pp']}",
        why=f"tp*cp = {dense['tp'] * dense['cp']} and etp*ep = {expert['etp'] * expert['ep']} differ, "
        "so a rank would hold the experts of one stage and the other layers of another",
        fix=f"drop {flag} or choose sizes with tp*cp = etp*ep",
    )


def _check_instances(instances: int, ranks: dict[str, int]) -> None:
    """The number of optimizer instances must divide the data-parallel ranks of both grids, given by
    name.
    """
    flag = flag_of("num_distributed_optimizer_instances")
    for name, count in ranks.items():
        if count % instances:
            fitting = max(
                n for n in range(1, instances) if all(other % n == 0 for other in ranks.values())
            )
            raise TopologyError(
                f"{instances} optimizer instances cannot share {name} = {count_of(count, 'rank')}",
                why=f"{flag} must divide "
                + " and ".join(f"{name} = {count}" for name, count in ranks.items()),
                fix=f"set {flag} {fitting}",
            )
