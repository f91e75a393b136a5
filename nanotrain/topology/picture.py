"""The output of `nanotrain topology`: the rank grids as a picture and a table of all groups.

Large worlds are shortened with `..`; the JSON form is always complete.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from nanotrain.config.parallel import ParallelConfig
from nanotrain.topology.grid import Grid
from nanotrain.topology.groups import EXPERT_GROUPS, GROUP_NAMES, GroupName, Ranks
from nanotrain.topology.topology import Topology

MAX_WIDTH = 110  # characters of a group line
MAX_COLUMNS = 8
MAX_ROWS = 8
MAX_STAGES = 4
GAP = ".."
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


def draw_grid(grid: Grid) -> str:
    """The ranks of a grid: one paragraph per stage, one row per data-parallel rank, the two fastest
    axes as columns.

              cp0          cp1
             tp0  tp1     tp0  tp1
    pp0
      dp0      0    1       2    3
    """
    page = GridPage(grid)
    lines = page.header()
    for stage in shorten(range(grid.size("pp")), MAX_STAGES):
        if stage is None:
            lines.append(GAP)
            continue
        lines.append(f"pp{stage}")
        for replica in shorten(range(grid.size(page.row)), MAX_ROWS):
            lines.append(f"  {GAP}" if replica is None else page.row_of(stage, replica))
    return "\n".join(line.rstrip() for line in lines)


class GridPage:
    """The columns of a drawn grid: blocks of the second axis, each of ranks of the first one."""

    def __init__(self, grid: Grid) -> None:
        fast, block, row = (axis for axis in grid.axes if axis != "pp")
        self.grid = grid
        self.fast = fast
        self.block = block
        self.row = row
        self.columns = shorten(range(grid.size(fast)), MAX_COLUMNS)
        most_blocks = max(2, MAX_COLUMNS // len(self.columns))
        self.blocks = shorten(range(grid.size(block)), most_blocks)
        longest_name = len(f"{fast}{grid.size(fast) - 1}")
        self.width = 2 + max(longest_name, len(str(grid.world_size - 1)))
        self.margin = 4 + len(f"{row}{grid.size(row) - 1}")

    def line(self, name: str, draw_block: Callable[[int], str]) -> str:
        """One line: a name, then what a function draws for every block."""
        blocks = [GAP if block is None else draw_block(block) for block in self.blocks]
        return name.ljust(self.margin) + "   ".join(blocks)

    def cells(self, draw_cell: Callable[[int], str]) -> str:
        """One line of a block: what a function draws for every column."""
        cells = [GAP if column is None else draw_cell(column) for column in self.columns]
        return "".join(cell.rjust(self.width) for cell in cells)

    def header(self) -> list[str]:
        """The names of the columns, under those of several blocks."""
        lines = []
        if self.grid.size(self.block) > 1:
            block_width = self.width * len(self.columns)
            lines.append(self.line("", lambda block: f"{self.block}{block}".center(block_width)))
        names = self.cells(lambda column: f"{self.fast}{column}")
        lines.append(self.line("", lambda _: names))
        return lines

    def row_of(self, stage: int, replica: int) -> str:
        """The ranks of a stage and a replica."""
        coords = {"pp": stage, self.row: replica}

        def draw_block(block: int) -> str:
            at_block = coords | {self.block: block}
            return self.cells(lambda column: str(self.grid.rank(at_block | {self.fast: column})))

        return self.line(f"  {self.row}{replica}", draw_block)


def shorten(items: Sequence[int], limit: int) -> list[int | None]:
    """The items; if more than `limit`, the first ones, None for a gap, and the last.

    >>> shorten(range(9), 4)
    [0, 1, None, 8]
    """
    if len(items) <= limit:
        return list(items)
    return [*items[: max(1, limit - 2)], None, items[-1]]


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
