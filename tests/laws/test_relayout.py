"""A relayout in place is, to the bit, a stop and a resume in the other layout."""

from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.laws.command_line import assert_same_to_the_bit
from tests.laws.relayouts import Layout, changed, resumed

DENSE = "--swiglu"
PAIRS = [
    (DENSE, Layout("--micro-batch-size 2", 2), Layout("--tensor-model-parallel-size 2", 2)),
]


@pytest.mark.parametrize(("model", "before", "after"), PAIRS, ids=str)
def test_a_relayout_is_a_resume(tmp_path: Path, model: str, before: Layout, after: Layout) -> None:
    run_ranks(before.ranks, changed, tmp_path / "changed", model, before, after)
    run_ranks(before.ranks, resumed, tmp_path / "resumed", model, before, after)
    assert_same_to_the_bit(tmp_path / "changed", tmp_path / "resumed")
    steps = {path.name for path in (tmp_path / "changed" / "checkpoints").iterdir()}
    assert steps == {"step-00000004"}, "no file at the border"
