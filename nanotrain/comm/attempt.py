"""A separate key prefix in the store for every attempt of a job.

After a failure torchrun starts the ranks again at the store of the previous attempt, which still has its keys: process
groups would read the addresses of ranks that have ended (PyTorch issue 135712). Restart counts do not distinguish
attempts, because every agent of torchrun has its own count.

    rank r    publishes a random number, waits for the reply to it, and increments the count of joined ranks
    rank 0    draws the random name of the attempt and sends it in reply to every number, until all ranks have joined
"""

import socket
import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from nanotrain.errors import EnvironmentFault

_POLL_S = 0.02
_RESOLVE_S = 60.0  # a name in a cluster may get its address only when its machine has started


def meet(rank: int, world_size: int, *, timeout: timedelta) -> Store:
    """The store of this attempt at torchrun's address; arguments as for `store_of_attempt`."""
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    return store_of_attempt(store, rank, world_size=world_size, timeout=timeout)


def require_host(name: str, *, timeout_s: float = _RESOLVE_S) -> None:
    """Wait until the name of the meeting point has an address; torch would try for the timeout of collectives.

    Raises:
        EnvironmentFault: it has none in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.getaddrinfo(name, None)
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= deadline:
                why = getattr(error, "strerror", None) or str(error)
                fix = "set MASTER_ADDR to the name or address of the machine of rank 0"
                raise EnvironmentFault(f"MASTER_ADDR {name!r} has no address", why=why, fix=fix) from None
        time.sleep(1.0)


def store_of_attempt(store: Store, rank: int, *, world_size: int, timeout: timedelta) -> Store:
    """The store of this attempt, empty before its ranks meet; all ranks call this.

    Args:
        store: at which the ranks of all attempts meet.
        rank: global rank.
        world_size: ranks of this attempt.
        timeout: how long to wait for the others.

    Raises:
        RuntimeError: not all ranks joined in time.
    """
    meeting = PrefixStore("nanotrain-attempts/", store)
    name = _join(meeting) if rank else _lead(meeting, world_size, deadline=time.monotonic() + timeout.total_seconds())
    return PrefixStore(f"nanotrain-attempt-{name}/", store)


def _join(store: Store) -> str:
    drawn = uuid.uuid4().hex
    store.set(f"drawn-{store.add('count', 1)}", drawn)
    name = store.get(f"reply-{drawn}").decode()
    store.add(f"joined-{name}", 1)
    return name


def _lead(store: Store, world_size: int, *, deadline: float) -> str:
    name, replied = uuid.uuid4().hex, set()
    while (joined := store.add(f"joined-{name}", 0)) < world_size - 1:
        if time.monotonic() > deadline:
            raise RuntimeError(f"only {joined + 1} of {world_size} ranks joined in time")
        for number in range(1, store.add("count", 0) + 1):
            # A rank may have ended before it published. Nobody reads the reply to a number of an earlier attempt.
            if number not in replied and store.check([f"drawn-{number}"]):
                store.set(f"reply-{store.get(f'drawn-{number}').decode()}", name)
                replied.add(number)
        time.sleep(_POLL_S)
    return name
