"""Ranks meet at one address: an empty store per attempt, one message where they do not belong
together, and no wait without a name and an end.
"""

import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from nanotrain.comm import meeting
from nanotrain.comm.meeting import require_host, store_of_attempt
from nanotrain.comm.process_groups import join_world
from nanotrain.errors import EnvironmentFault
from tests.harness import HANG_S


def meet(
    store: dist.Store, world_size: int, *, first: int = 0, timeout_s: float = HANG_S
) -> list[dist.Store]:
    def join(rank: int) -> dist.Store:
        return store_of_attempt(
            store, rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
        )

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(join, reversed(range(first, world_size))))  # rank 0 comes last


def test_every_attempt_has_an_empty_store_that_all_its_ranks_share():
    store = dist.HashStore()
    store.add("nanotrain-attempts/count", 2)
    # and the first ended before it published
    store.set("nanotrain-attempts/drawn-2", "of a rank that has ended")
    for world_size in (4, 4, 3, 1, 5):
        stores = meet(store, world_size)
        assert not any(each.check(["address"]) for each in stores)
        stores[0].set("address", "1.2.3.4")
        assert [each.get("address") for each in stores] == [b"1.2.3.4"] * world_size


def test_a_rank_that_does_not_come_is_an_error_with_the_number_of_those_that_did():
    with pytest.raises(RuntimeError, match="1 of 2 ranks joined"):
        store_of_attempt(dist.HashStore(), 0, world_size=2, timeout=timedelta(seconds=0.1))


def test_a_store_that_cannot_be_reached_is_one_error_without_stacks(monkeypatch, capfd):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(
        EnvironmentFault,
        match=f"127.0.0.1:{port} accepts no connection: Connection refused, for 0.2 s",
    ):
        join_world(1, 2, device=torch.device("cpu"), timeout=timedelta(seconds=0.2))
    assert capfd.readouterr().err == ""


def test_a_meeting_point_without_an_address_is_one_error_that_names_it(monkeypatch):
    def unknown(*_arguments):
        raise socket.gaierror(-2, "Name or service not known")

    require_host("127.0.0.1")
    with pytest.raises(EnvironmentFault, match=r"MASTER_ADDR 'a\.b.*x' has no address"):
        # no name: a part has at most 63 characters
        require_host("a." + "b" * 99 + ".x", timeout_s=0.0)
    monkeypatch.setattr(meeting.socket, "getaddrinfo", unknown)
    with pytest.raises(
        EnvironmentFault, match="'node7' has no address: Name or service not known; set MASTER_ADDR"
    ):
        require_host("node7", timeout_s=0.0)


def test_a_port_that_accepts_and_is_silent_is_named_and_given_up(monkeypatch, caplog):
    """Another program has the port; torch's client would wait for it without end."""
    monkeypatch.setattr("nanotrain.waiting.NAMED_AFTER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        start = time.monotonic()
        with (
            caplog.at_level("WARNING", "nanotrain"),
            pytest.raises(
                EnvironmentFault, match=f"127.0.0.1:{port} accepts connections and sends"
            ),
        ):
            meeting.meet(1, 2, timeout=timedelta(seconds=0.6))
        # kept until the process ends: its end would end the thread that waits for it with a stack
        silent.detach()
    assert 0.6 <= time.monotonic() - start < 5
    [line] = [record.getMessage() for record in caplog.records]
    assert re.fullmatch(rf".*:{port} accepts connections and sends nothing for . s; .* 0.6 s", line)


def join_all(world_sizes: list[tuple[int, int]]) -> list[str]:
    """The errors of ranks with the numbers of ranks that they were started with; empty if none."""
    store = dist.HashStore()

    def join(rank_and_size: tuple[int, int]) -> str:
        rank, world_size = rank_and_size
        try:
            timeout = timedelta(seconds=HANG_S)
            store_of_attempt(store, rank, world_size=world_size, timeout=timeout)
        except EnvironmentFault as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(world_sizes)) as pool:
        return list(pool.map(join, world_sizes))


@pytest.mark.parametrize(
    ("started", "fault"),
    [
        ([(0, 2), (1, 3)], "rank 1 was started with WORLD_SIZE 3, rank 0 with 2"),
        ([(0, 3), (1, 3), (1, 3)], "two processes were started as rank 1 of 3"),
    ],
)
def test_ranks_that_do_not_belong_together_end_with_one_message(started, fault):
    assert join_all([(rank, 3) for rank in range(3)]) == [""] * 3
    errors = join_all(started)
    assert set(errors) == {errors[0]} and fault in errors[0]


def test_the_missing_ranks_are_named():
    store = dist.HashStore()
    timeout = timedelta(seconds=1.0)

    def join(rank: int) -> str:
        try:
            store_of_attempt(store, rank, world_size=4, timeout=timeout)
        except (RuntimeError, EnvironmentFault) as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        first, other = pool.map(join, [0, 2])
    assert first == "only 2 of 4 ranks joined in time, not rank 1, 3"
    assert "only 2 of 4 ranks joined in time" in other
