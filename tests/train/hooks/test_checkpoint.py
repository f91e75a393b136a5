"""When the run is saved, and that going on from there is as if it had never stopped."""

import errno
import os
import time
from types import SimpleNamespace

import pytest
import torch

from nanotrain.checkpoint import checkpointer
from nanotrain.checkpoint.report import describe, verify
from nanotrain.checkpoint.retention import prune
from nanotrain.checkpoint.store import complete_checkpoints, read_manifest
from nanotrain.errors import CheckpointError, EnvironmentFault, StorageFault, TrainingFault
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.run import Run
from nanotrain.train.step_report import StepReport
from tests.train.small_run import Spy, small_run, train


def saved(folder) -> list[int]:
    return [
        int(path.name.removeprefix("step-"))
        for path in complete_checkpoints(folder / "checkpoints")
    ]


@pytest.mark.parametrize(
    ("steps", "interval", "expected"), [(5, 2, [2, 4, 5]), (4, 2, [2, 4]), (3, 0, [3]), (0, 2, [])]
)
def test_it_saves_at_every_interval_and_once_at_the_end(tmp_path, steps, interval, expected):
    with small_run(tmp_path, "--train-iters", str(steps), "--save-interval", str(interval)) as run:
        train(run, CheckpointHook())
    assert saved(tmp_path) == expected


def test_a_checkpoint_without_optimizer_state_says_so_and_is_gone_on_from_by_its_weights(tmp_path):
    flags = ("--no-save-optim", "--ema-decay", "0.9")
    with small_run(tmp_path, "--train-iters", "2", *flags) as run:
        train(run, CheckpointHook())
    manifest = read_manifest(tmp_path / "checkpoints" / "step-00000002")
    assert {name.split("/")[0] for name in manifest.tensors} == {"model", "ema"}
    assert "optimizer   no state: of --no-save-optim" in describe(tmp_path)
    with (
        pytest.raises(
            CheckpointError, match="step 2 has weights alone: .* --no-load-optim to go on at step 2"
        ),
        small_run(tmp_path, "--train-iters", "3", *flags),
    ):
        pass
    with small_run(tmp_path, "--train-iters", "3", "--no-load-optim") as run:
        train(run, CheckpointHook())
    assert "no state" not in describe(tmp_path)


def test_only_the_newest_are_kept(tmp_path):
    with small_run(
        tmp_path, "--train-iters", "6", "--save-interval", "1", "--keep-last", "2"
    ) as run:
        train(run, CheckpointHook())
    assert saved(tmp_path) == [5, 6]


class InfWeight(Hook):
    """One weight is not finite from a step on."""

    def __init__(self, step: int) -> None:
        self.step = step

    def before_training(self, run: Run) -> None:
        (stage,) = run.stages.values()
        stage.register_forward_pre_hook(lambda *_: self.poison(run))

    def poison(self, run: Run) -> None:
        if run.state.step == self.step - 1:
            next(
                tensor for box, tensor in run.optimizer.state_tensors().items() if "mlp" in box.name
            )[0] = torch.inf
            run.optimizer.finish_load()


@pytest.mark.parametrize("flags", [(), ("--async-save",)], ids=["plain", "async"])
def test_weights_that_are_not_finite_never_push_out_the_last_sound_checkpoint(
    tmp_path, logged, flags
):
    line = ("--train-iters", "9", "--save-interval", "2", "--keep-last", "2", *flags)
    with (
        small_run(tmp_path, *line, "--max-consecutive-skips", "3") as run,
        pytest.raises(TrainingFault),
    ):
        train(run, InfWeight(5), CheckpointHook())
    assert saved(tmp_path) == [2, 4, 7], (
        "step 6 has the weights of step 4 and later ones with inf, 7 ended the run"
    )
    assert "step 6 is not saved: all steps since 4 were skipped" in logged

    last = tmp_path / "checkpoints" / "step-00000007"
    assert "1 tensor is not finite, the first is model/" in describe(last)
    assert "all finite" in describe(last.with_name("step-00000004"))
    report = verify(last)
    assert not report.is_sound and "UNSOUND, 1 fault in" in report.text()
    assert report.faults[0].endswith(
        "in shard-00000-of-00001.safetensors has values that are not finite"
    )
    assert [path.name for path in prune(tmp_path, 1)] == ["step-00000002"]

    with small_run(tmp_path, *line) as run:
        assert run.state.step == 4
        (why,) = [line for line in logged if "skipped" in line and "step-00000007" in line]
        assert "1 tensor is not finite, the first is model/" in why and why.endswith(
            "using step-00000004"
        )
        train(run, CheckpointHook())
    assert saved(tmp_path) == [8, 9]


def test_a_save_after_a_skipped_step_deletes_nothing(tmp_path):
    class Poison(Hook):
        def before_training(self, run: Run) -> None:
            (stage,) = run.stages.values()
            stage.register_forward_hook(
                lambda _, _in, out: out * torch.nan if run.state.step == 3 else None
            )

    line = ("--train-iters", "6", "--save-interval", "2", "--keep-last", "1")
    kept = []

    class Kept(Hook):
        def after_step(self, run: Run, report: StepReport) -> None:
            kept.append(saved(tmp_path))

    with small_run(tmp_path, *line, "--global-batch-size", "1") as run:
        train(run, Poison(), CheckpointHook(), Kept())
    assert kept == [[], [2], [2], [2, 4], [2, 4], [6]]


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
            with small_run(
                tmp_path / name, "--train-iters", train_iters, "--lr-decay-iters", "6"
            ) as run:
                spy = Spy()
                train(run, CheckpointHook(), spy)
                losses[name] += [
                    (report.output.loss, report.output.grad_norm, report.lr)
                    for report in spy.reports
                ]
                weights[name] = [
                    p.detach().clone() for stage in run.stages.values() for p in stage.parameters()
                ]
    assert losses["straight"] == losses["stopped"]
    assert all(
        torch.equal(a, b) for a, b in zip(weights["straight"], weights["stopped"], strict=True)
    )


def weights_of(run) -> list[torch.Tensor]:
    return [p.detach().clone() for stage in run.stages.values() for p in stage.parameters()]


def test_saves_in_the_background_hold_the_same_bits_and_the_last_is_waited_for(
    tmp_path, monkeypatch
):
    real, slow = checkpointer.write_shard, []

    def write_slowly(path, tensors, **options):
        slow.append(path.parent.name)
        time.sleep(0.05)  # longer than a step, which overwrites the weights that are being written
        return real(path, tensors, **options)

    for name, flags in (("plain", ()), ("background", ("--async-save",))):
        with small_run(
            tmp_path / name, "--train-iters", "6", "--save-interval", "2", *flags
        ) as run:
            if flags:
                monkeypatch.setattr(checkpointer, "write_shard", write_slowly)
            spy = Spy()
            train(run, spy, CheckpointHook())
            assert [report.step for report in spy.reports if report.save_stall_s] == [3, 5]
        assert saved(tmp_path / name) == [2, 4, 6]
    assert slow == [f"step-{step:08d}.tmp" for step in (2, 4, 6)]
    for step in (2, 4, 6):
        plain, background = (
            tmp_path / name / "checkpoints" / f"step-{step:08d}" for name in ("plain", "background")
        )
        assert sorted(path.name for path in background.iterdir()) == sorted(
            path.name for path in plain.iterdir()
        )
        shard = "shard-00000-of-00001.safetensors"
        assert (plain / shard).read_bytes() == (background / shard).read_bytes()


def fail_to_write(monkeypatch, *steps: int, only: str = "") -> None:
    """Let writes into the folders of some steps fail for want of space."""
    real = os.open

    def refuse(path, *args, **options):
        if only in str(path) and any(f"step-{step:08d}.tmp/shard" in str(path) for step in steps):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.parametrize("flags", [(), ("--async-save",)], ids=["plain", "async"])
def test_a_failed_periodic_save_is_counted_and_tried_again_and_training_is_as_without(
    tmp_path, monkeypatch, logged, flags
):
    results = {}
    for name in ("sound", "full"):
        arguments = ("--train-iters", "6", "--save-interval", "2", *flags)
        with small_run(tmp_path / name, *arguments) as run, monkeypatch.context() as m:
            if name == "full":
                fail_to_write(m, 2)
            spy = Spy()
            train(run, spy, CheckpointHook())
            results[name] = (
                [(report.output.loss, report.output.grad_norm) for report in spy.reports],
                weights_of(run),
            )
            failed = [report.failed_saves for report in spy.reports]
    assert saved(tmp_path / "full") == [4, 6] and saved(tmp_path / "sound") == [2, 4, 6]
    assert not list((tmp_path / "full" / "checkpoints").glob("*.tmp"))
    assert results["sound"][0] == results["full"][0]
    assert all(
        torch.equal(a, b) for a, b in zip(results["sound"][1], results["full"][1], strict=True)
    )
    assert failed == ([None, None, 1, 1, 1, 1] if not flags else [None] * 4 + [1, 1])
    (line,) = [line for line in logged if "training goes on" in line]
    assert "No space left on device" in line and "bytes free in" in line


def test_a_failed_save_of_the_last_step_does_not_promise_another_interval(
    tmp_path, monkeypatch, logged
):
    fail_to_write(monkeypatch, 2)
    with (
        small_run(tmp_path, "--train-iters", "2", "--save-interval", "2") as run,
        pytest.raises(StorageFault),
    ):
        train(run, CheckpointHook())
    (line,) = [line for line in logged if "No space left" in line]
    assert line.endswith("the last save is tried next") and "next interval" not in line


@pytest.mark.parametrize("flags", [(), ("--async-save",)], ids=["plain", "async"])
def test_the_strict_end_at_the_first_failed_save(tmp_path, monkeypatch, flags):
    strict = ("--train-iters", "50", "--save-interval", "2", "--exit-on-save-failure", *flags)
    fail_to_write(monkeypatch, 2)
    with (
        small_run(tmp_path, *strict) as run,
        pytest.raises(EnvironmentFault, match="No space left on device"),
    ):
        train(run, CheckpointHook())
    assert saved(tmp_path) in ([], [run.state.step]) and run.state.step < 6, (
        "it ends soon, and saves on the way out"
    )


@pytest.mark.parametrize("fallback", [False, True], ids=["alone", "fallback"])
def test_what_the_strict_end_reports_is_logged_nowhere_else(
    tmp_path, monkeypatch, logged, fallback
):
    strict = ("--train-iters", "50", "--save-interval", "2", "--exit-on-save-failure")
    other = ("--save-fallback-dir", str(tmp_path / "other")) if fallback else ()
    fail_to_write(monkeypatch, 2, only="run/checkpoints")
    with (
        small_run(tmp_path / "run", *strict, *other) as run,
        pytest.raises(StorageFault, match="No space left"),
    ):
        train(run, CheckpointHook())
    assert not [line for line in logged if "No space left" in line]
    kept = tmp_path / "other" / "run" / "step-00000002"
    assert kept.exists() == fallback and any(f"saved {kept}" in line for line in logged) == fallback


def test_the_last_save_goes_to_the_fallback_folder_or_ends_the_run(tmp_path, monkeypatch, logged):
    fail_to_write(monkeypatch, 2, only="short/checkpoints")
    with (
        small_run(tmp_path / "short", "--train-iters", "2") as run,
        pytest.raises(StorageFault, match="No space left"),
    ):
        train(run, CheckpointHook())
    other = tmp_path / "other"
    with small_run(
        tmp_path / "short", "--train-iters", "2", "--save-fallback-dir", str(other)
    ) as run:
        train(run, CheckpointHook())
        weights = weights_of(run)
    assert any("cannot be saved in the run folder" in line for line in logged)
    with small_run(tmp_path / "new", "--load", str(other / "short")) as loaded:
        assert loaded.state.step == 2
        assert all(torch.equal(a, b) for a, b in zip(weights_of(loaded), weights, strict=True))


def test_a_save_that_cannot_fit_is_not_begun(tmp_path, monkeypatch, logged):
    counts = {
        "f_blocks": 2000,
        "f_bfree": 1000,
        "f_bavail": 1000,
        "f_frsize": 1,
        "f_files": 9,
        "f_favail": 9,
    }
    with small_run(tmp_path, "--train-iters", "3", "--save-interval", "2") as run:
        # shutil.disk_usage asks it too
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**counts))
        with pytest.raises(
            StorageFault,
            match=r"a checkpoint needs [\d,]+ bytes.*1,000 bytes free in .*checkpoints",
        ):
            train(run, CheckpointHook())
    assert saved(tmp_path) == []
    assert len([line for line in logged if "training goes on" in line]) == 1
