"""The memory benchmark finds the bytes of its table: two buckets and more, with padding, and
gathered units.
"""

import sys
from pathlib import Path

from tests.harness import run_ranks


def measure(ctx, cases):
    """Rows of a small model on one rank, which has this process to itself."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from dataclasses import asdict, replace

    import memory

    memory.MODEL = replace(
        memory.MODEL, num_layers=2, hidden_size=39, ffn_hidden_size=53, vocab_size=61
    )
    memory.BUCKET_SIZE = 9000
    return [asdict(memory.measure(ctx, memory.Case(*case))) for case in cases]


def test_resident_and_sent_bytes_are_those_of_the_closed_forms():
    cases = [
        (strategy, dtypes, 1)
        for strategy in ("optim_grads", "optim_grads_params")
        for dtypes in ("fp32", "bf16, main grads bf16")
    ]
    (rows,) = run_ranks(1, measure, cases)
    for case, row in zip(cases, rows, strict=True):
        assert row["params"] + row["grads"] + row["optimizer"] == row["expected"], case
        assert row["sent"] == row["expected_sent"] == 0, case
        assert row["peak"] <= row["bound"], case
