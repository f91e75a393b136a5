"""Shards are read from servers of other hosts, which send nothing else."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from nanotrain.checkpoint.peers import PeerServer, PeerSource, fetch_text


@pytest.fixture
def server(tmp_path: Path) -> Any:
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "manifest.json").write_text("{}")
    (tmp_path / "secret").write_text("secret")
    server = PeerServer(tmp_path, "127.0.0.1")
    yield server
    server.close()


def test_a_server_sends_ranges_of_its_shards(server: PeerServer, tmp_path: Path) -> None:
    name = "step-00000001/shard-00000-of-00001.safetensors"
    (tmp_path / name).write_bytes(bytes(range(100)))
    source = PeerSource(server.peer, name, size=100)
    into = memoryview(bytearray(20))

    assert source.read_into(into, 90) == 10 and bytes(into[:10]) == bytes(range(90, 100))
    assert source.read_into(into, 100) == 0
    assert fetch_text(server.peer, "step-00000001/manifest.json") == "{}"


@pytest.mark.parametrize(
    ("changes", "file"),
    [
        ({"token": 32 * "0"}, "step-00000001/manifest.json"),
        ({}, "step-00000001/../secret"),
        ({}, "secret"),
        ({}, "step-00000002/manifest.json"),
    ],
    ids=["another token", "a path out of the folder", "another file", "no such file"],
)
def test_a_server_sends_nothing_else(
    server: PeerServer, changes: Mapping[str, Any], file: str
) -> None:
    with pytest.raises(OSError, match="does not have"):
        fetch_text(server.peer._replace(**changes), file)


def test_a_link_in_a_step_folder_is_not_followed(server: PeerServer, tmp_path: Path) -> None:
    name = "step-00000001/shard-00000-of-00001.safetensors"
    (tmp_path / name).symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="does not have"):
        fetch_text(server.peer, name)


def test_a_host_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    server = PeerServer(tmp_path, "127.0.0.1")
    server.close()

    with pytest.raises(OSError):
        fetch_text(server.peer, "step-00000001/manifest.json")


def test_a_server_listens_on_the_network_of_the_ranks_alone(
    server: PeerServer, tmp_path: Path
) -> None:
    """Another address of the loopback network stands for another interface."""
    file = "step-00000001/manifest.json"
    with pytest.raises(OSError, match="refused"):
        fetch_text(server.peer._replace(address="127.0.0.2"), file)

    named = PeerServer(tmp_path, "this-machine")  # a name may mean another address elsewhere
    try:
        assert fetch_text(named.peer._replace(address="127.0.0.2"), file) == "{}"
    finally:
        named.close()
