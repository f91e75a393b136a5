"""Ranks that are started again with the store of an earlier attempt meet each other and nobody else."""

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from nanotrain.comm import attempt
from nanotrain.comm.attempt import require_host, store_of_attempt
from nanotrain.errors import EnvironmentFault
from tests.harness import HANG_S


def meet(store: dist.Store, world_size: int, *, first: int = 0, timeout_s: float = HANG_S) -> list[dist.Store]:
    def join(rank: int) -> dist.Store:
        return store_of_attempt(store, rank, world_size=world_size, timeout=timedelta(seconds=timeout_s))

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(join, reversed(range(first, world_size))))  # rank 0 comes last


def test_every_attempt_has_an_empty_store_that_all_its_ranks_share():
    store = dist.HashStore()
    store.add("nanotrain-attempts/count", 2)
    store.set("nanotrain-attempts/drawn-2", "of a rank that has ended")  # and the first ended before it published
    for world_size in (4, 4, 3, 1, 5):
        stores = meet(store, world_size)
        assert not any(each.check(["address"]) for each in stores)
        stores[0].set("address", "1.2.3.4")
        assert [each.get("address") for each in stores] == [b"1.2.3.4"] * world_size


def test_a_rank_that_does_not_come_is_an_error_with_the_number_of_those_that_did():
    with pytest.raises(RuntimeError, match="1 of 2 ranks joined"):
        store_of_attempt(dist.HashStore(), 0, world_size=2, timeout=timedelta(seconds=0.1))


def test_a_meeting_point_without_an_address_is_one_error_that_names_it(monkeypatch):
    def unknown(*_arguments):
        raise socket.gaierror(-2, "Name or service not known")

    require_host("127.0.0.1")
    with pytest.raises(EnvironmentFault, match=r"MASTER_ADDR 'a\.b.*x' has no address"):
        require_host("a." + "b" * 99 + ".x", timeout_s=0.0)  # no name: a part has at most 63 characters
    monkeypatch.setattr(attempt.socket, "getaddrinfo", unknown)
    with pytest.raises(EnvironmentFault, match="'node7' has no address: Name or service not known; set MASTER_ADDR"):
        require_host("node7", timeout_s=0.0)
