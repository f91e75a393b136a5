"""Means of the last checkpoints while a run trains."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanotrain.checkpoint.read import read_box
from nanotrain.checkpoint.store import find_manifest
from nanotrain.spec.boxes import TensorBox
from nanotrain.train.hooks.average_saves import AverageSavesHook, write_average
from nanotrain.train.main import main
from tests.train.small_run import arguments

SAVES = ["--save-interval", "2", "--average-saves", "2", "--lr", "1e-2", "--micro-batch-size", "2"]


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    step, manifest = find_manifest(folder)
    tensors = {}
    for name, entry in manifest.tensors.items():
        if name.startswith("model/"):
            box = TensorBox.full(name, entry.shape)
            tensors[name] = read_box(step, manifest, box=box).double()
    return tensors


def step_folder(number: int) -> str:
    return f"step-{number:08}"


@pytest.mark.parametrize("more", [[], ["--async-save"]], ids=["", "async"])
def test_the_newest_average_is_the_mean_of_the_last_saves(tmp_path: Path, more: list[str]) -> None:
    run = tmp_path / "run"
    assert main(arguments(run, *SAVES, *more, "--train-iters", "7")) == 0
    averages = run / "averages"
    assert [path.name for path in averages.iterdir()] == [step_folder(7)]
    found = weights_of(averages / step_folder(7))
    parts = [weights_of(run / "checkpoints" / step_folder(number)) for number in (6, 7)]
    for name, mean in found.items():
        expected = (parts[0][name] + parts[1][name]) / 2
        torch.testing.assert_close(mean, expected.float().double(), rtol=0, atol=0)
        assert not parts[0][name].equal(parts[1][name])
    assert not any(
        name.startswith("optimizer/")
        for name in find_manifest(averages / step_folder(7))[1].tensors
    )


def test_a_resume_averages_across_its_start_and_only_new_saves(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(arguments(run, *SAVES, "--train-iters", "2")) == 0
    assert not (run / "averages").exists(), "one save has no mean"
    assert main(arguments(run, *SAVES, "--train-iters", "4")) == 0
    found = weights_of(run / "averages" / step_folder(4))
    parts = [weights_of(run / "checkpoints" / step_folder(number)) for number in (2, 4)]
    for name, mean in found.items():
        assert mean.equal(((parts[0][name] + parts[1][name]) / 2).float().double())
    before = (run / "averages" / step_folder(4)).stat().st_mtime_ns
    assert main(arguments(run, *SAVES, "--train-iters", "4")) == 0
    assert (run / "averages" / step_folder(4)).stat().st_mtime_ns == before


def test_a_failure_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_average([tmp_path / step_folder(1), tmp_path / step_folder(2)], tmp_path)
    assert "average of step-00000002 was not written" in caplog.text


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    hook = AverageSavesHook(2)
    run = SimpleNamespace(context=SimpleNamespace(control=SimpleNamespace(is_first=False)))
    hook.begin_writing(run, step=0)
    hook.after_step(run, SimpleNamespace(step=4))
    hook.close(failed=False)
    assert not list(tmp_path.iterdir())
