"""When the run is saved, and that going on from there is as if it had never stopped."""

import pytest
import torch

from nanotrain.checkpoint.store import complete_checkpoints, read_manifest
from nanotrain.train.hooks.checkpoint import CheckpointHook
from tests.train.small_run import Spy, small_run, train


def saved(folder) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in complete_checkpoints(folder / "checkpoints")]


@pytest.mark.parametrize(
    ("steps", "interval", "expected"), [(5, 2, [2, 4, 5]), (4, 2, [2, 4]), (3, 0, [3]), (0, 2, [])]
)
def test_it_saves_at_every_interval_and_once_at_the_end(tmp_path, steps, interval, expected):
    with small_run(tmp_path, "--train-iters", str(steps), "--save-interval", str(interval)) as run:
        train(run, CheckpointHook())
    assert saved(tmp_path) == expected


def test_only_the_newest_are_kept(tmp_path):
    with small_run(tmp_path, "--train-iters", "6", "--save-interval", "1", "--keep-last", "2") as run:
        train(run, CheckpointHook())
    assert saved(tmp_path) == [5, 6]


def test_a_run_with_nothing_left_does_not_save_again(tmp_path):
    with small_run(tmp_path, "--train-iters", "2") as run:
        train(run, CheckpointHook())
    manifest = tmp_path / "checkpoints" / "step-00000002" / "manifest.json"
    before = manifest.stat().st_mtime_ns
    with small_run(tmp_path, "--train-iters", "2") as run:
        train(run, CheckpointHook())
    assert manifest.stat().st_mtime_ns == before


def test_a_checkpoint_holds_counters_configuration_and_topology(tmp_path):
    with small_run(tmp_path, "--train-iters", "3", "--global-batch-size", "2") as run:
        train(run, CheckpointHook())
    manifest = read_manifest(tmp_path / "checkpoints" / "step-00000003")
    assert manifest.objects["train"] == {
        "step": 3,
        "consumed_samples": 6,
        "consumed_tokens": 96,
        "curve_batch_size": 2,
    }
    assert manifest.objects["optimizer"]["num_updates"] == 3
    assert manifest.config["model"]["hidden_size"] == 32
    assert manifest.topology["world_size"] == 1


def test_stopping_and_going_on_gives_the_same_bits(tmp_path):
    weights, losses = {}, {}
    for name, stops in (("straight", ["6"]), ("stopped", ["3", "6"])):
        losses[name] = []
        for train_iters in stops:
            with small_run(tmp_path / name, "--train-iters", train_iters, "--lr-decay-iters", "6") as run:
                spy = Spy()
                train(run, CheckpointHook(), spy)
                losses[name] += [(report.loss, report.grad_norm, report.lr) for report in spy.reports]
                weights[name] = [p.detach().clone() for stage in run.stages.values() for p in stage.parameters()]
    assert losses["straight"] == losses["stopped"]
    assert all(torch.equal(a, b) for a, b in zip(weights["straight"], weights["stopped"], strict=True))
