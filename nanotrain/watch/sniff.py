"""A test of the machines within seconds: `nanotrain doctor` and `--preflight`.

    measure     every rank: products, pairs, collectives, disk, clock; gathered on all ranks
    outliers    the measurements that are slower than the median by a factor; pure
    describe    the table of medians and the lines on outliers

Each rank repeats what it measures, and the fastest counts: a busy machine is no broken one. Pairs
exchange in rounds, in which every rank has another peer. Collectives are shown and not judged: in
them all ranks wait for the slowest. Of an even number of measurements the median is the faster one
of the middle two: of two hosts the slower one is then an outlier, and not half of the median.
"""

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median, median_low

import torch
from torch import Tensor

from nanotrain.comm.all_to_all import all_to_all
from nanotrain.comm.collectives import all_gather_object, all_reduce, barrier
from nanotrain.comm.device import Stopwatch, device_name, synchronize
from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.comm.send_recv import Message, start_send_recv
from nanotrain.errors import EnvironmentFault
from nanotrain.quantities import count_of, describe_bytes, table_lines
from nanotrain.runs.files import disk_errors

REPEATS = 5
SIZES = (64 * 1024, 4 * 1024 * 1024)  # bytes of messages
WIDTHS = {"cpu": 384, "cuda": 8192}  # of the square matrices of a product
DISK_BYTES = 8 * 1024 * 1024
MAX_ROUNDS = 15  # of pairs; in a world of more ranks every rank meets so many others
FACTOR = 2.0  # of the median, above which a measurement is an outlier
# differences that are noise: seconds by kind
NOISE_S = {"product": 0.005, "pair": 0.005, "disk": 0.5, "clock": 1.0}
PAIR = "pair"
JUDGED = ("product", PAIR, "disk", "clock")


@dataclass(frozen=True)
class Measurement:
    """Seconds of one rank, or of a pair of ranks."""

    kind: str  # product, pair, disk, clock, all_reduce, all_to_all
    seconds: float  # of a clock: the distance to the median clock
    rank: int
    host: str
    num_bytes: int = 0  # of a message or a file
    peer: int | None = None  # the other rank of a pair
    peer_host: str = ""

    @property
    def is_across_hosts(self) -> bool:
        """Whether it is of a pair of ranks on two hosts."""
        return bool(self.peer_host) and self.peer_host != self.host

    @property
    def group(self) -> tuple[str, int, bool]:
        """Measurements of one group are compared: pairs inside a host, or pairs across hosts."""
        return self.kind, self.num_bytes, self.is_across_hosts

    @property
    def label(self) -> str:
        """The measured quantity, for the report."""
        if self.kind == PAIR:
            where = "across hosts" if self.is_across_hosts else "in a host"
            return f"send and receive {describe_bytes(self.num_bytes)} {where}"
        if self.num_bytes:
            return f"{self.kind} {describe_bytes(self.num_bytes)}"
        return self.kind


@dataclass(frozen=True)
class Outlier:
    """A rank, a pair or a host that is slower than the median."""

    name: str  # "rank 3 on host b", "ranks 1 and 3 on hosts a and b", "host b"
    label: str
    seconds: float
    median_s: float

    @property
    def text(self) -> str:
        """The outlier as one line."""
        slow = f"{self.seconds * 1e3:,.1f} ms"
        if self.label == "clock":
            return f"{self.name}: its clock is off by {self.seconds:.1f} s"
        ratio = self.seconds / self.median_s if self.median_s else 0.0
        return (
            f"{self.name}: {self.label} takes {slow}, {ratio:.1f} times the median "
            f"{self.median_s * 1e3:,.1f} ms"
        )


def measure(context: ParallelContext, folder: Path) -> list[Measurement]:
    """Measure all ranks; every rank calls this and gets the measurements of all.

    Args:
        context: device and groups of this rank.
        folder: folder of the disk that is written.

    Raises:
        EnvironmentFault: the folder cannot be written.
    """
    host = platform.node()
    hosts: list[str] = all_gather_object(host, context.control)
    own = [Measurement("product", product_s(context.device), context.rank, host)]
    own += _collectives(context, host)
    own += _pairs(context, hosts)
    if hosts.index(host) == context.rank:
        seconds = disk_s(folder)
        own.append(Measurement("disk", seconds, context.rank, host, num_bytes=DISK_BYTES))
    own.append(Measurement("clock", _clock_offset_s(context), context.rank, host))
    gathered: list[list[Measurement]] = all_gather_object(own, context.control)
    return [measurement for rank in gathered for measurement in rank]


def product_s(device: torch.device) -> float:
    """The fastest of some products of square matrices."""
    width = WIDTHS[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    matrix = torch.full((width, width), 1 / width, device=device, dtype=dtype)
    return _fastest_s(lambda: torch.mm(matrix, matrix), device)


def _fastest_s(run: Callable[[], object], device: torch.device) -> float:
    """The seconds of the fastest of some runs; the first one may allocate and connect."""
    run()
    seconds = []
    for _ in range(REPEATS):
        synchronize(device)
        watch = Stopwatch(device)
        run()
        watch.stop()
        seconds.append(watch.seconds())
    return min(seconds)


def _collectives(context: ParallelContext, host: str) -> Iterator[Measurement]:
    """All-reduce and all-to-all over all ranks, of both sizes."""
    group = context.group("world")
    if group.size == 1:
        return
    for num_bytes in SIZES:
        rows = group.size * (num_bytes // 4 // group.size)
        numbers = torch.zeros(rows, device=context.device)
        splits = [rows // group.size] * group.size

        reduce = partial(all_reduce, numbers, group)
        reorder = partial(all_to_all, numbers, group, output_splits=splits, input_splits=splits)
        for kind, run in (("all_reduce", reduce), ("all_to_all", reorder)):
            seconds = _fastest_s(run, context.device)
            yield Measurement(kind, seconds, context.rank, host, num_bytes=num_bytes)


def _pairs(context: ParallelContext, hosts: Sequence[str]) -> Iterator[Measurement]:
    """Messages in both directions with another rank per round; the smaller rank notes the pair."""
    group = context.group("world")
    for peers in rounds_of(group.size):
        peer = peers[context.rank]
        for num_bytes in SIZES:
            barrier(context.control)
            if peer == context.rank:
                continue
            sent = torch.zeros(num_bytes // 4, device=context.device)
            received = torch.empty_like(sent)
            messages = partial(_send_receive, sent, received, peer=peer, group=group)
            seconds = _fastest_s(messages, context.device)
            if context.rank < peer:
                yield Measurement(
                    PAIR,
                    seconds,
                    context.rank,
                    hosts[context.rank],
                    num_bytes=num_bytes,
                    peer=peer,
                    peer_host=hosts[peer],
                )


def _send_receive(sent: Tensor, received: Tensor, *, peer: int, group: Group) -> None:
    """Send a tensor to another rank and receive its one."""
    batch = start_send_recv([Message(sent, peer)], [Message(received, peer)], group=group)
    batch.received[0].wait()
    batch.sent.wait()


def rounds_of(num_ranks: int, *, most: int = MAX_ROUNDS) -> list[list[int]]:
    """Rounds in which ranks meet in pairs, by the circle method; a rank without a peer has itself.

    >>> rounds_of(4)
    [[3, 2, 1, 0], [1, 0, 3, 2], [2, 3, 0, 1]]
    >>> rounds_of(1)
    []

    Args:
        num_ranks: number of ranks.
        most: number of rounds at most, spread over all.
    """
    seats = num_ranks + num_ranks % 2
    num_rounds = max(0, seats - 1)
    step = max(1, -(-num_rounds // most))
    rounds = []
    for number in range(0, num_rounds, step):
        moving = list(range(1, seats))
        circle = [0, *moving[number:], *moving[:number]]
        peers = list(range(num_ranks))
        for first, second in zip(circle, reversed(circle), strict=True):
            if first < num_ranks and second < num_ranks:
                peers[first] = second
        if peers != list(range(num_ranks)):
            rounds.append(peers)
    return rounds


def disk_s(folder: Path) -> float:
    """Seconds to write and flush a file, which is removed.

    Raises:
        EnvironmentFault: the folder is not there, or cannot be written.
    """
    if not folder.is_dir():
        raise EnvironmentFault(
            f"{folder} is no folder",
            why=f"its disk is tested on host {platform.node()}",
            fix="make the folder, or name another one",
        )
    path = folder / f".doctor-{platform.node()}-{os.getpid()}"
    data = os.urandom(DISK_BYTES)
    with disk_errors(path, needed=DISK_BYTES, fix="choose another folder"):
        start = time.perf_counter()
        try:
            with path.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            return time.perf_counter() - start
        finally:
            path.unlink(missing_ok=True)


def _clock_offset_s(context: ParallelContext) -> float:
    """The distance of this rank's clock to the median, the smallest of some after barriers."""
    offsets = []
    for _ in range(REPEATS):
        barrier(context.control)
        times: list[float] = all_gather_object(time.time(), context.control)
        offsets.append(abs(times[context.rank] - median(times)))
    return min(offsets)


def outliers(measurements: Iterable[Measurement], *, factor: float = FACTOR) -> list[Outlier]:
    """The outliers, by host where all of its ranks are slow, by rank, and by pair.

    Args:
        measurements: measurements of all ranks.
        factor: multiple of the median above which a measurement is an outlier.
    """
    by_group: dict[tuple[str, int, bool], list[Measurement]] = {}
    for measurement in measurements:
        if measurement.kind in JUDGED:
            by_group.setdefault(measurement.group, []).append(measurement)
    found: list[Outlier] = []
    for (kind, _, _), members in by_group.items():
        middle = median_low(member.seconds for member in members)
        if kind == "clock":
            middle = 0.0
        slow = [
            member
            for member in members
            if member.seconds > factor * middle and member.seconds - middle > NOISE_S[kind]
        ]
        found += _named_pairs(slow, members, middle=middle) if kind == PAIR else []
        found += _named_ranks(slow, members, middle=middle) if kind != PAIR else []
    return found


def _named_ranks(
    slow: Sequence[Measurement], members: Sequence[Measurement], *, middle: float
) -> Iterator[Outlier]:
    """Slow ranks, or their host where all of its ranks are slow and it has several."""
    for host in dict.fromkeys(member.host for member in slow):
        ranks = [member for member in slow if member.host == host]
        num_ranks = sum(1 for member in members if member.host == host)
        if len(ranks) == num_ranks > 1:
            seconds = median(member.seconds for member in ranks)
            yield Outlier(f"host {host} (all its ranks)", ranks[0].label, seconds, middle)
            continue
        for member in ranks:
            name = f"rank {member.rank} on host {host}"
            yield Outlier(name, member.label, member.seconds, middle)


def _named_pairs(
    slow: Sequence[Measurement], members: Sequence[Measurement], *, middle: float
) -> Iterator[Outlier]:
    """Ranks of which most pairs are slow, then slow pairs of other ranks."""
    hosts = {member.rank: member.host for member in members}
    hosts |= {member.peer: member.peer_host for member in members if member.peer is not None}
    named = set()
    for rank, host in sorted(hosts.items()):
        own = [member for member in members if rank in (member.rank, member.peer)]
        own_slow = [member for member in slow if member in own]
        if len(own) > 1 and 2 * len(own_slow) > len(own):
            named.add(rank)
            seconds = median(member.seconds for member in own_slow)
            pairs = f"{len(own_slow)} of its {count_of(len(own), 'pair')}"
            label = f"{own[0].label}, in {pairs},"
            yield Outlier(f"rank {rank} on host {host}", label, seconds, middle)
    for member in slow:
        if named.isdisjoint((member.rank, member.peer)):
            name = f"ranks {member.rank} and {member.peer} on hosts {member.host} and "
            yield Outlier(name + member.peer_host, member.label, member.seconds, middle)


def describe(measurements: Sequence[Measurement], found: Sequence[Outlier]) -> str:
    """The medians, the slowest of each kind, and the outliers.

    Args:
        measurements: measurements of all ranks.
        found: outliers among them.
    """
    ranks = {member.rank for member in measurements}
    hosts = {member.host for member in measurements}
    labels: dict[str, list[Measurement]] = {}
    for member in measurements:
        labels.setdefault(member.label, []).append(member)
    rows = [["", "median", "slowest", ""]]
    for label, members in labels.items():
        slowest = max(members, key=lambda member: member.seconds)
        middle = median_low(member.seconds for member in members)
        name = f"rank {slowest.rank}"
        if slowest.peer is not None:
            name = f"ranks {slowest.rank} and {slowest.peer}"
        rows.append([label, f"{middle * 1e3:,.2f} ms", f"{slowest.seconds * 1e3:,.2f} ms", name])
    lines = [
        f"{count_of(len(ranks), 'rank')} on {count_of(len(hosts), 'host')}",
        *table_lines(rows, right={1, 2}),
    ]
    lines += [f"outlier: {outlier.text}" for outlier in found] or ["no outlier"]
    return "\n".join(lines)


def require_sound(context: ParallelContext, folder: Path, *, factor: float) -> str:
    """Measure all ranks before a run, and refuse faulty ones; returns one line on the result.

    Args:
        context: device and groups of this rank.
        folder: run folder, on whose disk a file is written.
        factor: multiple of the median above which a measurement is an outlier.

    Raises:
        EnvironmentFault: an outlier, the same on all ranks.
    """
    start = time.perf_counter()
    found = outliers(measure(context, folder), factor=factor)
    if found:
        raise EnvironmentFault(
            f"the preflight found {count_of(len(found), 'outlier')}",
            why="; ".join(outlier.text for outlier in found[:8]),
            fix="leave the machine out, or start without --preflight",
        )
    ranks = count_of(context.topology.world_size, "rank")
    name = device_name(context.device)
    return f"preflight: no outlier among {ranks} ({name}), {time.perf_counter() - start:.1f} s"
