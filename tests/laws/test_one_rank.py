"""Law 1: any topology trains as one rank does. Law 7: overlap changes time, never values.

Tolerances, fp32. Losses and norms are sums whose order differs between layouts: 1e-5 relative is a hundred roundings.
Weights go through Adam, whose step is lr * m / sqrt(v): where a gradient is near zero its relative error, and with it
the step's, is unbounded, but never more than 2 * lr a step. 1 % of lr (1e-4 here) after four steps is a bound that a
wrong divisor, a lost microbatch or a shard updated twice breaks by orders of magnitude; the worst seen is 2.9e-5.
"""

import pytest
import torch

from tests.harness import run_ranks
from tests.laws.worlds import Case, Outcome, UnevenSamples, train_cases, train_here

WEIGHT_TOLERANCE = 1e-4
GLOBAL_BATCH = 12
# data-parallel ranks -> micro batch sizes that make one microbatch a step and three
LAYOUTS = {1: (12, 4), 2: (6, 2), 3: (4, 2), 4: (3, 1)}
STRATEGIES = ("no_shard", "optim", "optim_grads")


@pytest.fixture(scope="module")
def one_rank() -> Outcome:
    return run_ranks(1, train_here, Case().but(train={"micro_batch_size": GLOBAL_BATCH}))[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dp", LAYOUTS)
def test_every_layout_trains_as_one_rank_does(one_rank: Outcome, dp: int, strategy: str) -> None:
    cases = [case_of(strategy, micro_batch, overlap) for micro_batch in LAYOUTS[dp] for overlap in (False, True)]
    by_rank = run_ranks(dp, train_cases, cases, strategy=strategy)
    for number, case in enumerate(cases):
        outcomes = [answers[number] for answers in by_rank]
        row = f"dp {dp}, {strategy}, {case.overrides}"
        assert_alike(outcomes[0], one_rank, row=row)
        for other in outcomes[1:]:
            assert other.losses == outcomes[0].losses, f"{row}: ranks print different losses"
            for name, weight in outcomes[0].weights.items():
                assert torch.equal(weight, other.weights[name]), f"{row}: replicas of {name} differ"
        assert_read_once(outcomes, row=row)
    for plain, overlapped in zip(by_rank[0][::2], by_rank[0][1::2], strict=True):
        assert plain.losses == overlapped.losses and plain.grad_norms == overlapped.grad_norms
        assert all(torch.equal(plain.weights[name], overlapped.weights[name]) for name in plain.weights)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sizes_that_divide_nothing_train_as_one_rank_does(strategy: str) -> None:
    sizes = {"hidden_size": 42, "ffn_hidden_size": 23, "num_attention_heads": 3, "num_query_groups": 1}
    model = sizes | {"untie_embeddings_and_output_weights": True, "add_qkv_bias": True}
    alone = Case(steps=3).but(train={"micro_batch_size": 15, "global_batch_size": 15}, model=model)
    five = alone.but(train={"micro_batch_size": 1}, parallel={"data_parallel_sharding_strategy": strategy})
    reference = run_ranks(1, train_here, alone)[0]
    assert_alike(run_ranks(5, train_here, five, strategy=strategy)[0], reference, row=f"dp 5, {strategy}")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bf16_parameters_train_alike_on_two_ranks_and_one(strategy: str) -> None:
    alone = Case().but(train={"micro_batch_size": 6}, precision={"params_dtype": "bf16"})
    two = alone.but(parallel={"data_parallel_sharding_strategy": strategy})
    reference = run_ranks(1, train_here, alone)[0]
    outcome = run_ranks(2, train_here, two, strategy=strategy)[0]
    # Microbatches are the same, so forward and backward round alike; only the order of fp32 sums differs.
    assert outcome.losses == pytest.approx(reference.losses, rel=1e-3)
    assert outcome.grad_norms == pytest.approx(reference.grad_norms, rel=1e-2)


def test_the_matrix_notices_a_wrong_layout(one_rank: Outcome) -> None:
    other = run_ranks(1, train_here, Case().but(train={"micro_batch_size": 12}, optim={"lr": 1.01e-2}))[0]
    with pytest.raises(AssertionError):
        assert_alike(other, one_rank, row="a learning rate one percent off")


def case_of(strategy: str, micro_batch: int, overlap: bool) -> Case:
    parallel = {
        "data_parallel_sharding_strategy": strategy,
        "overlap_grad_reduce": overlap,
        "overlap_param_gather": overlap and strategy != "no_shard",
    }
    return Case().but(train={"micro_batch_size": micro_batch}, parallel=parallel)


def assert_alike(outcome: Outcome, reference: Outcome, *, row: str) -> None:
    assert outcome.losses == pytest.approx(reference.losses, rel=1e-5), row
    assert outcome.grad_norms == pytest.approx(reference.grad_norms, rel=1e-5), row
    for name, weight in reference.weights.items():
        worst = (outcome.weights[name] - weight).abs().max().item()
        assert worst <= WEIGHT_TOLERANCE, f"{row}: {name} is off by {worst:.1e}"


def assert_read_once(outcomes: list[Outcome], *, row: str) -> None:
    """All ranks together read every sample of every global batch, and none twice."""
    read = sorted(sample for outcome in outcomes for sample in outcome.samples)
    source = UnevenSamples()
    expected = sorted(tuple(source[n].tokens.tolist()) for n in range(GLOBAL_BATCH * len(outcomes[0].losses)))
    assert read == expected, f"{row}: samples were read twice or left out"
