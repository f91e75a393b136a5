"""TensorBoard's event files are read back, wandb works offline without a key, Prometheus gets every number."""

import errno
import socket
import threading
from types import SimpleNamespace
from urllib.request import urlopen

import pytest

from nanotrain.config.load import configure
from nanotrain.errors import ConfigError
from nanotrain.train.hooks import track as hook_track
from nanotrain.train.hooks.track import TRACKERS, PrometheusHook, TrackHook
from tests.harness import HANG_S, ranks
from tests.train.small_run import Failing, metrics_of, report_of, small_run, train


def read_scalars(folder) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_tensorboard_has_every_number_of_every_step(tmp_path):
    from nanotrain.train.hooks.log import LogHook

    with small_run(tmp_path, "--train-iters", "3", "--tensorboard") as run:
        train(run, LogHook(), TrackHook())
    scalars, lines = read_scalars(tmp_path), metrics_of(tmp_path)
    assert set(scalars) == {name for name, value in lines[0].items() if name != "step" and value is not None}
    for line in lines:
        assert scalars["loss"][line["step"]] == pytest.approx(line["loss"])
        assert scalars["skipped"][line["step"]] == 0.0


def test_wandb_works_offline_without_a_key(tmp_path, monkeypatch, logged):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))  # and no netrc
    monkeypatch.setattr(hook_track, "_netrc_has", lambda host: False)
    for name in ("WANDB_X_SERVICE_WAIT", "WANDB_INIT_TIMEOUT"):  # for the start of its process on a busy machine
        monkeypatch.setenv(name, str(HANG_S))
    with small_run(tmp_path / "run", "--train-iters", "2", "--wandb", "--wandb-project", "test") as run:
        train(run, TrackHook())
    (found,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    assert found.stat().st_size > 0
    assert any(line.startswith("wandb: offline, in ") for line in logged)


class Notebook:
    """A tracker that records its calls."""

    def __init__(self, run) -> None:
        self.run, self.written, self.closed = run, [], []
        notebooks.append(self)

    def write(self, step, values) -> None:
        self.written.append((step, sorted(values)))

    def close(self, *, failed) -> None:
        self.closed.append(failed)


notebooks: list[Notebook] = []


@pytest.fixture
def notebook(monkeypatch):
    """Puts a notebook in TensorBoard's place."""
    notebooks.clear()
    monkeypatch.setitem(TRACKERS, "tensorboard", Notebook)
    return notebooks


def test_what_is_not_known_is_not_sent(tmp_path, notebook):
    with small_run(tmp_path, "--train-iters", "1", "--tensorboard") as run:
        train(run, TrackHook())
    ((step, names),) = notebook[0].written
    assert step == 1 and "loss" in names and "mfu" not in names and "step" not in names
    assert notebook[0].closed == [False]


def test_a_tracker_hears_that_the_run_failed(tmp_path, notebook):
    with small_run(tmp_path, "--train-iters", "3", "--tensorboard") as run, pytest.raises(RuntimeError):
        train(run, TrackHook(), Failing(1))
    assert notebook[0].closed == [True]


@pytest.mark.parametrize("fault", ["make", "write", "close"])
def test_a_tracker_that_fails_is_left_out_and_training_goes_on(tmp_path, notebook, monkeypatch, logged, fault):
    def fail(*args, **options):
        raise OSError("no space")

    monkeypatch.setattr(Notebook, {"make": "__init__"}.get(fault, fault), fail)
    with small_run(tmp_path, "--train-iters", "3", "--tensorboard") as run:
        train(run, TrackHook())
        assert run.state.step == 3
    message = "training goes on without tensorboard, metrics.jsonl has every step: no space"
    assert [line for line in logged if "without" in line] == [message]
    assert len(notebook) == (fault != "make") and all(not book.closed for book in notebook)


def test_tensorboard_on_a_full_disk_prints_no_traceback(tmp_path, monkeypatch, logged, capfd):
    from tensorboard.summary.writer.record_writer import RecordWriter

    written = []

    def write(self, data):
        written.append(data)
        if len(written) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", write)
    before = threading.excepthook
    with small_run(tmp_path, "--train-iters", "6", "--tensorboard") as run:
        train(run, TrackHook())
        assert run.state.step == 6
    (line,) = [line for line in logged if "without" in line]
    assert "without tensorboard" in line and "No space left" in line
    assert "Traceback" not in capfd.readouterr().err and threading.excepthook is before


@ranks(2, threads=False)
def test_only_the_first_rank_tracks(ctx, tmp_path):
    TRACKERS["tensorboard"] = Notebook  # in this rank's process
    with small_run(tmp_path, "--train-iters", "1", "--tensorboard", context=ctx) as run:
        train(run, TrackHook())
    assert len(notebooks) == (ctx.rank == 0)


def test_tokens_per_expert_are_histograms(tmp_path):
    """In both trackers; the numbers beside them stay numbers."""
    from nanotrain.train.hooks.track import TensorBoardTracker, WandbTracker
    from tests.train.small_run import report_of

    written = []
    hook, run = (
        TrackHook(),
        SimpleNamespace(
            folder=SimpleNamespace(path=tmp_path),
            state=SimpleNamespace(step=0),
            config=SimpleNamespace(train=SimpleNamespace(tensorboard_dir=None)),
        ),
    )
    board, wandb = TensorBoardTracker(run), object.__new__(WandbTracker)
    wandb._histogram = list
    wandb._run = SimpleNamespace(log=lambda values, step: written.append(values), finish=lambda exit_code: None)
    hook._trackers = {"tensorboard": board, "wandb": wandb}
    hook.after_step(run, report_of(1, metrics={"moe": {"max_load": 1.5, "load": {"layers.1": [10, 30, 20, 4]}}}))
    hook.close(failed=False)
    assert written[0]["moe_load/layers.1"] == [10, 30, 20, 4] and written[0]["moe_max_load"] == 1.5
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (histogram,) = events.Histograms("moe_load/layers.1")
    assert (histogram.histogram_value.min, histogram.histogram_value.max, histogram.histogram_value.num) == (4, 30, 4)


prometheus_client = pytest.importorskip("prometheus_client")
start_http_server = prometheus_client.start_http_server


def at_a_free_port(port: int, **given):
    """As `start_http_server`: a port that was free a moment ago may be another test's by now."""
    assert port == 9400
    return start_http_server(0, **given)


def run_at(port: int, folder, *, is_first: bool = True):
    """What the hook reads of a run."""
    return SimpleNamespace(
        config=configure("tiny", prometheus_port=port),
        context=SimpleNamespace(control=SimpleNamespace(is_first=is_first)),
        folder=SimpleNamespace(path=folder / "llama"),
    )


def test_the_newest_numbers_are_served(tmp_path, monkeypatch):
    monkeypatch.setattr(prometheus_client, "start_http_server", at_a_free_port)
    hook, run = PrometheusHook(), run_at(9400, tmp_path)
    hook.before_training(run)
    port = hook._server.server_port
    for step, loss in ((1, 3.0), (2, 2.5)):
        hook.after_step(run, report_of(step, loss=loss, metrics={"moe": {"max_load": 1.5, "load": {"0": [1, 2]}}}))
    page = urlopen(f"http://127.0.0.1:{port}/metrics", timeout=HANG_S).read().decode()
    hook.close(failed=False)
    assert 'nanotrain_loss{run="llama"} 2.5' in page and 'nanotrain_moe_max_load{run="llama"} 1.5' in page
    assert 'nanotrain_step{run="llama"} 2.0' in page and "moe_load" not in page and "mfu" not in page
    assert hook._server.socket.fileno() == -1, "closed"


def test_a_port_that_is_taken_is_a_warning(tmp_path, logged):
    with socket.create_server(("127.0.0.1", 0)) as server:
        hook, run = PrometheusHook(), run_at(server.getsockname()[1], tmp_path)
        hook.before_training(run)
        hook.after_step(run, report_of())
        hook.close(failed=True)
    assert len(logged) == 1 and logged[0].startswith("no Prometheus endpoint at 127.0.0.1:")


def test_only_the_first_rank_serves(tmp_path, monkeypatch):
    monkeypatch.setattr(prometheus_client, "start_http_server", lambda *_, **__: pytest.fail("served"))
    hook, run = PrometheusHook(), run_at(9400, tmp_path, is_first=False)
    hook.before_training(run)
    hook.after_step(run, report_of())
    hook.close(failed=False)


def test_an_address_without_a_port_has_no_effect():
    with pytest.raises(ConfigError, match="prometheus_port is unset"):
        configure("tiny", prometheus_address="0.0.0.0")
