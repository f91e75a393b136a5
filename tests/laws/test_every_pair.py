"""Laws L1 and L7 for every pair of settings: strategies, instances, precision, recomputation,
offload, update rules.

The rows are a covering array (pairs.py). A row is trained beside its twins:

    quiet    without overlap, recomputation, offload and kept or fixed units: no bit may differ (L7)
    plain    with the strategy that shards least: no bit may differ where both add up the same numbers in the same order
    single   one rank, one microbatch, the same rule and precision, but fp32 gradients: within the tolerances below (L1)

The suite trains two rows, which have 16 % of the pairs. `make pairs` trains all of them.

Tolerances. In fp32 those of compare.py. In low precision the forward passes of two layouts round
differently: a rounding of bf16 is 4e-3, of fp16 5e-4, and fp8 changes a value near the border of
two numbers by 6 %. Losses and norms are sums of many such values. Weights are compared by the
2-norm of the difference relative to that of the update; a gradient with a wrong divisor, a lost
microbatch or a shard that was not updated changes it, or the norm, by 30 % and more. Lion's update
is a sign, which turns where the gradient is near zero. Gradients of key biases are zero but for
rounding.
"""

import json
from collections import Counter
from functools import cache

import pytest
import torch
from torch import Tensor

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.load import load_object
from nanotrain.config.rules.check import validate_for_world
from nanotrain.errors import NanotrainError
from nanotrain.plan.plan import plan_run
from nanotrain.spec.boxes import TensorBox
from tests.harness import run_ranks
from tests.laws.compare import assert_alike, assert_read_once
from tests.laws.pairs import (
    DTYPES,
    FACTORS,
    LR,
    ONLY_WITH,
    Row,
    make_rows,
    pairs_of,
    pairs_to_cover,
)
from tests.laws.worlds import (
    Case,
    Outcome,
    assemble,
    build_here,
    config_of,
    held_weights,
    outcome_of,
    train_steps,
)

IN_SUITE = (1, 3)  # of low precision, with most settings away from their defaults
# kind of params dtype -> relative difference of losses, of norms, of updates, and of updates by
# Lion
TOLERANCES = {
    "bf16": (1e-4, 3e-3, 0.05, 0.3),
    "fp16": (2e-5, 1e-3, 0.05, 0.3),
    "fp8": (1e-3, 3e-2, 0.3, 0.4),
}

Trained = tuple[dict[TensorBox, Tensor], Outcome]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All rows with `-m all_pairs`, otherwise few."""
    if "row" in metafunc.fixturenames:
        rows = make_rows()
        numbers = range(len(rows)) if "all_pairs" in metafunc.config.option.markexpr else IN_SUITE
        metafunc.parametrize("row", [rows[number] for number in numbers], ids=map(str, numbers))


def train(ctx: ParallelContext, cases: list[Case]) -> list[Trained]:
    """The initial weights and the outcome of several cases, one after the other."""
    trained = []
    for case in cases:
        run = build_here(ctx, case)
        initial = held_weights(run)
        trained.append((initial, outcome_of(run, train_steps(run, case.steps))))
    return trained


@cache
def on_one_rank(overrides: str) -> Trained:
    """One rank's; the overrides are JSON, as the key of the cache."""
    ((trained,),) = run_ranks(1, train, [Case(2, json.loads(overrides))], shares=True)
    return trained


@pytest.mark.all_pairs
def test_a_row_trains_as_its_twins_do(row: Row) -> None:
    trained = run_ranks(row.num_ranks, train, [row.case, row.quiet.case], **row.sizes, shares=True)
    outcomes = [first[1] for first, _ in trained]
    for outcome, (_, (_, quiet)) in zip(outcomes, trained, strict=True):
        assert outcome.losses == quiet.losses and outcome.grad_norms == quiet.grad_norms, (
            f"{row}\nquiet"
        )
        assert_same_bits(outcome, quiet, f"{row}\nquiet")
    if row.sums_as_plain:
        for outcome, ((_, plain),) in zip(
            outcomes,
            run_ranks(row.num_ranks, train, [row.plain.case], **row.plain.sizes, shares=True),
            strict=True,
        ):
            assert outcome.losses == plain.losses, f"{row}\nplain"
            assert_same_bits(outcome, plain, f"{row}\nplain")
    initial, single = on_one_rank(json.dumps(row.single.overrides))
    if row.choice["params"] == "fp32" and row.choice["optimizer"] != "lion":
        assert_alike(outcomes, [single], row=str(row), lr=LR)
    else:
        assert_near(outcomes, single, initial=initial, row=row)


def assert_same_bits(one: Outcome, other: Outcome, what: str) -> None:
    different = [
        box.name for box in one.weights if not torch.equal(one.weights[box], other.weights[box])
    ]
    assert not different, f"{what}: {different}"


def assert_near(
    outcomes: list[Outcome], single: Outcome, *, initial: dict[TensorBox, Tensor], row: Row
) -> None:
    """Assert what one rank computes, within the tolerances of the precision."""
    dtype = row.choice["params"] if row.choice["params"] in DTYPES else "fp8"
    loss, norm, update, lion_update = TOLERANCES["bf16" if dtype == "fp32" else dtype]
    assert outcomes[0].losses == pytest.approx(single.losses, rel=loss), row
    assert outcomes[0].grad_norms == pytest.approx(single.grad_norms, rel=norm), row
    weights, expected = (
        assemble(outcomes),
        {box.name: tensor for box, tensor in single.weights.items()},
    )
    start = {box.name: tensor for box, tensor in initial.items()}
    names = [name for name in expected if not name.endswith("key.bias")]
    off = torch.cat([(weights[name] - expected[name]).flatten() for name in names]).norm()
    moved = torch.cat([(expected[name] - start[name]).flatten() for name in names]).norm()
    assert off <= (lion_update if row.choice["optimizer"] == "lion" else update) * moved, (
        f"{row}: {off / moved:.3f}"
    )
    assert_read_once(outcomes, row=str(row))


def test_the_rows_have_every_pair_that_is_allowed() -> None:
    covered = Counter(pair for row in make_rows() for pair in pairs_of(row))
    assert covered.keys() == pairs_to_cover()
    assert len(pairs_to_cover()) > 3000 and set(FACTORS["strategy"]) == {
        row.sizes["strategy"] for row in make_rows()
    }


def test_the_configuration_accepts_what_is_in_the_rows_and_refuses_what_is_left_out() -> None:
    for row in make_rows()[::8]:
        check(row)
    num_refused = 0
    for rule in ONLY_WITH:
        name, values, other, allowed = rule
        rows = [row for row in make_rows() if row.choice[name] in values]
        for left_out in FACTORS[other]:
            changed = (Row(tuple((row.choice | {other: left_out}).items())) for row in rows)
            broken = next(
                (row for row in changed if left_out not in allowed and broken_rules(row) == [rule]),
                None,
            )
            # accepted, and left out all the same
            if broken is not None and (name, other) != ("reduction", "params"):
                with pytest.raises(NanotrainError):
                    check(broken)
                num_refused += 1
    assert num_refused > 30


def broken_rules(row: Row) -> list[tuple[str, tuple[str, ...], str, tuple[str, ...]]]:
    """The rules of `ONLY_WITH` that a row breaks."""
    return [
        rule
        for rule in ONLY_WITH
        if row.choice[rule[0]] in rule[1] and row.choice[rule[2]] not in rule[3]
    ]


def check(row: Row) -> None:
    """Raise what a user with these settings would get."""
    config = load_object(config_of(row.case)).config
    validate_for_world(config, row.num_ranks)
    plan_run(config, row.num_ranks, rank=0)
