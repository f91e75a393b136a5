"""The profiler's trace: which steps, where, and when there is none."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import profiler as profile

from nanotrain.config.config import TrainConfig
from nanotrain.report.timeline import hidden_share, read_timeline
from nanotrain.train.hooks import profile as hook
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.hooks.profile import ProfileHook
from tests.harness import run_ranks
from tests.laws.command_line import arguments, run_command_lines
from tests.train.small_run import Failing, small_run, train

TWO = SimpleNamespace(world_size=2)
TWO_STEPS = ("--profile", "--profile-step-start", "2", "--profile-step-end", "3")


def traces(folder) -> list[str]:
    return (
        sorted(path.name for path in (folder / "profile").glob("*"))
        if (folder / "profile").exists()
        else []
    )


def test_a_trace_of_the_asked_steps_is_written(tmp_path, logged):
    with small_run(tmp_path, "--train-iters", "4", *TWO_STEPS) as run:
        train(run, ProfileHook())
    assert traces(tmp_path) == ["step-00000003-rank-00000.json"]
    trace = json.loads((tmp_path / "profile" / "step-00000003-rank-00000.json").read_text())
    names = [event.get("name", "") for event in trace["traceEvents"]]
    # one for each of the two steps
    assert sum("Optimizer.step#adam" in name for name in names) == 2
    assert any("wrote profile" in line for line in logged)


@pytest.mark.parametrize(("rank", "number"), [("0", 1), ("1", 0)])
def test_only_ranks_of_the_list_write_a_trace(tmp_path, rank, number):
    with small_run(tmp_path, "--train-iters", "3", *TWO_STEPS, "--profile-ranks", rank) as run:
        train(run, ProfileHook())
    assert len(traces(tmp_path)) == number


@pytest.mark.parametrize(("world_size", "ranks"), [(64, {0, 1, 2, 3}), (128, {0, 1})])
def test_of_many_ranks_those_of_one_replica_are_recorded(world_size, ranks):
    topology = SimpleNamespace(world_size=world_size)
    contexts = [
        SimpleNamespace(
            rank=rank,
            topology=topology,
            group=lambda name, rank=rank: SimpleNamespace(is_first=rank < 2),
        )
        for rank in range(4)
    ]
    assert {
        context.rank for context in contexts if hook.is_recorded(TrainConfig(), context)
    } == ranks
    assert [hook.is_recorded(TrainConfig(profile_ranks=[3]), context) for context in contexts] == [
        False
    ] * 3 + [True]


def test_the_history_of_memory_is_written_after_an_error_too(tmp_path, monkeypatch, logged):
    written: list[Path] = []
    monkeypatch.setattr(
        hook, "start_memory_history", lambda device: written.append(Path(device.type))
    )
    monkeypatch.setattr(hook, "write_memory_history", written.append)
    settings = TrainConfig(memory_snapshot_path=str(tmp_path / "m.pickle"), profile_ranks=[0])
    rank_0, rank_1 = (
        SimpleNamespace(rank=rank, device=torch.device("cuda"), topology=TWO) for rank in (0, 1)
    )
    with pytest.raises(MemoryError), hook.memory_snapshot(settings, rank_0):
        raise MemoryError
    assert written == [Path("cuda"), tmp_path / "m-rank-00000.pickle"]
    with hook.memory_snapshot(settings, rank_1), hook.memory_snapshot(TrainConfig(), rank_0):
        pass
    assert len(written) == 2
    # a file that cannot be written ends no run
    monkeypatch.setattr(hook, "write_memory_history", lambda path: path.write_bytes(b""))
    with hook.memory_snapshot(
        TrainConfig(memory_snapshot_path=str(tmp_path / "none" / "m")), rank_0
    ):
        pass
    assert any(line.startswith("no memory snapshot: ") for line in logged)


def test_an_early_end_writes_what_there_is(tmp_path):
    with small_run(tmp_path, "--train-iters", "4", "--exit-interval", "2", *TWO_STEPS) as run:
        train(run, ProfileHook())
    assert traces(tmp_path) == ["step-00000002-rank-00000.json"]


def test_a_resumed_run_profiles_what_is_left_of_the_steps_or_says_that_none_is(tmp_path, logged):
    # Given a run that was saved after step 2, the first of the profiled steps,
    with small_run(tmp_path, "--train-iters", "2") as run:
        train(run, CheckpointHook())
    # then going on profiles the other one,
    with small_run(tmp_path, "--train-iters", "4", *TWO_STEPS) as run:
        train(run, ProfileHook(), CheckpointHook())
    assert traces(tmp_path) == ["step-00000003-rank-00000.json"]
    assert not any("no profile" in line for line in logged)
    # and going on once more has none left.
    with small_run(tmp_path, "--train-iters", "5", *TWO_STEPS) as run:
        train(run, ProfileHook())
    assert "no profile: the run starts at step 5, after --profile-step-end 3" in logged


@pytest.mark.parametrize("fault", ["disk", "folder"])
def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path, logged, monkeypatch, fault):
    """On a full disk torch leaves a part of the trace under another name and raises nothing."""

    def export(self, path):
        Path(f"{path}.tmp").write_text("{")

    if fault == "disk":
        monkeypatch.setattr(profile.profile, "export_chrome_trace", export)
    else:
        (tmp_path / "profile").touch()
    with small_run(tmp_path, "--train-iters", "4", *TWO_STEPS) as run:
        train(run, ProfileHook())
        assert run.state.step == 4
    reason = "bytes free in" if fault == "disk" else "File exists"
    assert [line for line in logged if "profile" in line] == [
        line for line in logged if reason in line
    ]
    assert traces(tmp_path) == []


def test_an_error_leaves_no_profiler_running_and_no_half_trace(tmp_path):
    with small_run(tmp_path, "--train-iters", "4", *TWO_STEPS) as run, pytest.raises(RuntimeError):
        train(run, ProfileHook(), Failing(2))
    assert traces(tmp_path) == []
    with small_run(tmp_path / "next", "--train-iters", "4", *TWO_STEPS) as run:
        train(run, ProfileHook())  # a second profiler may start
    assert len(traces(tmp_path / "next")) == 1


def test_a_profile_that_ends_while_parameters_are_gathered_leaves_the_heap_whole(
    tmp_path: Path,
) -> None:
    # torch 2.13: a transfer begun under the profiler and waited for after it frees memory twice,
    # soon or at exit.
    overlapped = arguments(tmp_path / "run", "--train-iters 6 --overlap-param-gather --profile")
    run_ranks(
        2,
        run_command_lines,
        overlapped,
        arguments(tmp_path / "next", "--train-iters 3"),
        threads=False,
        strategy="optim",
    )
    assert len(list((tmp_path / "run" / "profile").iterdir())) == 2
    # The traces of both ranks show the last step, with gloo's transfers beside operators.
    read = read_timeline(tmp_path / "run")
    assert [(lanes.rank, lanes.step) for lanes in read.ranks] == [
        (0, 5),
        (1, 5),
    ] and not read.on_device
    assert all(lanes.total_ms["compute"] > 0 for lanes in read.ranks)
    share = hidden_share(read.ranks)
    assert share is not None and 0 <= share <= 1  # how much is up to the machine
    next((tmp_path / "run" / "profile").glob("*-rank-00001.json")).unlink()  # a second to read
    assert read_timeline(tmp_path / "run", step=3).ranks[0].step == 3
