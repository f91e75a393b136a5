"""Law L1 from outside: the gradient of a step is the derivative of the losses that it reports, by
central differences.

One rank shares with every layout a loss that is divided, scaled or joined in the backward pass as
it is not in the report. The objective is the mean cross-entropy over target tokens, plus the losses
of multi-token prediction and the z-losses with their factors; experts are taken in turn, so it is
smooth. Balance losses, whose counts of tokens are not, are compared with those of transformers
(`test_hugging_face.py`).
"""

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.spec.parameters import declare_model
from nanotrain.train.run import Run
from tests.harness import run_ranks
from tests.laws.test_model_features import FEATURES, MODELS
from tests.laws.worlds import Case, build_here, train_steps

CHANGE = 0.0005  # of the objective by each group of parameters, on either side
IN_TURN = {
    "moe_router_force_load_balancing": True,
    "moe_aux_loss_coeff": [0.0],
    "moe_z_loss_coeff": 0.05,
}


def objective(run: Run) -> float:
    """What the first step differentiates, from its reported numbers."""
    run.batches.restart(consumed_samples=0, skipped_samples=0)
    (output,) = train_steps(run, 1)
    model, metrics = run.config.model, output.metrics
    further = metrics.get("mtp_losses", [0.0])
    loss = output.loss + model.mtp.loss_scaling_factor * sum(further) / len(further)
    if model.moe is not None:  # a mean over routers is reported, their sum is differentiated
        loss += model.moe.z_loss_coeff * metrics["moe"]["z_loss"] * len(metrics["moe"]["load"])
    return loss


def compare(ctx: ParallelContext, cases: dict[str, Case]) -> dict[str, tuple[int, float]]:
    """The number of groups of parameters of each model, and by how many `CHANGE` the objective
    grows.

    Every group is moved along its gradient, by a distance for which its share of the change is
    `CHANGE`.
    """
    found = {}
    for name, case in cases.items():
        run = build_here(ctx, case)
        objective(run)
        grads = {box.name: grad for box, grad in run.optimizer.grad_tensors().items()}
        groups = defaultdict[str, dict[str, Tensor]](dict)
        for spec in declare_model(run.plan.shape):
            groups[spec.group][spec.name] = grads[spec.name].clone()
        objectives = []
        for factor in (1, -2):  # above, below
            for group in groups.values():
                norm = torch.cat([grad.flatten() for grad in group.values()]).norm().item()
                for each, grad in group.items():
                    run.stages[0].get_parameter(each).data.add_(
                        grad, alpha=factor * CHANGE / norm**2
                    )
            objectives.append(objective(run))
        found[name] = len(groups), (objectives[0] - objectives[1]) / (2 * CHANGE)
    return found


def case_of(model: dict[str, Any]) -> Case:
    model = model | (IN_TURN if "num_experts" in model else {})
    return Case(1).but(
        model=model, optim={"lr": 1e-12, "clip_grad": 0.0}, train={"micro_batch_size": 6}
    )


def test_gradients_are_the_derivatives_of_the_reported_losses() -> None:
    (found,) = run_ranks(
        1, compare, {name: case_of(MODELS[name]) for name in FEATURES}, shares=True
    )
    for name, (num_groups, change) in found.items():
        assert change == pytest.approx(num_groups, rel=3e-3), name
