"""Means of the last checkpoints while a run trains."""

import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanotrain.checkpoint import store
from nanotrain.checkpoint.manifest import FORMAT, VERSION
from nanotrain.checkpoint.read import read_box
from nanotrain.checkpoint.store import find_manifest
from nanotrain.spec.boxes import TensorBox
from nanotrain.train.hooks import average_saves
from nanotrain.train.hooks.average_saves import AverageSavesHook, average_last, write_average
from nanotrain.train.main import main
from tests.checkpoint.test_manifest import signed
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


def hook_in(folder: Path, *, checkpoint: Path | None = None) -> tuple[AverageSavesHook, object]:
    """A hook on the first rank of a run that has gone on from step 2, and the run."""
    hook = AverageSavesHook(2)
    run = SimpleNamespace(
        context=SimpleNamespace(control=SimpleNamespace(is_first=True)),
        folder=SimpleNamespace(path=folder),
        config=SimpleNamespace(checkpoint=SimpleNamespace(save_interval=100)),
        inputs=SimpleNamespace(
            checkpoint=checkpoint or folder / "checkpoints" / step_folder(2), live=None
        ),
        state=SimpleNamespace(step=2),
    )
    hook.begin_writing(run, step=2)
    return hook, run


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with the checkpoints of steps 2, 4 and 6, and the average of the last two."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    assert main(arguments(folder, *SAVES, "--train-iters", "6")) == 0
    return folder


def copy_of(run: Path, folder: Path) -> Path:
    return Path(shutil.copytree(run, folder / "run"))


def test_the_training_thread_opens_no_manifest_and_lists_once_a_step(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_folder = copy_of(saved, tmp_path)
    shutil.rmtree(run_folder / "averages")
    threads = []
    read_manifest = store.read_manifest

    def read(path: Path) -> object:
        threads.append(threading.current_thread())
        return read_manifest(path)

    monkeypatch.setattr(store, "read_manifest", read)
    hook, run = hook_in(run_folder)
    hook.after_step(run, SimpleNamespace(step=7))
    hook.save_now(run)
    assert (run_folder / "averages" / step_folder(6)).is_dir()
    assert threads and threading.current_thread() not in threads
    num_reads = len(threads)
    hook.after_step(run, SimpleNamespace(step=8))
    hook.close(failed=False)
    assert len(threads) == num_reads, "a checkpoint that was averaged is not read again"


def test_only_the_last_manifests_are_read(saved: Path, tmp_path: Path) -> None:
    folder = copy_of(saved, tmp_path) / "checkpoints"
    later = signed({"format": FORMAT, "version": VERSION + 1})  # reading it is an error
    (folder / step_folder(2) / "manifest.json").write_text(later)
    assert [store.step_of(path) for path in store.last_complete(folder, 2)] == [4, 6]


def test_a_folder_that_cannot_be_read_is_a_warning(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_folder = copy_of(saved, tmp_path)
    hook, run = hook_in(run_folder)
    newest = run_folder / "checkpoints" / step_folder(6) / "manifest.json"
    later = signed({"format": FORMAT, "version": VERSION + 1})
    for text, why in ((later, f"version {VERSION + 1}"), ("{", "is not complete")):
        newest.write_text(text)
        average_last(run_folder, 6, num_saves=2)
        assert "average of step-00000006 was not written" in caplog.text
        assert why in caplog.text

    def fail(folder: Path) -> list[Path]:
        raise OSError(5, "Input/output error", str(folder))

    monkeypatch.setattr(average_saves, "step_entries", fail)
    for step in (7, 8):
        hook.after_step(run, SimpleNamespace(step=step))
    hook.close(failed=False)
    assert caplog.text.count("no checkpoint is averaged: ") == 1


def test_a_run_that_goes_back_has_no_average_of_the_steps_that_it_left(
    saved: Path, tmp_path: Path
) -> None:
    run = copy_of(saved, tmp_path)
    left = weights_of(run / "averages" / step_folder(6))
    (run / "averages" / "mine").mkdir()
    start = ["--load", str(run / "checkpoints" / step_folder(4)), "--lr", "1e-3"]
    assert main(arguments(run, *SAVES, *start, "--train-iters", "6", "--exit-interval", "5")) == 0
    assert names_in(run / "averages") == ["mine", step_folder(5)]
    assert main(arguments(run, *SAVES, *start, "--train-iters", "6")) == 0
    assert names_in(run / "averages") == ["mine", step_folder(6)]
    found = weights_of(run / "averages" / step_folder(6))
    parts = [weights_of(run / "checkpoints" / step_folder(number)) for number in (4, 6)]
    for name, mean in found.items():
        assert mean.equal(((parts[0][name] + parts[1][name]) / 2).float().double())
    assert any(not mean.equal(left[name]) for name, mean in found.items())


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_rollback_removes_the_averages_after_it(saved: Path, tmp_path: Path) -> None:
    run_folder = copy_of(saved, tmp_path)
    hook, run = hook_in(run_folder)
    assert names_in(run_folder / "averages") == []  # the run went back to step 2
    hook.after_step(run, SimpleNamespace(step=7))
    hook.before_rollback(run)
    assert names_in(run_folder / "averages") == [step_folder(6)]
    shutil.rmtree(run_folder / "checkpoints" / step_folder(6))
    run.state.step = 4
    hook.after_rollback(run, SimpleNamespace(step=7))
    hook.close(failed=False)
    assert names_in(run_folder / "averages") == []


def test_the_checkpoints_of_another_start_do_not_count(saved: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(arguments(run, *SAVES, "--train-iters", "2")) == 0
    assert main(arguments(run, *SAVES, "--load", str(saved), "--train-iters", "8")) == 0
    assert names_in(run / "checkpoints") == [step_folder(2), step_folder(8)]
    assert not (run / "averages").exists(), "steps 2 and 8 are of two runs"
    assert main(arguments(run, *SAVES, "--train-iters", "10")) == 0
    assert names_in(run / "averages") == [step_folder(10)]


@pytest.mark.parametrize(
    "moment", ["save_now", "before_rollback", "after_training", "after_failure"]
)
def test_the_average_is_written_before_checkpoints_are_deleted_or_renamed(
    tmp_path: Path, moment: str
) -> None:
    hook, run = hook_in(tmp_path)
    hook._thread = threading.Thread(target=time.sleep, args=(0.2,))
    hook._thread.start()
    thread = hook._thread
    getattr(hook, moment)(run)
    assert not thread.is_alive()


def test_each_save_has_its_average_where_the_next_step_deletes_the_oldest(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    each = ["--save-interval", "1", "--keep-last", "2", "--train-iters", "5"]
    assert main(arguments(tmp_path / "run", *SAVES, *each)) == 0
    text = capfd.readouterr().err
    assert text.count("weights averaged over 2 checkpoints") == 4
    assert "was not written" not in text


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    hook = AverageSavesHook(2)
    run = SimpleNamespace(
        context=SimpleNamespace(control=SimpleNamespace(is_first=False)),
        config=SimpleNamespace(checkpoint=SimpleNamespace(save_interval=2)),
    )
    hook.begin_writing(run, step=0)
    hook.after_step(run, SimpleNamespace(step=4))
    hook.close(failed=False)
    assert not list(tmp_path.iterdir())
