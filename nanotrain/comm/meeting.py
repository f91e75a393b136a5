"""The meeting of the ranks at torchrun's address, before there are process groups.

meet              the store of this attempt, at MASTER_ADDR:MASTER_PORT
store_of_attempt  a separate key prefix in the store for every attempt of a job
require_host, require_store   the address has a host, which accepts connections

After a failure torchrun starts the ranks again at the store of the previous attempt, which still
has its keys: process groups would read the addresses of ranks that have ended (PyTorch issue
135712). Restart counts do not distinguish attempts, because every agent of torchrun has its own
count.

    rank r    publishes a random number, waits for the reply to it, compares the number of ranks in
              it with its own, adds itself to the members, and waits for the verdict
    rank 0    draws the random name of the attempt and sends it in reply to every number, until all
              ranks have joined; the verdict is empty, or what is wrong with the ranks

Every wait is named in the log after ten seconds and ends after the timeout of collectives.
"""

import os
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from functools import partial

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from nanotrain.errors import EnvironmentFault
from nanotrain.quantities import count_of
from nanotrain.waiting import Wait

_POLL_S, _CONNECT_S = 0.02, 0.5
_ATTEMPT_S = 5.0  # a firewall that drops packets is silent
_RESOLVE_S = 60.0  # a name in a cluster may get its address only when its machine has started
_READ_S = 5.0  # for which rank 0 keeps its store open, so that the others read the verdict
_SHOWN = 4  # number of missing ranks that are named


def meet(rank: int, world_size: int, *, timeout: timedelta) -> Store:
    """The store of this attempt at torchrun's address; arguments as for `store_of_attempt`.

    Raises:
        EnvironmentFault: the address is silent, or the ranks do not belong together.
        RuntimeError: torch cannot open the store, or not all ranks joined in time.
    """
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    opens_store = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    timeout_s = timeout.total_seconds()
    if not opens_store:
        require_store((host, port), timeout_s=timeout_s)
    connect = partial(
        TCPStore,
        host,
        port,
        world_size,
        is_master=opens_store,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )
    address = f"MASTER_ADDR:MASTER_PORT {host}:{port}"
    silence = f"{address} accepts connections and sends nothing"
    try:
        store = Wait(silence, timeout_s).call(connect)
    except TimeoutError as error:
        raise EnvironmentFault(
            silence,
            why=str(error),
            fix="check that rank 0 of this job has this port, and no other program",
        ) from None
    store.set_timeout(timeout + timedelta(seconds=_READ_S))  # rank 0 sends its verdict at the end
    attempt = store_of_attempt(store, rank, world_size=world_size, timeout=timeout)
    store.set_timeout(timeout)
    return attempt


def require_host(name: str, *, timeout_s: float = _RESOLVE_S) -> None:
    """Wait until the name of the meeting point has an address.

    torch would try for as long as the timeout of collectives.

    Raises:
        EnvironmentFault: it has none in time.
    """
    wait = Wait(f"MASTER_ADDR {name!r} has no address", timeout_s)
    try:
        _retry(lambda left_s: socket.getaddrinfo(name, None), wait, pause_s=1.0)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        fix = "set MASTER_ADDR to the name or address of the machine of rank 0"
        raise EnvironmentFault(wait.what, why=why, fix=fix) from None


def require_store(address: tuple[str, int], *, timeout_s: float) -> None:
    """Wait until the store accepts connections; torch would print a C++ stack for every failed one.

    Raises:
        EnvironmentFault: it does not in time.
    """
    host, port = address
    wait = Wait(f"MASTER_ADDR:MASTER_PORT {host}:{port} accepts no connection", timeout_s)
    try:
        _retry(
            lambda left_s: socket.create_connection(address, timeout=left_s).close(),
            wait,
            pause_s=_CONNECT_S,
        )
    except OSError as error:
        raise EnvironmentFault(
            wait.what,
            why=f"{error.strerror or error}, for {timeout_s:g} s",
            fix="check that rank 0 has started there, and that no firewall is between the machines",
        ) from None


def _retry(attempt: Callable[[float], object], wait: Wait, *, pause_s: float) -> None:
    """Retry a function, called with the seconds it has; raise its error once the time is over."""
    while True:
        try:
            attempt(min(max(0.1, wait.timeout_s - wait.silent_s), _ATTEMPT_S))
            return
        except (OSError, UnicodeError):
            if wait.is_over:
                raise
        wait.pause(pause_s)


def store_of_attempt(store: Store, rank: int, *, world_size: int, timeout: timedelta) -> Store:
    """The store of this attempt, empty before its ranks meet; all ranks call this.

    Args:
        store: store at which the ranks of all attempts meet.
        rank: global rank.
        world_size: number of ranks of this attempt.
        timeout: time to wait for the others.

    Raises:
        EnvironmentFault: two processes have one rank, or numbers of ranks differ; on every rank.
        RuntimeError: not all ranks joined in time.
    """
    meeting = PrefixStore("nanotrain-attempts/", store)
    timeout_s = timeout.total_seconds()
    if rank:
        silence = f"rank {rank} of {world_size} waits for rank 0, which does not answer"
        wait = Wait(silence, timeout_s + _READ_S)
        try:
            name = wait.call(partial(_join, meeting, rank, world_size=world_size))
        except TimeoutError as error:
            raise RuntimeError(f"rank 0 does not answer: {error}") from None
    else:
        name = _lead(meeting, world_size, wait=Wait("", timeout_s))
    return PrefixStore(f"nanotrain-attempt-{name}/", store)


def _join(store: Store, rank: int, *, world_size: int) -> str:
    """Join the attempt of rank 0; returns its name once all ranks have joined.

    The rank publishes a random request id, rank 0 replies to that id with the name of the attempt
    (`_lead`), the rank counts itself in, and rank 0 publishes the verdict: a fault, or "" for none.
    """
    request_id = uuid.uuid4().hex
    store.set(f"drawn-{store.add('count', 1)}", request_id)
    name, _, number_text = store.get(f"reply-{request_id}").decode().partition(" ")
    if int(number_text) != world_size:
        fault = f"rank {rank} was started with WORLD_SIZE {world_size}, rank 0 with {number_text}"
        store.set(f"fault-{name}", fault)
    elif store.add(f"member-{rank}-{name}", 1) > 1:
        store.set(f"fault-{name}", f"two processes were started as rank {rank} of {world_size}")
    store.add(f"joined-{name}", 1)
    verdict = store.get(f"verdict-{name}").decode()
    store.add(f"read-{name}", 1)
    _require_no_fault(verdict)
    return name


def _lead(store: Store, world_size: int, *, wait: Wait) -> str:
    """Rank 0: draw the name of the attempt, reply to the requests of `_join`, send the verdict."""
    name = uuid.uuid4().hex
    replied: set[int] = set()
    while (joined := store.add(f"joined-{name}", 0)) < world_size - 1:
        wait.what = f"rank 0 waits: {joined + 1} of {count_of(world_size, 'rank')} have joined"
        if store.check([f"fault-{name}"]):
            break
        if wait.is_over:
            fault = f"only {joined + 1} of {world_size} ranks joined in time"
            _send_verdict(store, name, fault=fault)
            raise RuntimeError(
                f"{fault}, not {_missing_ranks_text(store, name, world_size=world_size)}"
            )
        for number in range(1, store.add("count", 0) + 1):
            # A rank may have ended before it published. Nobody reads the reply to a number of an
            # earlier attempt.
            if number not in replied and store.check([f"drawn-{number}"]):
                request_id = store.get(f"drawn-{number}").decode()
                store.set(f"reply-{request_id}", f"{name} {world_size}")
                replied.add(number)
        wait.pause(_POLL_S)
    fault = ""
    if store.check([f"fault-{name}"]):
        fault = store.get(f"fault-{name}").decode()
    _send_verdict(store, name, fault=fault)
    _require_no_fault(fault)
    return name


def _send_verdict(store: Store, name: str, *, fault: str) -> None:
    """Send the verdict, and after a fault wait until it was read: the store may end with rank 0."""
    store.set(f"verdict-{name}", fault)
    deadline = time.monotonic() + _READ_S
    while fault and time.monotonic() < deadline:
        if store.add(f"read-{name}", 0) >= store.add(f"joined-{name}", 0):
            return
        time.sleep(_POLL_S)


def _missing_ranks_text(store: Store, name: str, *, world_size: int) -> str:
    """The ranks that have not joined, as text."""
    missing = []
    for rank in range(1, world_size):
        if store.add(f"member-{rank}-{name}", 0) == 0:
            missing.append(str(rank))
        if len(missing) > _SHOWN:
            break
    shown = ", ".join(missing[:_SHOWN])
    return f"rank {shown}" + (" and more" if len(missing) > _SHOWN else "")


def _require_no_fault(fault: str) -> None:
    if fault:
        raise EnvironmentFault(
            "the ranks of this job do not belong together",
            why=fault,
            fix="start every rank with one WORLD_SIZE and with a RANK of its own",
        )
