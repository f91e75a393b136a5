"""Ranks that are started again with the store of an earlier attempt meet each other and nobody else."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from nanotrain.comm.attempt import store_of_attempt
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
    with pytest.raises(RuntimeError, match="1 of 2 ranks came"):
        store_of_attempt(dist.HashStore(), 0, world_size=2, timeout=timedelta(seconds=0.1))
