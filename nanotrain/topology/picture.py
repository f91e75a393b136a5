"""The output of `nanotrain topology`: the rank grids as a picture and a table of all groups.

Large worlds are shortened with `..`; the JSON form is always complete.
"""

import json
from collections.abc import Sequence
from dataclasses import replace

from nanotrain.config.parallel import ParallelConfig
from nanotrain.topology.grid import Grid
from nanotrain.topology.grid_drawing import GAP, draw_grid
from nanotrain.topology.groups import EXPERT_GROUPS, GROUP_NAMES, GroupName, Ranks
from nanotrain.topology.topology import Topology

MAX_WIDTH = 110  # characters of a group line
UNSHARDED_NOTE = (
    "_shard and _replicate as in a sharded strategy; with no_shard every shard group is a single "
    "rank"
)


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
        lines = []
        for name in used_groups(has_experts):
            lines.append(f"  {json.dumps(name)}: {json.dumps(topology.groups_of(name))}")
        return "{\n" + ",\n".join(lines) + "\n}"
    picture = render(topology, has_experts=has_experts)
    return picture if is_sharded else f"{picture}\n\n{UNSHARDED_NOTE}"


def render(topology: Topology, *, has_experts: bool = True) -> str:
    """The rank grids and all groups as text for a terminal."""
    parts = [sizes_line(topology.dense), draw_grid(topology.dense)]
    if has_experts and topology.expert.sizes != topology.dense.sizes:
        parts.append(f"experts: {sizes_line(topology.expert)}")
        parts.append(draw_grid(topology.expert))
    parts.append(group_table(topology, used_groups(has_experts)))
    return "\n\n".join(parts)


def used_groups(has_experts: bool) -> tuple[GroupName, ...]:
    """The names of the groups that are used."""
    return tuple(name for name in GROUP_NAMES if has_experts or name not in EXPERT_GROUPS)


def sizes_line(grid: Grid) -> str:
    """The sizes of a grid: 8 ranks = tp 2 x cp 1 x dp 2 x pp 2."""
    sizes = " x ".join(f"{axis} {size}" for axis, size in zip(grid.axes, grid.sizes, strict=True))
    return f"{grid.world_size} {'rank' if grid.world_size == 1 else 'ranks'} = {sizes}"


def group_table(topology: Topology, group_names: Sequence[GroupName]) -> str:
    """One line per group name: number, size and ranks of its groups."""
    counts = {}
    ranks = {}
    for name in group_names:
        groups = topology.groups_of(name)
        size = len(groups[0])
        counts[name] = f"{len(groups)} x {size}"
        ranks[name] = "single ranks" if size == 1 else ranks_text(groups)
    name_width = max(map(len, counts))
    count_width = max(map(len, counts.values()))
    lines = [f"{'group'.ljust(name_width)}  {'number x size'.rjust(count_width)}"]
    for name, count in counts.items():
        lines.append(f"{name.ljust(name_width)}  {count.rjust(count_width)}  {ranks[name]}")
    return "\n".join(lines)


def ranks_text(groups: tuple[Ranks, ...]) -> str:
    """The first groups, as many as fit on a line, at least one."""
    text = group_text(groups[0])
    for index, group in enumerate(groups[1:], start=1):
        longer = f"{text}  {group_text(group)}"
        if len(longer) > MAX_WIDTH:
            return f"{text}  {GAP} {len(groups) - index} more"
        text = longer
    return text


def group_text(group: Ranks) -> str:
    """The ranks of a group in brackets, without the middle of a long one.

    >>> group_text((0, 8, 16, 24, 32, 40, 48, 56, 64, 72))
    '[0 8 16 .. 72]'
    """
    ranks = [str(rank) for rank in group]
    if len(ranks) > 8:
        ranks = [*ranks[:3], GAP, ranks[-1]]
    return f"[{' '.join(ranks)}]"
