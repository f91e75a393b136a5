"""The columns of docs/known_bugs.md that say what finds a bug, beside the bugs that are planted."""

import re
from pathlib import Path

import pytest
import yaml

from tests.laws.test_invariant_bugs import BUGS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/known_bugs.md"


def rows() -> dict[str, list[str]]:
    """The last two columns by the name of the planted bug."""
    table = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found = re.fullmatch(r"`(\w+/[\w-]+)`", cells[2]) if len(cells) == 6 else None
        if found:
            table[found[1]] = cells[4:]
    return table


def by_types() -> set[str]:
    planted = yaml.safe_load((ROOT / "tests/prove/bugs.yaml").read_text())
    return {row["mutant"] for row in planted if "mutant" in row}


@pytest.mark.parametrize(("column", "planted"), [(0, by_types()), (1, set(BUGS))])
def test_a_column_names_the_bugs_that_are_planted(column: int, planted: set[str]) -> None:
    table = rows()
    assert len(table) > 25
    caught = {name for name, cells in table.items() if cells[column] == "yes"}
    assert caught == planted & table.keys()
    assert all(cells[column] in ("yes", "-") for cells in table.values())
