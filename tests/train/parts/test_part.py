"""A part from outside of the package takes part in every step; the order of those that change
weights is a law.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.optim.distributed import Update
from nanotrain.spec.boxes import TensorBox
from nanotrain.topology.groups import GroupName
from nanotrain.train.hooks.log import LogHook
from nanotrain.train.parts.part import BuiltModel, StepPart
from nanotrain.train.parts.table import PARTS
from nanotrain.train.step import train_step
from tests.harness import run_ranks
from tests.laws.test_any_topology import save_step
from tests.laws.worlds import Case, build_here
from tests.train.small_run import metrics_of, small_run, train


class RankSteps(StepPart):
    """Counts the steps of all ranks."""

    replicated_over: tuple[GroupName, ...] = ("world",)

    def __init__(self, model: BuiltModel) -> None:
        self.total = torch.zeros(1, dtype=torch.float64, device=model.context.device)

    def sums(self, *, is_logged: bool) -> Tensor:
        return torch.ones_like(self.total)

    def after_update(self, update: Update, sums: Tensor, *, is_logged: bool) -> Tensor:
        self.total += sums
        return self.total.clone()

    def metrics(self, numbers: Sequence[float]) -> dict[str, Any]:
        return {"rank_steps": numbers[0]}

    def tensors(self) -> dict[TensorBox, Tensor]:
        return {TensorBox.full("mine/rank_steps", self.total.shape): self.total}


def steps_of(
    ctx: ParallelContext, case: Case, folder: Path, *, checkpoint: Path | None = None
) -> list[float]:
    """What the part reports in two steps, after which a checkpoint is saved."""
    run = build_here(ctx, case, folder=folder, checkpoint=checkpoint)
    reported = [
        train_step(run, run.batch_iterator.next()).metrics.get("rank_steps", 0.0) for _ in range(2)
    ]
    save_step(ctx, run)
    return reported


def with_and_without(
    ctx: ParallelContext, case: Case, folder: Path
) -> tuple[list[float], list[int]]:
    """What the part reports, and the collectives of a run with it and of one without."""
    num_calls, reported = [], []
    for has_part in (False, True):
        if has_part:
            PARTS["rank_steps"] = RankSteps
        ctx.traffic.reset()
        reported = steps_of(ctx, case, folder / str(has_part))
        num_calls.append(ctx.traffic.calls())
    return reported, num_calls


def resumed(ctx: ParallelContext, case: Case, checkpoint: Path, folder: Path) -> list[float]:
    PARTS["rank_steps"] = RankSteps
    return steps_of(ctx, case, folder, checkpoint=checkpoint)


def test_a_part_joins_the_all_reduce_and_is_saved_and_restored_on_another_layout(
    tmp_path: Path,
) -> None:
    case = Case(4)
    pipeline = case.but(parallel={"pipeline_model_parallel_size": 2})
    outcomes = run_ranks(2, with_and_without, pipeline, tmp_path / "two", pp=2)
    for reported, (without, with_it) in outcomes:
        assert reported == [2.0, 4.0] and with_it == without, "one all-reduce, with the part in it"
    checkpoint = tmp_path / "two" / "True" / "checkpoints" / "step-00000002"
    assert run_ranks(1, resumed, case, checkpoint, tmp_path / "one") == [[5.0, 6.0]]


def test_a_part_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARTS, "rank_steps", RankSteps)
    with small_run(tmp_path, "--train-iters", "2") as run:
        train(run, LogHook())
    assert [row["rank_steps"] for row in metrics_of(tmp_path)] == [1.0, 2.0]


def test_the_average_is_of_clipped_weights_and_fp8_scales_come_last(tmp_path: Path) -> None:
    flags = ("--qk-clip", "--qk-clip-threshold", "1e-4", "--ema-decay", "0.5", "--lr", "1e-3")
    with small_run(tmp_path, *flags) as run:
        before, average = (run.optimizer.tensors_to_save(only=kind) for kind in ("model", "ema"))
        before = {box.name.removeprefix("model/"): tensor.clone() for box, tensor in before.items()}
        train_step(run, run.batch_iterator.next())
        for box, tensor in run.optimizer.tensors_to_save(only="model").items():
            name = box.name.removeprefix("model/")
            (of_box,) = (
                each
                for place, each in average.items()
                if (place.name, place.box) == (f"ema/{name}", box.box)
            )
            assert torch.equal(of_box, before[name].lerp(tensor, 0.5)), name
            assert "query" not in name or tensor.norm() < 0.5 * before[name].norm(), "clipped"
    assert list(PARTS)[-1] == "fp8_amaxes"
