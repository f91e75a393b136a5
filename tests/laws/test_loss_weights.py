"""Law L1 for weights of corpora in the loss: every layout has the loss and gradient of one rank, and
one rank those of the formula.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import pytest

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.data.batch import Sample
from nanotrain.data.blend import BlendedDataset, StageBlend
from nanotrain.data.build import DatasetSplits
from nanotrain.plan.plan import plan_run
from nanotrain.runs.folder import RunFolder
from nanotrain.train.build import build_run
from nanotrain.train.run import Run, RunInputs
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.compare import assert_alike
from tests.laws.test_every_axis import EXPERTS, SP, ZB
from tests.laws.worlds import (
    GLOBAL_BATCH,
    NOT_WRITTEN,
    Case,
    Outcome,
    UnevenDataset,
    config_of,
    held_weights,
    micro_batch_size,
    train_steps,
)

LR, STEPS = 3e-3, 2
SHARES = (Fraction(2), Fraction(1))
WEIGHTS = (Fraction(1), Fraction(4))
Weights = tuple[Fraction, ...]
Layout = tuple[int, dict[str, Any], dict[str, Any]]
LAYOUTS: list[Layout] = [
    (2, {"strategy": "optim_grads"}, {}),
    (2, {"strategy": "optim_grads_params"}, {}),
    (2, {"tp": 2, "strategy": "optim"}, SP),
    (2, {"cp": 2, "strategy": "optim"}, {}),
    (2, {"pp": 2, "strategy": "optim_grads"}, ZB),
    (4, {"tp": 2, "cp": 2, "strategy": "no_shard"}, {"cp_comm_type": "a2a"}),
]


@dataclass(frozen=True)
class Shifted(UnevenDataset):
    """Other samples than those of `UnevenDataset`."""

    def __getitem__(self, sample_number: int) -> Sample:
        return super().__getitem__(sample_number + 500)


class RecordingBlend(BlendedDataset):
    """A blend of two sources that records the numbers of the samples that were read."""

    def __init__(self, weights: Weights, *, has_documents: bool) -> None:
        sources = [kind(has_documents=has_documents) for kind in (UnevenDataset, Shifted)]
        super().__init__(sources, [StageBlend("", 0, (0, 1), SHARES)], loss_weights=weights)
        self.reads: list[int] = []

    def __getitem__(self, index: int) -> Sample:
        self.reads.append(index)
        return super().__getitem__(index)


def build(ctx: ParallelContext, case: Case, weights: Weights) -> Run:
    config = config_of(case)
    plan = plan_run(config, ctx.topology.world_size, rank=ctx.rank)
    samples = RecordingBlend(weights, has_documents=config.data.reset_attention_mask)
    inputs = RunInputs(RunFolder(NOT_WRITTEN), DatasetSplits(samples, None, None))
    return build_run(plan, inputs, context=ctx)


def train_here(ctx: ParallelContext, case: Case, weights: Weights) -> Outcome:
    run = build(ctx, case, weights)
    results = train_steps(run, case.steps)
    samples = run.inputs.datasets.train
    assert isinstance(samples, RecordingBlend)
    return Outcome(
        losses=[result.loss for result in results],
        grad_norms=[result.grad_norm for result in results],
        weights=held_weights(run),
        dp=ctx.coords["dp"],
        reads=samples.reads,
        bytes_sent={},
        moe=[],
        mtp_losses=[result.metrics.get("mtp_losses", []) for result in results],
    )


def case_of(layout: Layout | None, *, has_documents: bool = False) -> Case:
    model = EXPERTS | {"mtp_num_layers": 1} if has_documents else {}
    data = {"reset_attention_mask": has_documents, "reset_position_ids": has_documents}
    case = Case(STEPS).but(optim={"lr": LR, "adam_eps": 1e-5}, model=model, data=data)
    if layout is None:
        return case.but(train={"micro_batch_size": GLOBAL_BATCH})
    num_ranks, sizes, options = layout
    parallel = {SHORT_NAMES[name]: value for name, value in sizes.items()} | options
    train = {"micro_batch_size": micro_batch_size(num_ranks, sizes)}
    return case.but(parallel=parallel, train=train)


@cache
def single_rank(weights: Weights, *, has_documents: bool = False) -> list[Outcome]:
    case = case_of(None, has_documents=has_documents)
    return run_ranks(1, train_here, case, weights, shares=True)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_has_the_weighted_loss_of_one_rank(layout: Layout) -> None:
    num_ranks, sizes, _ = layout
    outcomes = run_ranks(num_ranks, train_here, case_of(layout), WEIGHTS, **sizes, shares=True)
    assert_alike(outcomes, single_rank(WEIGHTS), row=str(layout), lr=LR)


DOCUMENTS: list[Layout] = [
    (2, {"ep": 2, "strategy": "optim_grads"}, {}),
    (2, {"cp": 2, "strategy": "optim"}, {}),
]


@pytest.mark.parametrize("layout", DOCUMENTS, ids=str)
def test_packed_documents_and_multi_token_prediction(layout: Layout) -> None:
    num_ranks, sizes, _ = layout
    case = case_of(layout, has_documents=True)
    outcomes = run_ranks(num_ranks, train_here, case, WEIGHTS, **sizes, shares=True)
    reference = single_rank(WEIGHTS, has_documents=True)
    assert_alike(outcomes, reference, row=str(layout), lr=LR)


def first_step(
    ctx: ParallelContext, case: Case, weights: Weights
) -> tuple[float, float, list[float]]:
    run = build(ctx, case, weights)
    (output,) = train_steps(run, 1)
    return output.loss, output.grad_norm, list(output.metrics["source_losses"].values())


def test_the_loss_is_the_formula_and_losses_of_corpora_stay_their_means() -> None:
    """Before the first update the model is the same, so losses per corpus are too."""
    case = case_of(None)
    plain, _, means = run_ranks(1, first_step, case, (), shares=True)[0]
    weighted, _, weighted_means = run_ranks(1, first_step, case, WEIGHTS, shares=True)[0]
    assert weighted_means == pytest.approx(means, rel=1e-6)
    samples = RecordingBlend((), has_documents=False)
    tokens = [0.0, 0.0]
    for index in range(GLOBAL_BATCH):
        source, _ = samples.locate(index)
        tokens[source] += float(samples[index].loss_mask.sum())
    total = sum(tokens)
    assert plain == pytest.approx(sum(t * m for t, m in zip(tokens, means, strict=True)) / total)
    factors = [(1 / 5) / (2 / 3), (4 / 5) / (1 / 3)]  # weight as a share / share of the samples
    expected = sum(f * t * m for f, t, m in zip(factors, tokens, means, strict=True)) / total
    assert weighted == pytest.approx(expected, rel=1e-5)
    assert abs(weighted - plain) > 1e-3


def test_weights_that_are_the_shares_change_nothing() -> None:
    case = case_of(None)
    plain = run_ranks(1, first_step, case, (), shares=True)
    as_shares = run_ranks(1, first_step, case, SHARES, shares=True)
    assert as_shares == plain
