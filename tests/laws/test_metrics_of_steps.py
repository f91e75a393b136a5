"""Metrics that are collected over several steps, and those of one step.

mean, maximum    a step that is logged alone has its own value; one that is logged after others
                 has the mean or the maximum of all since the last logged one
of the step      whether the steps before were logged changes nothing
"""

from typing import Any

import pytest
import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.train.step import train_step
from tests.harness import run_ranks
from tests.laws.test_sparse_attention import DSA
from tests.laws.worlds import Case, build_here
from tests.train.parts.test_losses import read_blend

STEPS = 3
TRAIN = {"micro_batch_size": 4, "log_max_attention_logit": True}
SPARSE = Case(STEPS).but(model=DSA, train=TRAIN, optim={"lr": 1e-2})
PLAIN = Case(STEPS).but(
    model={"mtp_num_layers": 1, "num_experts": 4, "moe_ffn_hidden_size": 24},
    train=TRAIN,
    optim={"lr": 1e-2},
)


def metrics_of(ctx: ParallelContext, case: Case, logged: tuple[int, ...]) -> list[dict[str, Any]]:
    """The metrics of each step; the attention logits fall from step to step."""
    run = build_here(ctx, case)
    read_blend(ctx, run)
    found = []
    for step in range(STEPS):
        batch = run.batch_iterator.next()
        assert batch is not None
        found.append(train_step(run, batch, is_logged=step in logged).metrics)
        with torch.no_grad():
            for name, parameter in run.stages[0].named_parameters():
                if "attention" in name and "query" in name and name.endswith("weight"):
                    parameter.mul_(0.3)
    return found


def measured(case: Case, *logged: int) -> list[dict[str, Any]]:
    return run_ranks(1, metrics_of, case, logged, shares=True)[0]


@pytest.mark.parametrize("case", [SPARSE, PLAIN], ids=["sparse attention", "experts, MTP"])
def test_a_logged_step_counts_the_steps_since_the_last_one_alone(case: Case) -> None:
    each = measured(case, 0, 1, 2)
    every_second = measured(case, 1)
    last = measured(case, 0, 2)
    logits = [metrics["max_attention_logit"] for metrics in each]
    assert logits[0] > logits[1] > logits[2] > 0, "so that an earlier maximum would show"
    assert "max_attention_logit" not in every_second[0] and "max_attention_logit" not in last[1]
    assert every_second[1]["max_attention_logit"] == max(logits[:2])
    assert last[2]["max_attention_logit"] == max(logits[1:])
    if case is SPARSE:
        losses = [metrics["dsa_indexer_loss"] for metrics in each]
        assert len({*losses}) == STEPS
        # every step has equally many queries
        mean = sum(losses[:2]) / 2
        assert every_second[1]["dsa_indexer_loss"] == pytest.approx(mean, rel=1e-9)
        mean = sum(losses[1:]) / 2
        assert last[2]["dsa_indexer_loss"] == pytest.approx(mean, rel=1e-9)
    for step in range(STEPS):
        for name in ("moe", "mtp_losses"):
            of_step = each[step].get(name)
            assert every_second[step].get(name) == last[step].get(name) == of_step, name
    if case is PLAIN:
        sums = [each[step]["mtp_losses"][0] for step in range(STEPS)]
        assert max(sums) < 2 * min(sums), "no sum of several steps"
