"""The output of `nanotrain topology`: the rank grids as a picture and a table of all groups.

Large worlds are shortened with `..`; the JSON form is always complete.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from nanotrain.config.parallel import ParallelConfig
from nanotrain.topology.grid import Grid
from nanotrain.topology.groups import EXPERT_GROUPS, GROUP_NAMES, GroupName, Ranks
from nanotrain.topology.topology import Topology

MAX_WIDTH = 110  # characters of a group line
MAX_COLUMNS, MAX_ROWS, MAX_STAGES = 8, 8, 4
GAP = ".."
UNSHARDED_NOTE = "\n\n_shard and _replicate as in a sharded strategy; with no_shard every shard group is a single rank"


def run_topology(
    parallel: ParallelConfig, world_size: int, *, as_json: bool, has_experts: bool = True
) -> str:
    """The output of `nanotrain topology`; without experts their groups are left out.

    With `no_shard` every shard group is a single rank, so dp_shard and dp_replicate are shown as
    `optim` forms them.

    `as_json` returns an object of group name -> list of rank lists instead of the picture.

    Raises:
        TopologyError: the ranks cannot form the groups.
    """
    is_sharded = parallel.data_parallel_sharding_strategy != "no_shard"
    if not is_sharded:
        parallel = replace(parallel, data_parallel_sharding_strategy="optim")
    topology = Topology.of(parallel, world_size, has_experts=has_experts)
    if as_json:
        names = used_groups(has_experts)
        lines = (f"  {json.dumps(name)}: {json.dumps(topology.groups_of(name))}" for name in names)
        return "{\n" + ",\n".join(lines) + "\n}"
    return render(topology, has_experts=has_experts) + ("" if is_sharded else UNSHARDED_NOTE)


def render(topology: Topology, *, has_experts: bool = True) -> str:
    """The rank grids and all groups as text for a terminal."""
    parts = [_sizes_line(topology.dense), _draw(topology.dense)]
    if has_experts and topology.expert.sizes != topology.dense.sizes:
        parts += [_sizes_line(topology.expert, prefix="experts: "), _draw(topology.expert)]
    return "\n\n".join([*parts, _group_table(topology, used_groups(has_experts))])


def used_groups(has_experts: bool) -> tuple[GroupName, ...]:
    """The names of the groups that are used."""
    return tuple(name for name in GROUP_NAMES if has_experts or name not in EXPERT_GROUPS)


def _sizes_line(grid: Grid, *, prefix: str = "") -> str:
    sizes = " x ".join(f"{axis} {size}" for axis, size in zip(grid.axes, grid.sizes, strict=True))
    return f"{prefix}{grid.world_size} {'rank' if grid.world_size == 1 else 'ranks'} = {sizes}"


def _draw(grid: Grid) -> str:
    """The ranks of a grid: one paragraph per stage, one row per data-parallel rank, the two fastest
    axes as columns.

              cp0          cp1
             tp0  tp1     tp0  tp1
    pp0
      dp0      0    1       2    3
    """
    fast, block, row = (axis for axis in grid.axes if axis != "pp")
    columns = shorten(range(grid.size(fast)), MAX_COLUMNS)
    blocks = shorten(range(grid.size(block)), max(2, MAX_COLUMNS // len(columns)))
    width = 2 + max(len(f"{fast}{grid.size(fast) - 1}"), len(str(grid.world_size - 1)))
    margin = 4 + len(f"{row}{grid.size(row) - 1}")

    def line(name: str, cells: Callable[[int], str]) -> str:
        return name.ljust(margin) + "   ".join(GAP if b is None else cells(b) for b in blocks)

    def header(_: int) -> str:
        return "".join((GAP if c is None else f"{fast}{c}").rjust(width) for c in columns)

    def ranks(coords: dict[str, int], b: int) -> str:
        cells = (
            GAP if c is None else str(grid.rank({**coords, block: b, fast: c})) for c in columns
        )
        return "".join(cell.rjust(width) for cell in cells)

    lines = (
        [line("", lambda b: f"{block}{b}".center(width * len(columns)))]
        if grid.size(block) > 1
        else []
    )
    lines.append(line("", header))
    for stage in shorten(range(grid.size("pp")), MAX_STAGES):
        if stage is None:
            lines.append(GAP)
            continue
        lines.append(f"pp{stage}")
        for replica in shorten(range(grid.size(row)), MAX_ROWS):
            if replica is None:
                lines.append(f"  {GAP}")
                continue
            lines.append(line(f"  {row}{replica}", partial(ranks, {"pp": stage, row: replica})))
    return "\n".join(line.rstrip() for line in lines)


def shorten(items: Sequence[int], limit: int) -> list[int | None]:
    """The items; if more than `limit`, the first ones, None for a gap, and the last.

    >>> shorten(range(9), 4)
    [0, 1, None, 8]
    """
    if len(items) <= limit:
        return list(items)
    return [*items[: max(1, limit - 2)], None, items[-1]]


def _group_table(topology: Topology, group_names: Sequence[GroupName]) -> str:
    """One line per group name: number, size and ranks of its groups."""
    rows = []
    for name in group_names:
        groups = topology.groups_of(name)
        count = f"{len(groups)} x {len(groups[0])}"
        rows.append((name, count, "single ranks" if len(groups[0]) == 1 else ranks_text(groups)))
    names, counts = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    lines = (f"{name.ljust(names)}  {count.rjust(counts)}  {ranks}" for name, count, ranks in rows)
    return f"{'group'.ljust(names)}  {'number x size'.rjust(counts)}\n" + "\n".join(lines)


def ranks_text(groups: tuple[Ranks, ...]) -> str:
    """The first groups, as many as fit on a line, at least one."""
    text = _group_text(groups[0])
    for index, group in enumerate(groups[1:], start=1):
        longer = f"{text}  {_group_text(group)}"
        if len(longer) > MAX_WIDTH:
            return f"{text}  {GAP} {len(groups) - index} more"
        text = longer
    return text


def _group_text(group: Ranks) -> str:
    """The ranks of a group in brackets, without the middle of a long one.

    >>> _group_text((0, 8, 16, 24, 32, 40, 48, 56, 64, 72))
    '[0 8 16 .. 72]'
    """
    ranks = [str(rank) for rank in group]
    return f"[{' '.join(ranks if len(ranks) <= 8 else [*ranks[:3], GAP, ranks[-1]])}]"
