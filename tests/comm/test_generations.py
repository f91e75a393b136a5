"""Generations of a job: who ends one, and what waits for a rank that is gone."""

import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from nanotrain.comm import generations
from nanotrain.comm.connections import open_sockets, shut_down_connections
from nanotrain.comm.generation_store import Fault, FinalError
from nanotrain.comm.generations import (
    SUPERVISED,
    ErrorOfAnother,
    Generation,
    GenerationEnded,
    Generations,
)
from nanotrain.comm.work import CommunicationFault
from nanotrain.errors import ConfigError, EnvironmentFault, LocalFault, ReportedFault

JOIN_S = 30
KILLED = Fault(1, "SIGKILL ended it", 5.0, is_death=True)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Sequence[Generations]:
    """Two ranks of a job, in this process, under a launcher that starts dead ranks again."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv(SUPERVISED, "1")
    monkeypatch.setattr(generations, "WAIT_AFTER_OTHERS_S", 0.1)
    monkeypatch.setattr(generations, "WAIT_FOR_END_S", 0.1)
    monkeypatch.setattr(generations, "WAIT_FOR_REPORT_S", 0.0)
    ranks = []
    for rank in range(2):
        timeout = timedelta(seconds=JOIN_S)
        ranks.append(Generations(rank, 2, timeout=timeout, max_restarts=3))
    ranks[0].server = store  # type: ignore[attr-defined]  # lives as long
    return ranks


def join(job: Sequence[Generations]) -> list[Generation]:
    joined: dict[int, Generation] = {}
    threads = []
    for rank in job:
        join_one = lambda rank=rank: joined.update({rank.rank: rank.join()})  # noqa: E731
        threads.append(threading.Thread(target=join_one))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [joined[rank.rank] for rank in job]


def test_ranks_meet_again_after_an_error_of_one(job: Sequence[Generations]) -> None:
    first, second = join(job)
    assert (first.number, first.restart) == (0, None)
    second.connected(lambda: 7)
    job[1].leave(second, ValueError("bad"))
    job[0].leave(first, CommunicationFault("lost"))
    assert (job[0].has_own_error, job[1].has_own_error) == (False, True)
    again, _ = join(job)
    assert again.number == 1 and again.restart is not None
    assert again.restart.fault.text == "rank 1 in step 7: ValueError: bad"
    assert again.restart.met_s >= again.restart.noticed_s >= again.restart.fault.time_s


def test_a_rank_that_died_before_all_had_joined_is_awaited(job: Sequence[Generations]) -> None:
    waiting = threading.Thread(target=lambda: join(job[:1]))
    waiting.start()
    while job[1].store.num_joined(0) < 1:
        time.sleep(0.01)
    job[1].store._store.set("at-1", "0")  # and dies before it is counted
    job[1].store.end_generation_of(KILLED)
    (generation,) = join(job[1:])
    waiting.join()
    assert generation.number == 1


def test_a_step_that_is_repeated_after_a_death_of_all_ranks_is_not_new(
    job: Sequence[Generations],
) -> None:
    store = job[0].store
    first, _ = join(job)
    for step in range(1, 5):
        first.completed(step)
    store.end_generation_of(KILLED)  # nobody is left to note a departure
    second, _ = join(job)
    second.completed(4)
    assert not store.has_new_step([1])
    second.completed(5)
    assert store.has_new_step([1])
    assert (store.highest_step(1), store.highest_step(2)) == (4, 5)


def test_the_first_rank_that_is_left_is_told_so_though_the_run_ends(
    job: Sequence[Generations], monkeypatch: pytest.MonkeyPatch
) -> None:
    became_first: list[int] = []
    for rank in job:
        rank.max_restarts = 0
        monkeypatch.setattr(rank, "_become_first", lambda rank=rank: became_first.append(rank.rank))
    join(job)
    job[0].store.let_leave([1], Fault(0, "SIGKILL ended it; it leaves the run", 5.0))
    with pytest.raises(EnvironmentFault, match="no further restart"):
        job[1].join()
    assert job[0].join() is None
    assert became_first == [0, 1]


@pytest.mark.parametrize("error", [ConfigError("wrong"), EnvironmentFault("no disk")])
def test_an_error_that_all_ranks_raise_ends_the_run(
    job: Sequence[Generations], error: Exception
) -> None:
    first, _ = join(job)
    with pytest.raises(type(error)):
        job[0].leave(first, error)
    job[1].store.end(0, KILLED)
    with pytest.raises(ReportedFault, match="the error of another rank"):
        job[1].join()


def test_a_rank_whose_process_ended_after_its_error_reports_it_still(
    job: Sequence[Generations],
) -> None:
    for number in range(2):
        _, second = join(job)
        job[1].leave(second, ValueError("bad"))
        job[0].store.leave(number, 0)
    job[1]._error = None  # another process
    with ThreadPoolExecutor(2) as pool:
        joins = [pool.submit(rank.join) for rank in job]
    ends = [joined.exception() for joined in joins]
    assert isinstance(ends[0], ErrorOfAnother) and isinstance(ends[1], LocalFault)
    assert "the same error twice: rank 1: ValueError: bad" in str(ends[1])


def test_a_rank_that_will_not_come_back_is_not_awaited(
    job: Sequence[Generations], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "WAIT_FOR_REPORT_S", JOIN_S)
    first, _ = join(job)
    job[0].store.publish_final_error(FinalError("rank 1: SIGKILL ended it", is_reported=True))
    job[0].store.end_generation_of(KILLED)
    job[0].leave(first, CommunicationFault("lost"))
    begun = time.monotonic()
    with pytest.raises(ErrorOfAnother, match="rank 1: SIGKILL ended it"):
        job[0].join()
    assert time.monotonic() - begun < JOIN_S / 2, "its end is known, so its message is there"


def test_a_fault_of_one_rank_alone_does_not_end_it(job: Sequence[Generations]) -> None:
    first, _ = join(job)
    job[0].leave(first, LocalFault("rank 0 ran out of memory"))
    assert job[0].has_own_error and job[0].store.current() == 1


def test_the_end_of_a_generation_fails_what_waits_for_another_rank(
    job: Sequence[Generations],
) -> None:
    generation, _ = join(job)
    server = socket.create_server(("127.0.0.1", 0))
    with server, pytest.raises(OSError, match="lost"), generation.watched():
        waiting = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
        job[1].store.end(0, KILLED)
        with waiting, peer:
            assert waiting.recv(1) == b"", "it was shut down"
        assert generation.has_ended
        raise OSError("lost")


def test_a_rank_that_has_finished_waits_for_the_others(job: Sequence[Generations]) -> None:
    generation, other = join(job)
    threading.Timer(0.2, job[1].store.end, [0, KILLED]).start()
    with pytest.raises(GenerationEnded, match="after this one had finished"), generation.watched():
        pass
    first, second = join(job)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(finish, [first, second])) == [1, 1]


def test_a_rank_that_has_finished_may_lose_the_store(
    job: Sequence[Generations], monkeypatch: pytest.MonkeyPatch
) -> None:
    generation, _ = join(job)

    def lost(world_size: int) -> bool:
        raise dist.DistNetworkError("Connection reset by peer")

    monkeypatch.setattr(job[0].store, "is_finished", lost)
    assert finish(generation) == 0, "the rank that serves the store ended first"


def test_many_ranks_look_into_the_store_less_often(job: Sequence[Generations]) -> None:
    assert job[0].poll_s(0.05) == 0.05
    job[0].world_size = 16_384
    assert job[0].poll_s(0.05) == pytest.approx(3.3, abs=0.1)


def finish(generation: Generation) -> int:
    with generation.watched():
        return generation.number


def test_connections_are_shut_down_but_those_that_are_kept_and_listening_ones() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept = socket.create_connection(server.getsockname())
        kept_peer, _ = server.accept()
        inodes = open_sockets()
        other = socket.create_connection(server.getsockname())
        other_peer, _ = server.accept()
        pair = socket.socketpair()
        shut_down_connections(keep=inodes)
        assert other.recv(1) == b"" and other_peer.recv(1) == b""
        kept.send(b"x")
        pair[0].send(b"y")
        assert kept_peer.recv(1) == b"x" and pair[1].recv(1) == b"y"
        newest = socket.create_connection(server.getsockname())
        for connection in (kept, kept_peer, other, other_peer, newest, *pair):
            connection.close()
