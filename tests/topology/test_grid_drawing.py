"""Grids of ranks as text."""

from nanotrain.topology.grid import Grid
from nanotrain.topology.grid_drawing import MAX_COLUMNS, MAX_ROWS, draw_grid, shorten


def test_a_grid_has_a_row_per_replica_and_columns_of_the_two_fastest_axes() -> None:
    assert draw_grid(Grid(("tp", "cp", "dp", "pp"), (2, 2, 2, 1))).splitlines() == [
        "          cp0          cp1",
        "         tp0  tp1     tp0  tp1",
        "pp0",
        "  dp0      0    1       2    3",
        "  dp1      4    5       6    7",
    ]


def test_long_axes_are_drawn_without_their_middle() -> None:
    lines = draw_grid(Grid(("tp", "cp", "dp", "pp"), (16, 1, 16, 1))).splitlines()
    assert len(lines) == 2 + MAX_ROWS and lines[-2].strip() == ".."
    assert len(lines[-1].split()) == 1 + MAX_COLUMNS
    assert lines[-1].split()[-2:] == ["..", "255"]


def test_a_short_list_is_complete_and_a_long_one_ends_with_its_last_item() -> None:
    assert shorten(range(3), 3) == [0, 1, 2]
    assert shorten(range(100), 3) == [0, None, 99]
