"""Laws of sparse attention that test_layer_kinds.py does not draw: its log, QK-clip, fp16,
compilation, learning.
"""

from typing import Any

import pytest

from nanotrain.comm.parallel_context import ParallelContext
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.compare import assert_alike
from tests.laws.test_compile import one_rank, train_compiled
from tests.laws.test_layer_kinds import DOCUMENTS, GATHER, MODELS
from tests.laws.worlds import GLOBAL_BATCH, Case, Outcome, build_here, outcome_of, train_steps

LR = 3e-3
DSA = {
    name: value
    for name, value in MODELS["sparse attention"].items()
    if not name.startswith(("num_exp", "moe", "mtp"))
} | {"num_layers": 2, "dsa_indexer_share_freq": "0", "attention_dropout": 0.0}
MUON = {"optimizer": "muon", "muon_fp32_matmul_prec": "highest", "muon_extra_scale_factor": 0.2}
CLIP = {"qk_clip": True, "qk_clip_threshold": 0.02, "lr": LR, "adam_eps": 1e-5}
CASE = Case(3).but(model=DSA, data=DOCUMENTS, optim=MUON | CLIP)


def train(ctx: ParallelContext, case: Case) -> tuple[Outcome, list[float]]:
    """The outcome, and the logged divergence of every step."""
    run = build_here(ctx, case)
    results = train_steps(run, case.steps)
    return outcome_of(run, results), [result.metrics["dsa_indexer_loss"] for result in results]


@pytest.mark.parametrize(
    "loss", [{}, {"dsa_indexer_use_sparse_loss": True}], ids=["all keys", "selected keys"]
)
def test_muon_and_qk_clip_and_the_logged_divergence_are_those_of_one_rank(
    loss: dict[str, Any],
) -> None:
    case = CASE.but(model=loss)
    ((single, expected),) = run_ranks(
        1, train, case.but(train={"micro_batch_size": GLOBAL_BATCH}), shares=True
    )
    assert all(0.01 < divergence < 1 for divergence in expected), expected
    sizes = {"tp": 2, "cp": 2, "strategy": "optim"}
    parallel = (
        {SHORT_NAMES[name]: size for name, size in sizes.items()}
        | GATHER
        | {"sequence_parallel": True}
    )
    found = run_ranks(
        4, train, case.but(parallel=parallel, train={"micro_batch_size": 4}), **sizes, shares=True
    )
    assert_alike([outcome for outcome, _ in found], [single], row=str(sizes), lr=LR)
    for _, divergences in found:
        assert divergences == pytest.approx(expected, rel=1e-4)


def norms(ctx: ParallelContext, cases: list[Case]) -> list[dict[str, float]]:
    """Norms of gradients by group in the first step of each case."""
    return [train_steps(build_here(ctx, case), 1)[0].metrics["norms"]["grad"] for case in cases]


def test_the_gradient_of_the_indexer_does_not_depend_on_the_loss_scale() -> None:
    # so large a coefficient that the attention group is the indexer's
    case = Case(1).but(model=DSA | {"dsa_indexer_loss_coeff": 1e3}, train={"micro_batch_size": 4})
    case = case.but(train={"log_norms_by_group": True}, optim={"clip_grad": 0.0})
    scales = ({}, *({"params_dtype": "fp16", "initial_loss_scale": 2.0**power} for power in (2, 5)))
    ((single, *others),) = run_ranks(
        1, norms, [case.but(precision=scale) for scale in scales], shares=True
    )
    frozen = case.but(model={"dsa_indexer_loss_coeff": 0.0})
    ((without,),) = run_ranks(1, norms, [frozen], shares=True)
    assert single["attention"] > 10 * without["attention"]
    for found in others:
        assert found["attention"] == pytest.approx(single["attention"], rel=2e-2)


def test_a_compiled_block_trains_as_an_eager_one() -> None:
    case = Case(2).but(
        model=DSA | {"num_layers": 1}, train={"global_batch_size": 4, "micro_batch_size": 2}
    )
    eager, compiled, num_graphs, _ = train_compiled(one_rank(), case, "eager")
    assert num_graphs > 0 and compiled.losses == pytest.approx(eager.losses, rel=1e-5)
    assert compiled.grad_norms == pytest.approx(eager.grad_norms, rel=1e-4)


def learned(ctx: ParallelContext, cases: list[Case]) -> list[list[float]]:
    return [train(ctx, case)[1] for case in cases]


def test_the_indexer_learns_where_the_model_attends() -> None:
    case = Case(12).but(model=DSA, optim={"lr": 1e-2}, train={"micro_batch_size": GLOBAL_BATCH})
    still = case.but(model={"dsa_indexer_loss_coeff": 1e-30})
    ((trained, untrained),) = run_ranks(1, learned, [case, still], shares=True)
    assert trained[0] == pytest.approx(untrained[0], rel=1e-6)
    assert trained[-1] < 0.7 * untrained[-1], (trained, untrained)
