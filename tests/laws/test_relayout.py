"""A relayout in place is, to the bit, a stop and a resume in the other layout.

`make layouts` compares some random pairs, and with NANOTRAIN_DRILLS=1 200 of them.
"""

import os
from pathlib import Path

import pytest

from nanotrain.untrusted import read_rows
from tests.harness import run_ranks
from tests.laws.command_line import arguments, assert_same_to_the_bit
from tests.laws.relayouts import (
    BORDER,
    DENSE,
    EXPERTS,
    HYBRID,
    Layout,
    changed,
    random_pair,
    resumed,
)

PP, TP, CP = "pipeline-model-parallel-size", "tensor-model-parallel-size", "context-parallel-size"
ZERO, EP = "data-parallel-sharding-strategy", "expert-model-parallel-size"
Pair = tuple[str, Layout, Layout]
PAIRS: dict[str, Pair] = {
    "dp to tp": (DENSE, Layout("--micro-batch-size 2", 2), Layout(f"--{TP} 2", 2)),
    "zero to pp": (
        DENSE,
        Layout(f"--{ZERO} optim_grads_params --micro-batch-size 1", 4),
        Layout(f"--{PP} 2 --{ZERO} no_shard --micro-batch-size 2", 4),
    ),
    "fewer ranks": (
        DENSE,
        Layout(f"--{TP} 2 --{CP} 2 --micro-batch-size 2", 4),
        Layout(f"--{TP} 1 --{CP} 1 --micro-batch-size 2 --{ZERO} optim", 3),
    ),
    "experts": (
        EXPERTS,
        Layout(f"--{EP} 2 --{ZERO} optim --micro-batch-size 2", 2),
        Layout(f"--{EP} 1 --{TP} 2 --micro-batch-size 2", 2),
    ),
    "hybrid": (
        HYBRID,
        Layout(f"--{TP} 2 --micro-batch-size 2", 2),
        Layout(f"--{TP} 1 --{PP} 2 --micro-batch-size 2", 2),
    ),
    "with replays": (
        f"{DENSE} --replay-interval 1",
        Layout("--micro-batch-size 2", 4),
        Layout(f"--{TP} 2 --micro-batch-size 2 --{ZERO} optim", 4),
    ),
}
NUM_RANDOM = 200 if os.environ.get("NANOTRAIN_DRILLS") == "1" else 6


def compare(folder: Path, pair: Pair) -> None:
    """Train both ways, and compare steps and checkpoints."""
    arguments(folder / "changed")  # writes the corpus, before several ranks look for it
    _, before, after = pair
    run_ranks(before.ranks, changed, folder / "changed", *pair)
    run_ranks(before.ranks, resumed, folder / "resumed", *pair)
    assert_same_to_the_bit(folder / "changed", folder / "resumed")
    saved = {path.name for path in (folder / "changed" / "checkpoints").iterdir()}
    assert saved == {"step-00000004"}, "no file at the border"
    (row,) = read_rows(folder / "changed" / "relayout.jsonl")
    assert row["step"] == BORDER and row["ranks"] == after.ranks


@pytest.mark.parametrize("name", PAIRS)
def test_a_relayout_is_a_resume(tmp_path: Path, name: str) -> None:
    compare(tmp_path, PAIRS[name])


@pytest.mark.more_layouts
@pytest.mark.parametrize("number", range(NUM_RANDOM))
def test_random_pairs_of_layouts(tmp_path: Path, number: int) -> None:
    compare(tmp_path, random_pair(number))
