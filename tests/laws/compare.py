"""Law L1: compare a world of many ranks with one rank.

Tolerances, fp32. Losses and norms are sums whose order differs between layouts: 1e-5 relative is a
hundred roundings. Norms get ten times that, for tokens whose top-k experts are so near a tie that
rounding decides. Weights go through Adam, whose step is lr * m / (sqrt(v) + eps). Where a gradient
is near zero, its relative error and that of the step are unbounded, but a step is at most 2 * lr. A
wrong divisor, a lost microbatch or a shard updated twice exceeds the bound of 1 % of lr by orders
of magnitude.
"""

import json
from functools import cache
from typing import Any

import pytest

from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.worlds import GLOBAL_BATCH, Case, Outcome, assemble, micro_batch_size, train_here

LOSS_TOLERANCE, NORM_TOLERANCE = 1e-5, 1e-4
WEIGHT_TOLERANCE_OF_LR = 1e-2


# model, ranks, strategy and sizes of axes, options
Row = tuple[str, int, dict[str, Any], dict[str, Any]]
STEPS, OPTIM = 2, {"lr": 3e-3, "adam_eps": 1e-5}


def assert_row_trains_as_one_rank(
    row: Row,
    models: dict[str, dict[str, Any]],
    *,
    data: dict[str, Any] | None = None,
    memory: dict[str, Any] | None = None,
) -> None:
    """Train a row of a table of layouts and compare it with one rank.

    Args:
        row: of the table.
        models: the fields of each model by name.
        data: fields of the data section.
        memory: fields of the memory section of the row; one rank has the default ones.
    """
    model, num_ranks, sizes, options = row
    parallel = {SHORT_NAMES[name]: value for name, value in sizes.items()} | options
    train = {"micro_batch_size": micro_batch_size(num_ranks, sizes)}
    case = Case(STEPS).but(
        train=train,
        optim=OPTIM,
        parallel=parallel,
        model=models[model],
        data=data or {},
        memory=memory or {},
    )
    outcomes = run_ranks(num_ranks, train_here, case, **sizes, shares=True)
    assert_alike(
        outcomes,
        _single_rank(json.dumps((models[model], data or {}))),
        row=f"{model} {sizes} {options}",
        lr=OPTIM["lr"],
    )


@cache
def _single_rank(fields: str) -> list[Outcome]:
    """One rank's outcome; the fields of model and data are JSON, as the key of the cache."""
    model, data = json.loads(fields)
    case = Case(STEPS).but(
        train={"micro_batch_size": GLOBAL_BATCH}, optim=OPTIM, model=model, data=data
    )
    return run_ranks(1, train_here, case, shares=True)


def assert_alike(
    outcomes: list[Outcome], reference: list[Outcome], *, row: str, lr: float, **batch: int
) -> None:
    """Assert the losses, gradient norms and weights of one rank, with bit-equal replicas.

    Args:
        outcomes: of every rank.
        reference: of one rank.
        row: what is compared, for messages.
        lr: learning rate.
        batch: arguments of `assert_read_once`.
    """
    (single,) = reference
    for rank, outcome in enumerate(outcomes):
        assert outcome.losses == outcomes[0].losses, (
            f"{row}: rank {rank} reports another loss than rank 0"
        )
        assert outcome.grad_norms == outcomes[0].grad_norms, (
            f"{row}: rank {rank} reports another norm than rank 0"
        )
    assert outcomes[0].losses == pytest.approx(single.losses, rel=LOSS_TOLERANCE), row
    assert outcomes[0].grad_norms == pytest.approx(single.grad_norms, rel=NORM_TOLERANCE), row
    for losses, of_one_rank in zip(outcomes[0].mtp_losses, single.mtp_losses, strict=True):
        assert losses == pytest.approx(of_one_rank, rel=LOSS_TOLERANCE), row
    expected, weights = assemble(reference), assemble(outcomes)
    assert weights.keys() == expected.keys(), row
    off = {name: (weights[name] - weight).abs().max().item() for name, weight in expected.items()}
    worst = max(off, key=lambda name: off[name] if off[name] == off[name] else float("inf"))
    assert off[worst] <= WEIGHT_TOLERANCE_OF_LR * lr, f"{row}: {worst} is off by {off[worst]:.1e}"
    assert_read_once(outcomes, row=row, **batch)


def assert_read_once(
    outcomes: list[Outcome], *, row: str, global_batch: int = GLOBAL_BATCH, num_padded: int = 0
) -> None:
    """Assert that the data-parallel ranks together read every sample of every global batch exactly
    once.

    `num_padded` samples of a global batch, over all ranks, are padding, which reads its first
    sample again. A stage of layers alone may read none.
    """
    by_dp = {outcome.dp: outcome.reads for outcome in outcomes if outcome.reads}
    for outcome in outcomes:
        may_read_none = all(box.name.startswith("layers.") for box in outcome.weights)
        is_same = outcome.reads == by_dp[outcome.dp] or (not outcome.reads and may_read_none)
        assert is_same, f"{row}: replicas read different samples"
    read = sorted(number for reads in by_dp.values() for number in reads)
    num_samples = global_batch * len(outcomes[0].losses)
    padding = [first for first in range(0, num_samples, global_batch) for _ in range(num_padded)]
    assert read == sorted([*range(num_samples), *padding]), (
        f"{row}: samples were read twice or skipped"
    )
