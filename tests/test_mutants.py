"""scripts/mutants, and the bugs of tests/mutants/: each can still be planted, and names tests that
exist.
"""

import ast
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.scripts import load_script

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests/mutants"
MIN_PER_PACKAGE = 2


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("mutants")


def test_every_bug_is_planted_at_one_place_and_can_be_imported(script: ModuleType) -> None:
    mutants = script.load(FOLDER)
    assert len({each.name for each in mutants}) == len(mutants) >= 60
    for each in mutants:
        text = (ROOT / each.file).read_text()
        planted = each.applied_to(text)  # ends the program where the text is not there once
        assert planted != text, each.name
        ast.parse(planted)


def test_the_tests_of_every_bug_exist(script: ModuleType) -> None:
    for mutant in script.load(FOLDER):
        for test in mutant.tests:
            file, _, function = test.partition("::")
            assert (ROOT / file).exists(), f"{mutant.name}: {file}"
            name = function.partition("[")[0]
            assert not name or re.search(rf"def {name}\(", (ROOT / file).read_text()), (
                f"{mutant.name}: {test}"
            )


def test_every_package_has_bugs(script: ModuleType) -> None:
    modules = [file for file in (ROOT / "nanotrain").rglob("*.py") if file.name != "__init__.py"]
    folders = {file.parent.relative_to(ROOT / "nanotrain").parts for file in modules}
    names = {
        "_".join(parts[:2] if parts[:1] == ("parallel",) else parts[:1]) or "nanotrain"
        for parts in folders
    }
    bugs = [mutant.package for mutant in script.load(FOLDER)]
    assert names == {*bugs}
    assert all(bugs.count(name) >= MIN_PER_PACKAGE for name in names)


def test_a_bug_is_caught_by_a_test_that_passes_without_it(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = (
        "from code_under_test import *\n"
        "def test_sum(): assert plus(2, 2) == 4\n"
        "def test_broken(): assert not 'always'\n"
    )
    for name, text in {
        "code_under_test.py": "def plus(a, b): return a + b\n",
        "test_it.py": tests,
    }.items():
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)

    def mutant(replace: str, test: str) -> object:
        return script.Mutant(
            "toy", replace, "wrong", "code_under_test.py", "a + b", replace, [f"test_it.py::{test}"]
        )

    mutants = [mutant("a - b", "test_sum"), mutant("a * b", "test_sum"), mutant("b", "test_broken")]
    assert script.run(mutants, tmp_path, processes=1) == 1
    output = capsys.readouterr().out

    assert "| toy/a - b | wrong | test_it.py::test_sum |" in output
    assert "| toy/a * b | wrong |  |" in output
    assert "test_it.py::test_broken fails without a bug too" in output
    assert "1 of 3 bugs caught: 33.3%" in output
    assert (tmp_path / "code_under_test.py").read_text() == "def plus(a, b): return a + b\n"


def test_the_table_of_results_has_every_package_and_its_survivors(script: ModuleType) -> None:
    text = (FOLDER / "README.md").read_text()
    row = re.compile(r"^\| (\w+) \| (\d+) \| (\d+) \| (.+) \|$", re.MULTILINE)
    names: dict[str, list[str]] = {}
    for mutant in script.load(FOLDER):
        names.setdefault(mutant.package, []).append(mutant.name)
    tried = caught = 0
    listed = row.findall(text)
    assert [package for package, *_ in listed] == sorted(names)
    for package, planted, seen, survivors in listed:
        left = [] if survivors == "none" else survivors.split(", ")
        assert {*left} <= {*names[package]}, package
        # bugs that were added since are not in it
        assert int(planted) - int(seen) == len(left) and int(planted) <= len(names[package])
        tried += int(planted)
        caught += int(seen)
    assert f"{caught} of {tried} bugs that were planted are caught" in text
    assert caught >= script.GOAL * tried and tried >= 350


def test_survivors_of_fresh_batches_are_rows(script: ModuleType) -> None:
    text = (FOLDER / "README.md").read_text()
    names = {mutant.name for mutant in script.load(FOLDER)}
    tables = re.findall(r"^\| \w+ \| \d+ of \d+ \| (.+) \|$", text, re.MULTILINE)
    sentences = re.findall(r"The survivors were\s(.*?)(?:\.\s|;)", text, re.DOTALL)
    found = set(re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)+", " ".join([*tables, *sentences])))
    (number,) = re.findall(r"the (\d+) survivors of the fresh batches", text)
    assert found - names == set() and len(found) == int(number)


def test_bugs_are_written_alike() -> None:
    for file in FOLDER.glob("*.yaml"):
        for row in yaml.safe_load(file.read_text()):
            assert [*row] == ["name", "bug", "file", "find", "replace", "tests"], (
                f"{file.name}: {row['name']}"
            )
            assert "|" not in row["bug"] and row["find"] != row["replace"], row["name"]
