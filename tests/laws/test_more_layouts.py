"""Rows that `make layouts` runs alone: no planted bug names one of them."""

from tests.laws import test_every_axis, test_layer_kinds, test_model_features
from tests.laws.test_model_features import name_of
from tests.scripts import load_script
from tests.test_mutants import FOLDER


def rows_left_out() -> dict[str, set[str]]:
    """By file, the names that pytest gives to rows of layouts."""
    kinds = {*map(name_of, test_layer_kinds.MORE_LAYOUTS + test_layer_kinds.MORE_WIDER)}
    return {
        "tests/laws/test_every_axis.py": {*map(str, test_every_axis.OTHERS)},
        "tests/laws/test_model_features.py": {*map(name_of, test_model_features.MORE_LAYOUTS)},
        "tests/laws/test_layer_kinds.py": kinds,
        "tests/laws/test_residuals.py": kinds,
    }


def test_no_planted_bug_names_a_row_that_the_suite_leaves_out() -> None:
    left_out = rows_left_out()
    tests = [test for bug in load_script("mutants").load(FOLDER) for test in bug.tests]
    num_rows = 0
    for test in tests:
        file, _, name = test.partition("::")
        row = name.partition("[")[2].removesuffix("]")
        if row and file in left_out:
            num_rows += 1
            assert row not in left_out[file], test
    assert num_rows >= 10
