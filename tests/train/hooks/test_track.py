"""TensorBoard's event files are read back, Prometheus gets every number, messages are sent in
order.
"""

import errno
import json
import math
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from urllib.request import urlopen

import pytest

from nanotrain.config.flags import parse
from nanotrain.config.load import configure, explain, load, load_config, load_object, to_yaml
from nanotrain.config.schema import config_from_dict, to_dict
from nanotrain.errors import ConfigError
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.hooks.track import TRACKERS, NotifyHook, Sender, TrackHook
from nanotrain.train.main import main
from nanotrain.train.step_report import SpikeScore
from tests.harness import HANG_S, ranks
from tests.train.small_run import Failing, arguments, metrics_of, report_of, small_run, train


def read_scalars(folder) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    assert all(len({event.step for event in each}) == len(each) for each in scalars.values()), (
        "a step twice"
    )
    return {tag: {event.step: event.value for event in each} for tag, each in scalars.items()}


def test_tensorboard_has_every_number_of_every_step(tmp_path):
    from nanotrain.train.hooks.log import LogHook

    with small_run(tmp_path, "--train-iters", "3", "--tensorboard") as run:
        train(run, LogHook(), TrackHook())
    scalars, lines = read_scalars(tmp_path), metrics_of(tmp_path)
    assert set(scalars) == {
        name
        for name, value in lines[0].items()
        if name not in ("step", "crc32") and value is not None
    }
    for line in lines:
        assert scalars["loss"][line["step"]] == pytest.approx(line["loss"])
        assert scalars["skipped"][line["step"]] == 0.0


def test_tensorboard_continues_after_a_kill_and_a_rollback(tmp_path, monkeypatch):
    from tensorboard.summary.writer import event_file_writer

    from nanotrain.train.hooks.log import LogHook

    # files of one second are read in the order of the texts of this number
    counter = event_file_writer.AtomicCounter(0)
    monkeypatch.setattr(event_file_writer, "_global_uid", counter)

    # Given a run that saved step 2 and was killed after step 3,
    arguments = ("--save-interval", "2", "--tensorboard")
    with small_run(tmp_path, "--train-iters", "9", *arguments) as run, pytest.raises(RuntimeError):
        train(run, LogHook(), TrackHook(), CheckpointHook(), Failing(3))
    # when it goes on from there, and goes back to step 4 after step 5,
    hook = TrackHook()
    with small_run(tmp_path, "--train-iters", "5", "--tensorboard") as run:
        train(run, LogHook(), hook)
        hook.begin_writing(run, step=run.state.step)
        run.state.step = 4
        hook.after_rollback(run, report_of(6))
        hook.after_read(run, report_of(5, loss=7.0))
        hook.close(failed=False)
    # then every step is there once, as it was taken last.
    losses = read_scalars(tmp_path)["loss"]
    assert sorted(losses) == [1, 2, 3, 4, 5] and losses[5] == 7.0
    assert losses[4] == pytest.approx(metrics_of(tmp_path)[3]["loss"])


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
    with (
        small_run(tmp_path, "--train-iters", "3", "--tensorboard") as run,
        pytest.raises(RuntimeError),
    ):
        train(run, TrackHook(), Failing(1))
    assert notebook[0].closed == [True]


@pytest.mark.parametrize("fault", ["make", "write", "close"])
def test_a_tracker_that_fails_is_left_out_and_training_goes_on(
    tmp_path, notebook, monkeypatch, logged, fault
):
    def fail(*args, **options):
        raise OSError("no space")

    monkeypatch.setattr(Notebook, {"make": "__init__"}.get(fault, fault), fail)
    with small_run(tmp_path, "--train-iters", "3", "--tensorboard") as run:
        train(run, TrackHook())
        assert run.state.step == 3
    message = "training goes on without tensorboard, metrics.jsonl has every step: no space"
    assert [line for line in logged if "without" in line] == [message]
    assert len(notebook) == (fault != "make") and all(not book.closed for book in notebook)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_on_a_full_disk_ends_no_run(tmp_path, monkeypatch, logged):
    from tensorboard.summary.writer.record_writer import RecordWriter

    written = []

    def write(self, data):
        written.append(data)
        if len(written) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", write)
    with small_run(tmp_path, "--train-iters", "6", "--tensorboard") as run:
        train(run, TrackHook())
        assert run.state.step == 6
    (line,) = [line for line in logged if "without" in line]
    assert "without tensorboard" in line and "No space left" in line


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
    wandb._histogram, wandb._num_repeated = list, 0
    wandb._run = SimpleNamespace(
        log=lambda values, step: written.append(values), finish=lambda exit_code: None
    )
    hook._trackers = {"tensorboard": board, "wandb": wandb}
    hook.after_read(
        run, report_of(1, metrics={"moe": {"max_load": 1.5, "load": {"layers.1": [10, 30, 20, 4]}}})
    )
    hook.close(failed=False)
    assert written[0]["moe_load/layers.1"] == [10, 30, 20, 4] and written[0]["moe_max_load"] == 1.5
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (histogram,) = events.Histograms("moe_load/layers.1")
    assert (
        histogram.histogram_value.min,
        histogram.histogram_value.max,
        histogram.histogram_value.num,
    ) == (4, 30, 4)


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
    hook, run = TrackHook(), run_at(9400, tmp_path)
    hook.begin_writing(run, step=0)
    server = hook._trackers["prometheus_port"]._server
    for step, loss in ((1, 3.0), (2, 2.5)):
        hook.after_read(
            run,
            report_of(step, loss=loss, metrics={"moe": {"max_load": 1.5, "load": {"0": [1, 2]}}}),
        )
    page = urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=HANG_S).read().decode()
    hook.close(failed=False)
    assert (
        'nanotrain_loss{run="llama"} 2.5' in page
        and 'nanotrain_moe_max_load{run="llama"} 1.5' in page
    )
    assert (
        'nanotrain_step{run="llama"} 2.0' in page and "moe_load" not in page and "mfu" not in page
    )
    assert server.socket.fileno() == -1, "closed"


def test_a_port_that_is_taken_is_a_warning(tmp_path, logged):
    with socket.create_server(("127.0.0.1", 0)) as server:
        hook, run = TrackHook(), run_at(server.getsockname()[1], tmp_path)
        hook.begin_writing(run, step=0)
        hook.after_read(run, report_of())
        hook.close(failed=True)
    assert len(logged) == 1 and "without prometheus_port" in logged[0] and "in use" in logged[0]


def test_only_the_first_rank_serves(tmp_path, monkeypatch):
    monkeypatch.setattr(
        prometheus_client, "start_http_server", lambda *_, **__: pytest.fail("served")
    )
    hook, run = TrackHook(), run_at(9400, tmp_path, is_first=False)
    hook.begin_writing(run, step=0)
    hook.after_read(run, report_of())
    hook.close(failed=False)


def test_an_address_without_a_port_has_no_effect():
    with pytest.raises(ConfigError, match="prometheus_port is unset"):
        configure("tiny", prometheus_address="0.0.0.0")


SECRET = "http://127.0.0.1:9/hook/T0KEN"


@pytest.fixture(autouse=True)
def waiting_and_direct(monkeypatch):
    """The end waits for the last message however slow the machine, and no proxy is asked for its
    address.
    """
    monkeypatch.setitem(Sender.close.__kwdefaults__, "wait_s", HANG_S)
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def server():
    """A server on this machine that keeps the messages it gets."""
    messages: list[dict[str, object]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        yield SimpleNamespace(url=f"http://127.0.0.1:{http.server_port}/", messages=messages)
        http.shutdown()


def run_with(url: str, folder, *, is_first: bool = True):
    """What the hook reads of a run."""
    return SimpleNamespace(
        config=configure("tiny", notify=url, train_iters=30),
        context=SimpleNamespace(
            control=SimpleNamespace(is_first=is_first), topology=SimpleNamespace(world_size=4)
        ),
        folder=SimpleNamespace(path=folder / "llama"),
        state=SimpleNamespace(step=0),
    )


def test_start_spike_and_end_are_sent_in_order(server, tmp_path):
    hook, run, spikes = NotifyHook(), run_with(server.url, tmp_path), SpikeScore()
    hook.before_training(run)
    losses = [3.0 + step % 3 / 100 for step in range(120)]
    losses[52] = 3.063  # 6.5 standard deviations above the mean, which the log does not name
    losses[55] = 3.2
    losses[60] = 9.0  # too soon after the message
    losses[110] = 0.1  # below the mean
    for step, loss in enumerate(losses, start=1):
        hook.after_read(run, report_of(step, loss=loss, spikes=spikes))
    run.state.step = 30
    hook.after_training(run)
    hook.close(failed=False)
    assert [message["event"] for message in server.messages] == ["start", "spike", "end"]
    spike = server.messages[1]
    assert spike["step"] == 56 and spike["loss"] == 3.2 and spike["train_iters"] == 30
    assert spike["text"] == "llama: step 56 of 30: the loss is 3.2"


def test_a_failure_is_sent_and_a_loss_that_is_not_finite_is_a_spike(server, tmp_path):
    hook, run = NotifyHook(), run_with(server.url, tmp_path)
    hook.before_training(run)
    hook.after_read(run, report_of(1, loss=math.nan))
    hook.close(failed=True)
    assert [(message["event"], message["loss"]) for message in server.messages] == [
        ("start", None),
        ("spike", None),
        ("failure", None),
    ]


def test_a_rollback_is_a_spike_of_the_step_that_does_not_count(server, tmp_path):
    hook, run = NotifyHook(), run_with(server.url, tmp_path)
    hook.before_training(run)
    hook.after_read(run, report_of(7, loss=3.0))
    run.state.step = 5  # after the rollback
    hook.after_rollback(run, report_of(8, loss=math.nan))
    hook.close(failed=False)
    message = server.messages[1]
    assert (message["event"], message["step"], message["loss"]) == ("spike", 8, None)
    assert message["text"] == "llama: step 8 of 30: the loss is nan; back to step 5"


def test_only_the_first_rank_sends(server, tmp_path):
    hook, run = NotifyHook(), run_with(server.url, tmp_path, is_first=False)
    hook.before_training(run)
    hook.after_read(run, report_of())
    hook.after_training(run)
    hook.close(failed=True)
    assert server.messages == []


def test_a_server_that_is_gone_is_one_warning_without_the_url(logged):
    sender = Sender(SECRET)
    for _ in range(3):
        sender.send({"event": "start"})
    sender.close()
    (line,) = logged
    assert "not delivered (URLError)" in line and "T0KEN" not in line


def test_a_server_that_never_replies_delays_nothing():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sender = Sender(f"http://127.0.0.1:{silent.getsockname()[1]}/")
        sender.send({"event": "spike"})
        sender.close(wait_s=0.05)
        assert sender._thread.is_alive(), "it still waits for the reply to the first"


def test_no_file_of_a_run_holds_the_url(tmp_path, capfd, monkeypatch, logging_as_before):
    line = arguments(tmp_path / "run", "--train-iters", "1", "--notify", SECRET)
    monkeypatch.setattr("sys.argv", ["nanotrain", *line])
    assert main(line) == 0
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 5 and not [path for path in files if b"T0KEN" in path.read_bytes()]
    captured = capfd.readouterr()
    assert (
        "T0KEN" not in captured.out + captured.err
        and "(hidden)" in (tmp_path / "run/environment.json").read_text()
    )


def test_the_url_is_used_but_not_printed(tmp_path, monkeypatch):
    monkeypatch.delenv("NANOTRAIN_NOTIFY", raising=False)
    line = ["+config=tiny", f"--notify={SECRET}", "--vocab-size", "64"]
    loaded = load(line)
    assert loaded.config.train.notify == SECRET == load_object(loaded.config).config.train.notify
    assert SECRET not in to_yaml(loaded.config) + explain(loaded, parse(line)) + str(
        to_dict(loaded.config)
    ) + str(loaded.origins)
    assert config_from_dict(to_dict(loaded.config)).train.notify is None  # as a checkpoint is read
    written = tmp_path / "config.yaml"
    written.write_text(to_yaml(loaded.config))
    assert load_config([f"+config={written}"]).train.notify is None
    monkeypatch.setenv("NANOTRAIN_NOTIFY", SECRET)
    assert load_config([f"+config={written}"]).train.notify == SECRET


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "http://",
        "http://h:99999/",
        "http://h:0/",
        "http://a b/",
        "http://[::1/",
        "http://h:x",
    ],
)
def test_what_is_no_address_of_a_server_is_refused(url):
    with pytest.raises(ConfigError, match="must begin with http"):
        load_config(["--notify", url])


def test_a_redirect_is_not_followed(server, logged):
    class Elsewhere(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(302)
            self.send_header("Location", server.url)
            self.end_headers()

        def do_GET(self) -> None:
            server.messages.append({})

    with HTTPServer(("127.0.0.1", 0), Elsewhere) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        sender = Sender(f"http://127.0.0.1:{http.server_port}/")
        sender.send({"event": "start"})
        sender.close()
        http.shutdown()
    assert not server.messages and "the server replied 302" in "".join(logged)
