"""hang-report.txt: the ranks that the others wait for, the collective, and the state of every rank.
Pure.

A rank that waits for a collective waits for the ranks of the group that have not started it; a rank
that waits for a message waits for its sender. Ranks that others wait for, and that wait for none
themselves, are behind.

The heartbeats have what the hosts queued. torch's flight recorders, where they can be read, also
have what the devices began: `unmatched_collectives` compares them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from nanotrain.comm.flight_recorder import RecordedCollective
from nanotrain.comm.heartbeat import Beat
from nanotrain.quantities import named_ranks, ranks_text, table_lines
from nanotrain.topology.groups import GroupName, Ranks
from nanotrain.topology.topology import Topology

STATES = {
    "T": "stopped",
    "R": "running",
    "S": "sleeping",
    "D": "waiting for a disk",
    "": "lost",
    "?": "no reply",
}
CAUSES = {  # by state, the likeliest first
    "": "ended without an error message: it was killed, or its machine ran out of memory",
    "T": "is stopped (SIGSTOP, a debugger, or a suspended container)",
    "?": "did not reply: its machine, its network or the shared file system is gone",
}
COLUMNS = (
    "rank",
    "coordinates",
    "host",
    "pid",
    "state",
    "step",
    "phase",
    "action",
    "waits for",
    "last collectives",
)
MAX_ROWS = 64  # ranks that the table lists; those that are behind come first


@dataclass(frozen=True)
class RankView:
    """The process of one rank, its state and its heartbeat."""

    rank: int
    host: str
    pid: int
    state: str  # a key of STATES; "" for a process that ended, "?" where its machine did not reply
    beat: Beat | None = None  # None where its machine did not reply

    def describe(self, topology: Topology) -> str:
        """The rank with its coordinates and process."""
        coords = topology.coords_text(self.rank)
        return (
            f"rank {self.rank} ({f'{coords}, ' if coords else ''}host {self.host}, pid {self.pid})"
        )

    @property
    def is_done(self) -> bool:
        """Whether the run ended on this rank."""
        return self.beat is not None and self.beat.phase in ("finished", "failed")

    @property
    def position(self) -> str:
        """Step, phase and action of the rank, and what it waited for."""
        if (beat := self.beat) is None:
            return "its place is unknown"
        action = f", action {beat.action}" if beat.action else ""
        waiting = (
            f", waiting for {beat.waiting.op} of group {beat.waiting.group}" if beat.waiting else ""
        )
        return f"it was in step {beat.step}, phase {beat.phase}{action}{waiting}"

    def sequence(self, group: str) -> int:
        """Number of the last collective that the rank started over a group."""
        collective = self.beat.collectives.get(group) if self.beat else None
        return collective.sequence if collective else 0


@dataclass(frozen=True)
class Diagnosis:
    """The ranks that are behind, and the reason."""

    ranks: tuple[int, ...]  # that the others wait for; empty if none can be named
    headline: str  # one sentence per cause
    details: tuple[str, ...] = ()  # collectives in which the ranks differ


def diagnose(
    views: Mapping[int, RankView], topology: Topology, *, cut: Mapping[int, int] | None = None
) -> Diagnosis:
    """Find the ranks that the others wait for.

    Args:
        views: views of all ranks.
        topology: topology of the run.
        cut: rank at the other end of the connection that a rank lost, by rank.
    """
    details = tuple(_differences(views, topology))

    def name(ranks: Sequence[int], texts: Sequence[str]) -> Diagnosis:
        pairs = zip(ranks, texts, strict=True)
        lines = [
            f"{views[rank].describe(topology)} {text}; {views[rank].position}"
            for rank, text in pairs
        ]
        return Diagnosis(tuple(ranks), "\n".join(lines), details)

    for state, text in CAUSES.items():
        if found := [
            rank for rank, view in views.items() if view.state == state and not view.is_done
        ]:
            return name(found, [text] * len(found))
    if cut:  # all ranks run: if all these connections have one rank in common, it is the one
        ends = [{rank, peer} for rank, peer in cut.items()]
        found = sorted(set.intersection(*ends)) or sorted(set.union(*ends))
        pairs = ", ".join(f"{rank} to {peer}" for rank, peer in sorted(cut.items())[:MAX_ROWS])
        return name(
            found, [f"runs, but connections of it were closed (from rank {pairs})"] * len(found)
        )
    waits = {rank: _waits_for(view, views, topology=topology) for rank, view in views.items()}
    if behind := sorted({peer for peers in waits.values() for peer in peers if not waits[peer]}):
        waiting = [[other for other, peers in waits.items() if rank in peers] for rank in behind]
        return name(behind, [f"is behind: {_waited(ranks, views)}" for ranks in waiting])
    if blocked := sorted(rank for rank, peers in waits.items() if peers):
        text = f"ranks {ranks_text(blocked)} wait for each other: they started their collectives in different orders"
        return Diagnosis(tuple(blocked), text, details)
    # A host that blocks where it queues an operation, as with a full queue of a GPU, records
    # nothing that it waits for.
    fewer = {rank: _started_fewer(view, views, topology=topology) for rank, view in views.items()}
    if behind := sorted({peer for peers in fewer.values() for peer in peers if not fewer[peer]}):
        text = (
            f"started fewer collectives than {named_ranks([rank for rank in fewer if fewer[rank]])}"
        )
        return name(behind, [text] * len(behind))
    if details:
        return Diagnosis((), "the ranks of a group started different collectives", details)
    idle = [view for view in views.values() if view.beat is None or view.beat.waiting is None]
    lines = [f"{view.describe(topology)}: {view.position}" for view in idle[:MAX_ROWS]]
    text = "\n".join(["no rank waits for another one; look at the stacks:", *lines])
    return Diagnosis(
        (), text if idle else "all ranks wait for a collective that all of them started", details
    )


def report_text(
    diagnosis: Diagnosis,
    views: Mapping[int, RankView],
    *,
    topology: Topology,
    title: Sequence[str],
    recorded: Sequence[str] = (),
) -> str:
    """The report.

    Args:
        diagnosis: diagnosis of these ranks.
        views: views of all ranks.
        topology: topology of the run.
        title: first lines, with reason and time.
        recorded: lines from the flight recorders of the ranks.
    """
    order = [*diagnosis.ranks, *(rank for rank in sorted(views) if rank not in diagnosis.ranks)]
    rows = [COLUMNS, *(_row(views[rank], topology) for rank in order[:MAX_ROWS])]
    more = [f"... and {len(order) - MAX_ROWS} more ranks"] if len(order) > MAX_ROWS else []
    sections = {
        "Where the ranks of a group differ:": diagnosis.details,
        "In torch's flight recorders, numbered per process group:": recorded,
    }
    texts = [
        line
        for head, lines in sections.items()
        if lines
        for line in ("", head, *(f"  {each}" for each in lines))
    ]
    return "\n".join([*title, "", diagnosis.headline, *texts, "", *table_lines(rows), *more, ""])


def _members(topology: Topology, group: str, *, rank: int) -> Ranks:
    """The ranks of a group of a rank; the rank alone for a group that is not in the topology."""
    if group in ("control", "world"):
        return tuple(range(topology.world_size))
    name: GroupName = group  # type: ignore[assignment]
    try:
        return topology.members(rank, name)
    except KeyError:
        return (rank,)


def _waits_for(view: RankView, views: Mapping[int, RankView], *, topology: Topology) -> set[int]:
    """The ranks that a rank waits for."""
    waiting = view.beat.waiting if view.beat else None
    if waiting is None:
        return set()
    if waiting.op == "p2p":
        return {waiting.peer} & views.keys() if waiting.peer is not None else set()
    members = _members(topology, waiting.group, rank=view.rank)
    return {
        rank
        for rank in members
        if rank in views and views[rank].sequence(waiting.group) < waiting.sequence
    }


def _started_fewer(
    view: RankView, views: Mapping[int, RankView], *, topology: Topology
) -> set[int]:
    """The ranks that started fewer collectives than this one over a group of both."""
    return {
        rank
        for group, mine in (view.beat.collectives if view.beat else {}).items()
        if group != "pp"  # messages are not collectives
        for rank in _members(topology, group, rank=view.rank)
        if rank in views and views[rank].sequence(group) < mine.sequence
    }


def _waited(ranks: Sequence[int], views: Mapping[int, RankView]) -> str:
    """What ranks that wait wait for."""
    beat = views[ranks[0]].beat
    waiting = beat.waiting if beat else None
    assert waiting is not None, "ranks that wait have one"
    what = "a message" if waiting.op == "p2p" else f"{waiting.op} #{waiting.sequence}"
    return f"{named_ranks(ranks)} wait{'s' * (len(ranks) == 1)} for {what} of group {waiting.group}"


def _differences(views: Mapping[int, RankView], topology: Topology) -> list[str]:
    """One line per group whose ranks started different numbers or kinds of collectives."""
    groups = {
        (group, _members(topology, group, rank=view.rank))
        for view in views.values()
        for group in (view.beat.collectives if view.beat else ())
        if group != "pp"  # messages are not collectives
    }
    lines = []
    for group, members in sorted(groups):
        last: dict[str, list[int]] = {}
        for rank in members:
            last.setdefault(_last_started(views.get(rank), group), []).append(rank)
        if len(last) > 1:
            parts = "; ".join(f"{named_ranks(ranks)}: {text}" for text, ranks in last.items())
            lines.append(f"group {group} (ranks {ranks_text(members)}): last started by {parts}")
    return lines


def _last_started(view: RankView | None, group: str) -> str:
    """The last collective that a rank started over a group."""
    if view is None or view.beat is None:
        return "unknown"
    if (collective := view.beat.collectives.get(group)) is None:
        return "nothing"
    # its sizes differ
    size = "" if collective.op == "all_to_all" else f" of {collective.num_bytes:,} bytes"
    return f"#{collective.sequence} {collective.op}{size}"


def _row(view: RankView, topology: Topology) -> tuple[str, ...]:
    beat, coords = view.beat, topology.coords_text(view.rank)
    who = (str(view.rank), coords, view.host, str(view.pid), STATES.get(view.state, view.state))
    if beat is None:
        return (*who, *("?",) * 5)
    waiting = ""
    if beat.waiting is not None:
        source = (
            f" from rank {beat.waiting.peer}"
            if beat.waiting.peer is not None
            else f" #{beat.waiting.sequence}"
        )
        waiting = f"{beat.waiting.group} {beat.waiting.op}{source}"
    last = ", ".join(
        f"{group} #{each.sequence} {each.op}" for group, each in beat.collectives.items()
    )
    return (*who, str(beat.step), beat.phase, beat.action, waiting, last)


def unmatched_collectives(
    recorded: Mapping[int, Sequence[RecordedCollective]], topology: Topology
) -> tuple[str, ...]:
    """One line per process group in which a rank waits on the device, or has not arrived.

    Args:
        recorded: what `recorded_collectives` returned on every rank whose recorder could be read.
        topology: topology of the run.
    """
    groups: dict[tuple[str, Ranks], dict[int, RecordedCollective]] = {}
    for rank, collectives in recorded.items():
        for each in collectives:
            members = each.ranks or _members(topology, each.group, rank=rank)
            groups.setdefault((each.group, members), {})[rank] = each
    lines = [
        _unmatched(name, ranks, by_rank=by_rank, known=set(recorded))
        for (name, ranks), by_rank in groups.items()
    ]
    return tuple(sorted(line for line in lines if line))


def _unmatched(
    name: str, ranks: Ranks, *, by_rank: Mapping[int, RecordedCollective], known: set[int]
) -> str:
    """The collective that a process group waits for, and the ranks that have not arrived; "" if
    none waits.
    """
    order = attrgetter("sequence")
    # A rank whose newest collective is complete has arrived at all up to that number; a waiting
    # rank at its own.
    oldest = min(
        (each for each in by_rank.values() if each.state != "completed"), key=order, default=None
    )
    # gloo: a failed collective is no longer active, so the newest one of all ranks is compared
    if oldest is None:
        oldest = max(by_rank.values(), key=order)
    arrived = [rank for rank, each in by_rank.items() if each.sequence >= oldest.sequence]
    absent = [rank for rank in ranks if rank in known and rank not in arrived]
    if not absent and all(each.state == "completed" for each in by_rank.values()):
        return ""
    sizes = ", ".join(
        f"{list(size)} {dtype}"
        for size, dtype in zip(oldest.input_sizes, oldest.dtypes, strict=False)
    )
    unknown = [rank for rank in ranks if rank not in known]
    states = sorted({by_rank[rank].state for rank in arrived})
    text = f"group {name} (ranks {ranks_text(ranks)}): {oldest.op} #{oldest.sequence} of {sizes or 'unknown sizes'}: "
    text += f"{named_ranks(arrived)} arrived ({', '.join(states)})"
    text += f", {named_ranks(absent)} did not" if absent else ""
    return text + (f", nothing is known of {named_ranks(unknown)}" if unknown else "")
