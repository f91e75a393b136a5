"""Prometheus gets every number."""

import socket
from types import SimpleNamespace
from urllib.request import urlopen

import pytest

from nanotrain.config.load import configure
from nanotrain.errors import ConfigError
from nanotrain.train.hooks.track import TrackHook
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
    hook, run = TrackHook(), run_at(9400, tmp_path)
    hook.begin_writing(run, step=0)
    server = hook._trackers["prometheus"]._server
    for step, loss in ((1, 3.0), (2, 2.5)):
        hook.after_read(
            run,
            report_of(
                step,
                loss=loss,
                metrics={
                    "moe": {"max_load": 1.5, "load": {"0": [1, 2]}},
                    "source_losses": {"web-text.v2": 2.0},
                },
            ),
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
    assert 'nanotrain_loss_web_text_v2{run="llama"} 2.0' in page, "Prometheus has no dashes"
    assert server.socket.fileno() == -1, "closed"


def test_a_port_that_is_taken_is_a_warning(tmp_path, logged):
    with socket.create_server(("127.0.0.1", 0)) as server:
        hook, run = TrackHook(), run_at(server.getsockname()[1], tmp_path)
        hook.begin_writing(run, step=0)
        hook.after_read(run, report_of())
        hook.close(failed=True)
    assert len(logged) == 1 and "without prometheus" in logged[0] and "in use" in logged[0]


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
