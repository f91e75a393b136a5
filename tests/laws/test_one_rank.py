"""Law L1 for data parallelism: any number of ranks trains as one rank does. Law L7: overlap changes
no value.

Two ranks are processes over gloo.
"""

from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tests.laws.compare import assert_alike
from tests.laws.worlds import (
    GLOBAL_BATCH,
    LR,
    Case,
    Outcome,
    train_cases,
    train_here,
    train_layouts,
)

# data-parallel ranks -> micro batch sizes for one and for three microbatches per step
LAYOUTS = {1: (12, 4), 2: (6, 2), 3: (4, 2), 4: (3, 1)}
STEPS = 2
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


@pytest.fixture(scope="module")
def one_rank() -> list[Outcome]:
    return run_ranks(
        1, train_here, Case(STEPS).but(train={"micro_batch_size": GLOBAL_BATCH}), shares=True
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dp", LAYOUTS)
def test_every_layout_trains_as_one_rank_does(
    one_rank: list[Outcome], dp: int, strategy: str
) -> None:
    cases = [
        case_of(strategy, micro_batch, overlap=on)
        for micro_batch in LAYOUTS[dp]
        for on in (False, True)
    ]
    by_rank = run_ranks(dp, train_cases, cases, threads=dp != 2, shares=dp != 2, strategy=strategy)
    for number, case in enumerate(cases):
        outcomes = [results[number] for results in by_rank]
        assert_alike(outcomes, one_rank, row=f"dp {dp}, {strategy}, {case.overrides}", lr=LR)
    for plain, overlapped in zip(by_rank[0][::2], by_rank[0][1::2], strict=True):
        assert plain.losses == overlapped.losses and plain.grad_norms == overlapped.grad_norms
        assert all(
            torch.equal(plain.weights[box], overlapped.weights[box]) for box in plain.weights
        )


def test_sizes_without_common_divisors_train_as_one_rank_does() -> None:
    sizes = {
        "hidden_size": 42,
        "ffn_hidden_size": 23,
        "num_attention_heads": 3,
        "num_query_groups": 1,
    }
    model = sizes | {"untie_embeddings_and_output_weights": True, "add_qkv_bias": True}
    single = Case(STEPS).but(train={"micro_batch_size": 15, "global_batch_size": 15}, model=model)
    five = [
        single.but(
            train={"micro_batch_size": 1}, parallel={"data_parallel_sharding_strategy": strategy}
        )
        for strategy in STRATEGIES
    ]
    reference = run_ranks(1, train_here, single, shares=True)[0]
    for strategy, outcome in zip(
        STRATEGIES, run_ranks(5, train_layouts, five, shares=True)[0], strict=True
    ):
        assert outcome.losses == pytest.approx(reference.losses, rel=1e-5), strategy
        assert outcome.grad_norms == pytest.approx(reference.grad_norms, rel=1e-5), strategy


def test_bf16_parameters_train_alike_on_two_ranks_and_one() -> None:
    single = Case(STEPS).but(train={"micro_batch_size": 6}, precision={"params_dtype": "bf16"})
    cases = [
        single.but(parallel={"data_parallel_sharding_strategy": strategy})
        for strategy in STRATEGIES
    ]
    reference = run_ranks(1, train_here, single, shares=True)[0]
    for strategy, outcome in zip(
        STRATEGIES, run_ranks(2, train_layouts, cases, shares=True)[0], strict=True
    ):
        # Microbatches are the same, so forward and backward round alike; only the order of fp32
        # sums differs.
        assert outcome.losses == pytest.approx(reference.losses, rel=1e-3), strategy
        assert outcome.grad_norms == pytest.approx(reference.grad_norms, rel=1e-2), strategy


def test_the_comparison_fails_for_a_learning_rate_one_percent_off(one_rank: list[Outcome]) -> None:
    other = Case(STEPS).but(train={"micro_batch_size": GLOBAL_BATCH}, optim={"lr": 1.01 * LR})
    with pytest.raises(AssertionError):
        assert_alike(run_ranks(1, train_here, other, shares=True), one_rank, row="lr", lr=LR)


def case_of(strategy: str, micro_batch: int, *, overlap: bool) -> Case:
    parallel: dict[str, Any] = {
        "data_parallel_sharding_strategy": strategy,
        "overlap_grad_reduce": overlap,
        "overlap_param_gather": overlap and strategy != "no_shard",
    }
    return Case(STEPS).but(train={"micro_batch_size": micro_batch}, parallel=parallel)
