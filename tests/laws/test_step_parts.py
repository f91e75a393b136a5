"""The parts of a step together, against closed forms of the weights before and after it.

Law L1 does not see what one rank shares with every layout: the order of the parts, and what one
adds to the numbers of another. Here a step has all parts that go together, and every number is
written out.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.data.batch import collate
from nanotrain.data.build import source_names
from nanotrain.model.context import BatchContext
from nanotrain.model.router_stats import router_tensors
from nanotrain.train.run import Run
from nanotrain.train.step import train_step
from tests.harness import run_ranks
from tests.laws.test_every_axis import BIASED
from tests.laws.worlds import GLOBAL_BATCH, Case, build_here
from tests.train.parts.test_losses import DATA, by_hand, read_blend

DECAY, RATE = 0.8, 0.01
CASE = Case(3).but(
    model=BIASED
    | {"moe_router_bias_update_rate": RATE, "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.8},
    optim={
        "lr": 3e-3,
        "adam_eps": 1e-5,
        "qk_clip": True,
        "qk_clip_threshold": 0.02,
        "ema_decay": DECAY,
    },
    train={"micro_batch_size": 4, "log_norms_by_group": True, "log_params_norm": True},
)


def weights_of(run: Run) -> dict[str, Tensor]:
    return {
        name: parameter.detach().clone() for name, parameter in run.stages[0].named_parameters()
    }


def norm_of(weights: dict[str, Tensor], of: str = "") -> float:
    return (
        torch.cat([weight.flatten().double() for name, weight in weights.items() if of in name])
        .norm()
        .item()
    )


def further_loss(stage: Any, samples: range) -> float:
    """The mean loss of the layer of multi-token prediction, in one microbatch."""
    batch = collate([DATA[index] for index in samples]).with_mtp(1)
    (layer,) = stage.mtp_layers
    with torch.no_grad():
        stage(None, BatchContext(batch, mtp_scales=(1.0,)))
    total = layer.loss_sums.item()
    layer.loss_sums.zero_()
    return total / batch.mtp[0].num_target_tokens.item()


def check_norms(
    metrics: dict[str, Any], *, before: dict[str, Tensor], after: dict[str, Tensor]
) -> None:
    """Compare the reported norms of weights and of their change with those of the weights."""
    assert metrics["params_norm"] == pytest.approx(norm_of(after), rel=1e-6)
    change = {name: weight - before[name] for name, weight in after.items()}
    for kind, weights in (("param", after), ("update", change)):
        norms = metrics["norms"][kind]
        assert total(norms) == pytest.approx(norm_of(weights), rel=1e-6), kind
        attention = norm_of(weights, ".attention.")
        assert norms["attention"] == pytest.approx(attention, rel=1e-6), kind


def train(ctx: ParallelContext) -> None:
    run = build_here(ctx, CASE)
    read_blend(ctx, run)
    (stage,), scale_rows, unclipped = (
        run.stages.values(),
        run.optimizer.scale_rows,
        dict[str, Tensor](),
    )
    factors: dict[str, Tensor] = {}

    def clip(of_rows: dict[str, Tensor]) -> None:
        unclipped.update(weights_of(run))
        factors.update(of_rows)
        scale_rows(of_rows)

    run.optimizer.scale_rows = clip  # type: ignore[method-assign]
    average, biases = (
        weights_of(run),
        {name: torch.zeros_like(bias) for name, bias in router_tensors(stage).items()},
    )
    losses = torch.zeros(2, 2, dtype=torch.float64)
    for step in range(CASE.steps):
        is_logged, samples = step != 1, range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
        before, further = weights_of(run), further_loss(stage, samples)
        own = torch.from_numpy(by_hand(stage, samples))
        losses += own
        batch = run.batch_iterator.next()
        assert batch is not None
        output = train_step(run, batch, is_logged=is_logged)
        after, metrics = weights_of(run), output.metrics

        loss, tokens = own.sum(dim=1).tolist()
        assert output.loss == pytest.approx(loss / tokens, rel=1e-5)
        for name, weight in after.items():
            rows = factors.get(name, torch.ones(len(weight)))
            torch.testing.assert_close(
                weight, unclipped[name] * rows.view(-1, *[1] * (weight.ndim - 1))
            )
        average = {
            name: DECAY * weight + (1 - DECAY) * after[name] for name, weight in average.items()
        }
        stored = {
            box.name: tensor for box, tensor in run.optimizer.tensors_to_save(only="ema").items()
        }
        for name, weight in average.items():
            torch.testing.assert_close(stored[f"ema/{name}"], weight, msg=f"the average of {name}")
        for name, bias in router_tensors(stage).items():
            load = torch.tensor(
                metrics["moe"]["load"][name.removeprefix("router/").removesuffix(".expert_bias")]
            )
            biases[name] += RATE * (load.mean() - load).sign()
            torch.testing.assert_close(bias, biases[name])
        assert metrics["mtp_losses"] == pytest.approx([further], rel=1e-5)
        if not is_logged:
            assert not {"norms", "params_norm", "source_losses"} & metrics.keys()
            continue
        means = (losses[0] / losses[1]).tolist()
        assert metrics["source_losses"] == pytest.approx(
            dict(zip(source_names(DATA), means, strict=True)), rel=1e-5
        )
        losses.zero_()
        assert norm_of(after, ".attention.") < 0.99 * norm_of(unclipped, ".attention."), (
            "QK-clip changes the norms"
        )
        assert total(metrics["norms"]["grad"]) == pytest.approx(output.grad_norm, rel=1e-6)
        check_norms(metrics, before=before, after=after)


def total(norms: dict[str, float]) -> float:
    return sum(norm**2 for norm in norms.values()) ** 0.5


def test_every_part_has_its_closed_form_beside_all_others() -> None:
    run_ranks(1, train, shares=True)
