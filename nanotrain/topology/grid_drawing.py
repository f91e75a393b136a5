"""A grid of ranks as text, and lists of ranks without their middle.

draw_grid   the ranks of a grid in rows and columns
shorten     the first ranks, a gap, and the last
"""

from collections.abc import Callable, Sequence

from nanotrain.topology.grid import Grid

MAX_COLUMNS = 8
MAX_ROWS = 8
MAX_STAGES = 4
GAP = ".."


def draw_grid(grid: Grid) -> str:
    """Draw a grid: a paragraph per stage, a row per dp rank, the two fastest axes as columns.

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
        # ranks of `fast` are columns, beside each other in blocks of the second axis; the third
        # axis is drawn as rows
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
        """One line: a name, then the text that `draw_block` returns for every block."""
        blocks = [GAP if block is None else draw_block(block) for block in self.blocks]
        return name.ljust(self.margin) + "   ".join(blocks)

    def cells(self, draw_cell: Callable[[int], str]) -> str:
        """One line of a block: the result of a function for every column."""
        cells = [GAP if column is None else draw_cell(column) for column in self.columns]
        return "".join(cell.rjust(self.width) for cell in cells)

    def header(self) -> list[str]:
        """Two header lines: the names of the blocks, if there are several, and of the columns."""
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
