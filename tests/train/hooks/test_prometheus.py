"""The endpoint for Prometheus: its numbers, a port that is taken, a package that is missing."""

import socket
from types import SimpleNamespace
from urllib.request import urlopen

import pytest

from nanotrain.config.load import configure
from nanotrain.errors import ConfigError
from nanotrain.train.hooks.prometheus import PrometheusHook
from tests.harness import HANG_S
from tests.train.small_run import report_of

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
