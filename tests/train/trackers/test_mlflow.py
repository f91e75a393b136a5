"""MLflow beside a stub of its module: one run over all starts, numbers at their steps."""

import sys
from types import SimpleNamespace

import pytest

from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.hooks.log import LogHook
from nanotrain.train.hooks.track import TrackHook
from tests.train.small_run import Failing, metrics_of, report_of, small_run, train


class Server:
    """Records what the module `mlflow` is asked for, as calls of its names."""

    def __init__(self, uri: str | None) -> None:
        self.uri, self.calls, self.active = uri, [], None

    def is_tracking_uri_set(self) -> bool:
        return self.uri is not None

    def set_tracking_uri(self, uri: str) -> None:
        self.uri = uri

    def get_tracking_uri(self) -> str | None:
        return self.uri

    def start_run(self, run_id: str | None = None, run_name: str | None = None):
        self.calls.append(("start", run_id, run_name))
        self.active = SimpleNamespace(info=SimpleNamespace(run_id=run_id or "0a1b"))
        return self.active

    def active_run(self):
        return self.active

    def log_params(self, params: dict[str, str]) -> None:
        self.calls.append(("params", params))

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.calls.append(("metrics", step, values))

    def end_run(self, status: str) -> None:
        self.calls.append(("end", status))

    def named(self, name: str) -> list[tuple]:
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def server(monkeypatch) -> Server:
    server = Server(None)
    monkeypatch.setitem(sys.modules, "mlflow", server)
    return server


def test_all_starts_continue_one_run(tmp_path, server, logged):
    flags = ("--trackers", "mlflow", "--save-interval", "2", "--lr-decay-style", "constant")
    with (
        small_run(tmp_path / "llama", "--train-iters", "9", *flags) as run,
        pytest.raises(RuntimeError),
    ):
        train(run, LogHook(), TrackHook(), CheckpointHook(), Failing(3))
    with small_run(tmp_path / "llama", "--train-iters", "4", *flags) as run:
        train(run, LogHook(), TrackHook())
    assert server.named("start") == [(None, "llama"), ("0a1b", None)]
    assert server.named("end") == [("FAILED",), ("FINISHED",)]
    assert [step for step, _ in server.named("metrics")] == [1, 2, 3, 3, 4]
    last = metrics_of(tmp_path / "llama")[-1]
    assert server.named("metrics")[-1][1]["loss"] == last["loss"]
    (params,) = server.named("params")  # of the first start: MLflow refuses other values later
    assert params[0]["train.train_iters"] == "9" and params[0]["train.trackers"] == "['mlflow']"
    assert f"mlflow: run 0a1b at sqlite:///{tmp_path / 'llama/mlflow/mlflow.db'}" in logged


def test_a_run_that_is_begun_anew_is_another_one(tmp_path, server):
    for flag in ("--auto-resume", "--auto-resume", "--no-auto-resume"):
        with small_run(tmp_path / "llama", flag, "--trackers", "mlflow") as run:
            TrackHook().begin_writing(run, step=0)
    assert [run_id for run_id, _ in server.named("start")] == [None, "0a1b", None]


def test_the_server_of_the_user_is_kept_and_names_are_those_that_mlflow_allows(tmp_path, server):
    server.uri = "https://mlflow.example"
    hook = TrackHook()
    with small_run(tmp_path / "llama", "--trackers", "mlflow") as run:
        hook.begin_writing(run, step=0)
        load = {"max_load": 1.5, "load": {"0": [1, 2]}}
        hook.after_read(run, report_of(7, loss=2.5, metrics={"moe": load}))
        hook.close(failed=False)
    assert server.uri == "https://mlflow.example"
    ((step, values),) = server.named("metrics")
    assert step == 7 and values["loss"] == 2.5 and values["moe_max_load"] == 1.5
    assert "moe_load/0" not in values, "MLflow has no histograms"
