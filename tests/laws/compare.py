"""What law 1 compares between a world of many ranks and one rank.

Tolerances, fp32. Losses and norms are sums whose order differs between layouts: 1e-5 relative is a hundred roundings.
Norms get ten times that, for the token whose choice of an expert is so near a tie that rounding decides it.
Weights go through Adam, whose step is lr * m / (sqrt(v) + eps): where a gradient is near zero its relative error, and
with it the step's, is unbounded, but never more than 2 * lr a step. 1 % of lr is a bound that a wrong divisor, a lost
microbatch or a shard updated twice breaks by orders of magnitude.
"""

import pytest

from tests.laws.worlds import GLOBAL_BATCH, Outcome, assemble

LOSS_TOLERANCE, NORM_TOLERANCE = 1e-5, 1e-4
WEIGHT_TOLERANCE_OF_LR = 1e-2


def assert_alike(outcomes: list[Outcome], reference: list[Outcome], *, row: str, lr: float) -> None:
    """All ranks saw what one rank saw, hold together what it holds, and hold copies that are bit-equal."""
    (alone,) = reference
    for rank, outcome in enumerate(outcomes):
        assert outcome.losses == outcomes[0].losses, f"{row}: rank {rank} prints another loss than rank 0"
        assert outcome.grad_norms == outcomes[0].grad_norms, f"{row}: rank {rank} has another norm than rank 0"
    assert outcomes[0].losses == pytest.approx(alone.losses, rel=LOSS_TOLERANCE), row
    assert outcomes[0].grad_norms == pytest.approx(alone.grad_norms, rel=NORM_TOLERANCE), row
    expected, found = assemble(reference), assemble(outcomes)
    assert found.keys() == expected.keys(), row
    off = {name: (found[name] - weight).abs().max().item() for name, weight in expected.items()}
    worst = max(off, key=lambda name: off[name] if off[name] == off[name] else float("inf"))
    assert off[worst] <= WEIGHT_TOLERANCE_OF_LR * lr, f"{row}: {worst} is off by {off[worst]:.1e}"
    assert_read_once(outcomes, row=row)


def assert_read_once(outcomes: list[Outcome], *, row: str) -> None:
    """The data-parallel ranks together read every sample of every global batch, none of them twice."""
    by_dp = {outcome.dp: outcome.reads for outcome in outcomes}
    assert all(outcome.reads == by_dp[outcome.dp] for outcome in outcomes), f"{row}: one replica read different samples"
    read = sorted(number for reads in by_dp.values() for number in reads)
    assert read == list(range(GLOBAL_BATCH * len(outcomes[0].losses))), f"{row}: samples were read twice or left out"
