"""docs/known_bugs.md: each of its bugs is planted by a row of tests/mutants/, which names a test
that fails with it.
"""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "known_bugs.md").read_text()
ROWS = re.findall(
    r"^\|(.+)\|(.*)\| `([a-z_]+)/([a-z0-9-]+)` \| `([^`]+)` \| (?:yes|-) \| (?:yes|-) \|$",
    PAGE,
    flags=re.MULTILINE,
)


def test_every_row_of_the_page_is_checked() -> None:
    assert len(ROWS) == PAGE.count("\n| ") - PAGE.count("\n| bug |") > 20


@pytest.mark.parametrize(
    ("package", "name", "test"), [row[2:] for row in ROWS], ids=[row[3] for row in ROWS]
)
def test_the_bug_is_planted_and_the_test_is_among_those_that_should_fail(
    package: str, name: str, test: str
) -> None:
    rows = yaml.safe_load((ROOT / "tests" / "mutants" / f"{package}.yaml").read_text())
    (row,) = [row for row in rows if row["name"] == name]
    assert test in {each.split("::")[0] for each in row["tests"]} and (ROOT / test).is_file()


def test_the_laws_list_the_same_bugs() -> None:
    listed = (
        (ROOT / "tests" / "laws" / "README.md").read_text().partition("**Known silent bugs.**")[2]
    )
    assert set(re.findall(r"`([a-z_]+/[a-z0-9-]+)`", listed.partition("\n\n")[0])) == {
        f"{row[2]}/{row[3]}" for row in ROWS
    }
