"""fp8 in a run: amax histories in checkpoints, and training that follows that of bf16."""

from pathlib import Path

import pytest
import torch

from nanotrain.checkpoint.store import read_manifest
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.parts.fp8_amaxes import fp8_layers
from nanotrain.train.resume.rollback import roll_back
from nanotrain.train.run import Run
from nanotrain.train.step import train_step
from tests.train.small_run import Spy, small_run, train

DELAYED = ["--fp8", "--fp8-amax-history-len", "3", "--fp8-amax-compute-algo", "max"]
STEPS = ["--lr-decay-iters", "5", "--global-batch-size", "4", "--micro-batch-size", "2"]


def histories(run: Run) -> dict[str, torch.Tensor]:
    return {
        name: layer.history.clone()
        for name, layer in fp8_layers(run.stages[0]).items()
        if layer.history is not None
    }


def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(tmp_path: Path) -> None:
    """Law L3, with an amax history that is longer than the part before the stop."""
    losses, amaxes = {}, {}
    for name, stops in (("straight", ["5"]), ("stopped", ["2", "5"])):
        losses[name] = []
        for stop in stops:
            with small_run(tmp_path / name, *STEPS, *DELAYED, "--train-iters", stop) as run:
                spy = Spy()
                train(run, spy, CheckpointHook())
                losses[name] += [report.output.loss for report in spy.reports]
                amaxes[name] = histories(run)
    assert losses["straight"] == losses["stopped"]
    assert len(amaxes["straight"]) == 7  # query, key, value, output, gate, up, down
    for name, history in amaxes["straight"].items():
        assert (history > 0).all(), name
        assert torch.equal(history, amaxes["stopped"][name]), name


def test_a_run_without_a_history_starts_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_run(tmp_path, *STEPS, "--train-iters", "1") as run:
        train(run, CheckpointHook())
    assert not [
        name
        for name in read_manifest(tmp_path / "checkpoints" / "step-00000001").tensors
        if "amax" in name
    ]
    with (
        caplog.at_level("INFO", logger="nanotrain"),
        small_run(tmp_path, *STEPS, *DELAYED, "--train-iters", "2") as run,
    ):
        train(run, CheckpointHook())
        assert all((history > 0).sum() == 3 for history in histories(run).values())
    assert "7 of 7 fp8 layers start with an empty amax history" in caplog.text
    tensors = read_manifest(tmp_path / "checkpoints" / "step-00000002").tensors
    assert tensors["fp8/layers.0.mlp.down.fp8.amax_history"].shape == (3, 1, 3)
    # a rollback starts one too
    with small_run(tmp_path, *STEPS, *DELAYED, "--train-iters", "3") as run:
        assert all((history > 0).any() for history in histories(run).values())
        roll_back(run, tmp_path / "checkpoints" / "step-00000001")
        assert not any((history > 0).any() for history in histories(run).values())
        assert not any(layer.has_history for layer in fp8_layers(run.stages[0]).values())
    # and back without fp8
    with small_run(tmp_path, *STEPS, "--train-iters", "3") as run:
        assert run.state.step == 2


def test_a_step_that_overflows_is_skipped_and_leaves_the_history(tmp_path: Path) -> None:
    with small_run(tmp_path, *STEPS, *DELAYED) as run:
        batch = run.batch_iterator.next()
        assert batch is not None
        train_step(run, batch)
        weight = run.stages[0].get_parameter("layers.0.mlp.up.weight")
        kept = weight.data.clone()
        weight.data[0, 0] = float("inf")
        assert train_step(run, batch).skipped
        weight.data.copy_(kept)
        assert all(history.isfinite().all() for history in histories(run).values())
        assert not train_step(run, batch).skipped


def falling_losses(folder: Path, *arguments: str) -> list[float]:
    """Losses of 20 steps on one batch."""
    with small_run(
        folder,
        "--micro-batch-size",
        "4",
        "--lr",
        "1e-2",
        "--lr-decay-style",
        "constant",
        *arguments,
    ) as run:
        batch = run.batch_iterator.next()
        assert batch is not None
        return [train_step(run, batch).loss for _ in range(20)]


def test_training_follows_that_of_bf16(tmp_path: Path) -> None:
    expected = falling_losses(tmp_path / "bf16", "--bf16")
    assert expected[-1] < expected[0] - 2
    for recipe, name in (
        ("tensorwise", "hybrid"),
        ("delayed", "hybrid"),
        ("rowwise", "hybrid"),
        ("blockwise", "e4m3"),
        ("mxfp8", "e4m3"),
    ):
        losses = falling_losses(
            tmp_path / recipe, "--bf16", "--fp8-format", name, "--fp8-recipe", recipe
        )
        assert losses[1:] != expected[1:]
        assert losses[-1] == pytest.approx(expected[-1], abs=0.05), recipe


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputation_changes_no_bit_and_counts_amaxes_once(
    tmp_path: Path, granularity: str
) -> None:
    experts = ["--num-experts", "4", "--moe-ffn-hidden-size", "32", "--num-layers", "2"]
    recompute = ["--recompute-granularity", granularity]
    recompute += (
        ["--recompute-method", "uniform", "--recompute-num-layers", "1"]
        if granularity == "full"
        else ["--recompute-modules", "layernorm", "moe_act", "core_attn"]
    )
    outcomes = []
    for name, arguments in (("kept", []), ("recomputed", recompute)):
        with small_run(
            tmp_path / name, *STEPS, *DELAYED, *experts, *arguments, "--train-iters", "3"
        ) as run:
            spy = Spy()
            train(run, spy)
            outcomes.append(
                (
                    [(report.output.loss, report.output.grad_norm) for report in spy.reports],
                    histories(run),
                )
            )
    (kept, kept_histories), (recomputed, recomputed_histories) = outcomes
    assert kept == recomputed
    for name, history in kept_histories.items():
        assert torch.equal(history, recomputed_histories[name]), name


def test_only_the_linear_layers_between_the_first_and_the_last_use_fp8(tmp_path: Path) -> None:
    arguments = [
        "--num-layers",
        "4",
        "--first-last-layers-bf16",
        "--num-layers-at-end-in-bf16",
        "2",
    ]
    with small_run(tmp_path, *DELAYED, *arguments) as run:
        names = list(fp8_layers(run.stages[0]))
    linears = (
        "attention.query",
        "attention.key",
        "attention.value",
        "attention.output",
        "mlp.gate",
        "mlp.up",
        "mlp.down",
    )
    assert names == [f"layers.1.{name}.fp8" for name in linears]
