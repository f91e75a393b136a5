"""Messages are sent in order, and neither their server nor their address harms a run."""

import json
import math
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from nanotrain.config.flags import parse
from nanotrain.config.load import configure, explain, load, load_config, load_object, to_yaml
from nanotrain.config.schema import config_from_dict, to_dict
from nanotrain.errors import ConfigError
from nanotrain.train.hooks.notify import NotifyHook, Sender
from nanotrain.train.main import main
from nanotrain.train.step_report import SpikeScore
from tests.harness import HANG_S
from tests.train.small_run import arguments, report_of

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
