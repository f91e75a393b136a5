"""Without a network the hub client is switched to its cache, so an unknown name fails at once."""

import socket

import pytest
from huggingface_hub import constants

from nanotrain.data.hf import first_line, go_offline_if_unreachable


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("urllib.request.getproxies", dict)


@pytest.mark.usefixtures("online")
def test_a_refused_connection_switches_the_client_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: tuple[str, int], timeout: float) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refuse)
    go_offline_if_unreachable()
    assert constants.HF_HUB_OFFLINE


@pytest.mark.usefixtures("online")
def test_behind_a_proxy_the_client_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("urllib.request.getproxies", lambda: {"https": "http://proxy"})
    monkeypatch.setattr(socket, "create_connection", lambda *a, **k: pytest.fail("no direct connection"))
    go_offline_if_unreachable()
    assert not constants.HF_HUB_OFFLINE


def test_an_error_without_a_message_has_its_type() -> None:
    assert first_line(ValueError("  one\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"
