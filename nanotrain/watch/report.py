"""hang-report.txt: the ranks that the others wait for, and the state of every rank; pure.

    RankView                what is known of a rank
    diagnose                find the ranks that are behind, by one rule after the other
    report_text             the report
    unmatched_collectives   collectives that began on the devices of some ranks only

A rank that waits for a collective waits for the ranks of the group that have not started it; a rank
that waits for a message waits for its sender. Ranks that others wait for, and that wait for none
themselves, are behind.

The heartbeats have what the hosts queued. torch's flight recorders, where they can be read, also
have what the devices began: `unmatched_collectives` compares them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from nanotrain.comm.flight_recorder import RecordedCollective
from nanotrain.comm.heartbeat import Beat, Collective, Waiting
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
COMPLETED = "completed"  # state of a collective in a flight recorder
MESSAGES = "pp"  # the group whose operations are messages and no collectives
MAX_ROWS = 64  # ranks in the table; the ones behind come first


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
        process = f"host {self.host}, pid {self.pid}"
        coords = topology.coords_text(self.rank)
        if coords:
            process = f"{coords}, {process}"
        return f"rank {self.rank} ({process})"

    @property
    def is_done(self) -> bool:
        """Whether the run ended on this rank."""
        return self.beat is not None and self.beat.phase in ("finished", "failed")

    @property
    def position(self) -> str:
        """Step, phase and action of the rank, and the operation that it waited for."""
        beat = self.beat
        if beat is None:
            return "its place is unknown"
        text = f"it was in step {beat.step}, phase {beat.phase}"
        if beat.action:
            text += f", action {beat.action}"
        if beat.waiting:
            text += f", waiting for {beat.waiting.op} of group {beat.waiting.group}"
        return text

    def sequence(self, group: str) -> int:
        """Number of the last collective that the rank started over a group."""
        collective = self.collectives.get(group)
        return collective.sequence if collective else 0

    @property
    def collectives(self) -> Mapping[str, Collective]:
        """The last collective that the rank started over each group."""
        return {} if self.beat is None else self.beat.collectives

    @property
    def waiting(self) -> Waiting | None:
        """The collective that the rank waits for."""
        return None if self.beat is None else self.beat.waiting


Views = Mapping[int, RankView]


@dataclass(frozen=True)
class Diagnosis:
    """The ranks that are behind, and the reason."""

    ranks: tuple[int, ...]  # ranks that the others wait for; empty if none can be named
    headline: str  # one sentence per cause
    details: tuple[str, ...] = ()  # collectives in which the ranks differ


def diagnose(
    views: Views, topology: Topology, *, cut: Mapping[int, int] | None = None
) -> Diagnosis:
    """Find the ranks that the others wait for.

    Args:
        views: views of all ranks.
        topology: topology of the run.
        cut: lost connections: the rank at the other end, by the rank that lost one.
    """
    details = tuple(_differences(views, topology))
    waits = {rank: _waits_for(view, views, topology=topology) for rank, view in views.items()}
    blocked = sorted(rank for rank, peers in waits.items() if peers)
    causes = (
        _ended_or_stopped(views)
        or _with_lost_connections(cut or {})
        or _describe_ranks_behind(views, waits)
    )
    if not causes and blocked:
        headline = f"ranks {ranks_text(blocked)} wait for each other: they started their "
        headline += "collectives in different orders"
        return Diagnosis(tuple(blocked), headline, details)
    causes = causes or _with_fewer_collectives(views, topology)
    if causes:
        lines = []
        for rank, text in causes.items():
            view = views[rank]
            lines.append(f"{view.describe(topology)} {text}; {view.position}")
        return Diagnosis(tuple(causes), "\n".join(lines), details)
    if details:
        return Diagnosis((), "the ranks of a group started different collectives", details)
    return Diagnosis((), _nobody_waits(views, topology), details)


def _ended_or_stopped(views: Views) -> dict[int, str]:
    """Describe the ended or stopped processes with the likeliest cause of a hang."""
    for state, text in CAUSES.items():
        ranks = [rank for rank, view in views.items() if view.state == state and not view.is_done]
        if ranks:
            return dict.fromkeys(ranks, text)
    return {}


def _with_lost_connections(cut: Mapping[int, int]) -> dict[int, str]:
    """The rank that all closed connections have in common, or all of their ranks."""
    if not cut:
        return {}
    ends = [{rank, peer} for rank, peer in cut.items()]
    ranks = sorted(set.intersection(*ends)) or sorted(set.union(*ends))
    pairs = ", ".join(f"{rank} to {peer}" for rank, peer in sorted(cut.items())[:MAX_ROWS])
    return dict.fromkeys(ranks, f"runs, but connections of it were closed (from rank {pairs})")


def _describe_ranks_behind(views: Views, waits: Mapping[int, set[int]]) -> dict[int, str]:
    """Describe the ranks that others wait for and that wait for no rank themselves."""
    texts = {}
    for rank in _awaited_ranks(waits):
        waiting = [other for other, peers in waits.items() if rank in peers]
        texts[rank] = f"is behind: {_describe_wait(waiting, views)}"
    return texts


def _with_fewer_collectives(views: Views, topology: Topology) -> dict[int, str]:
    """Ranks that started fewer collectives than others, and none more.

    A host that blocks where it queues an operation, as with a full queue of a GPU, records nothing
    that it waits for.
    """
    fewer = {}
    for rank, view in views.items():
        fewer[rank] = _started_fewer(view, views, topology=topology)
    ahead = named_ranks([rank for rank, peers in fewer.items() if peers])
    return dict.fromkeys(_awaited_ranks(fewer), f"started fewer collectives than {ahead}")


def _nobody_waits(views: Views, topology: Topology) -> str:
    """The headline where no rank waits for another one."""
    idle = [view for view in views.values() if view.waiting is None]
    if not idle:
        return "all ranks wait for a collective that all of them started"
    lines = [f"{view.describe(topology)}: {view.position}" for view in idle[:MAX_ROWS]]
    return "\n".join(["no rank waits for another one; look at the stacks:", *lines])


def _awaited_ranks(waits: Mapping[int, set[int]]) -> list[int]:
    """The ranks that another one waits for, and that wait for none."""
    peers = set().union(*waits.values())
    return sorted(peer for peer in peers if not waits[peer])


def report_text(
    diagnosis: Diagnosis,
    views: Views,
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
    lines = [*title, "", diagnosis.headline]
    sections = {
        "Where the ranks of a group differ:": diagnosis.details,
        "In torch's flight recorders, numbered per process group:": recorded,
    }
    for head, section in sections.items():
        if section:
            lines += ["", head, *(f"  {line}" for line in section)]
    others = [rank for rank in sorted(views) if rank not in diagnosis.ranks]
    order = [*diagnosis.ranks, *others]
    rows: list[tuple[str, ...]] = [COLUMNS]
    for rank in order[:MAX_ROWS]:
        rows.append(_row(views[rank], topology))
    lines += ["", *table_lines(rows)]
    if len(order) > MAX_ROWS:
        lines.append(f"... and {len(order) - MAX_ROWS} more ranks")
    return "\n".join([*lines, ""])


def _members(topology: Topology, group: str, *, rank: int) -> Ranks:
    """The members of a rank's group; only the rank for a name that is not in the topology."""
    if group in ("control", "world"):
        return tuple(range(topology.world_size))
    name: GroupName = group  # type: ignore[assignment]
    try:
        return topology.members(rank, name)
    except KeyError:
        return (rank,)


def _waits_for(view: RankView, views: Views, *, topology: Topology) -> set[int]:
    """The ranks that a rank waits for."""
    waiting = view.waiting
    if waiting is None:
        return set()
    if waiting.op == "p2p":
        return set() if waiting.peer is None else {waiting.peer} & views.keys()
    members = _members(topology, waiting.group, rank=view.rank)
    return _with_lower_sequence(members, views, group=waiting.group, sequence=waiting.sequence)


def _started_fewer(view: RankView, views: Views, *, topology: Topology) -> set[int]:
    """The ranks that started fewer collectives than `view` over a group they share."""
    fewer: set[int] = set()
    for group, collective in view.collectives.items():
        if group == MESSAGES:
            continue
        members = _members(topology, group, rank=view.rank)
        fewer |= _with_lower_sequence(members, views, group=group, sequence=collective.sequence)
    return fewer


def _with_lower_sequence(members: Ranks, views: Views, *, group: str, sequence: int) -> set[int]:
    """The members of a group whose latest collective over it comes before `sequence`."""
    known = [rank for rank in members if rank in views]
    return {rank for rank in known if views[rank].sequence(group) < sequence}


def _describe_wait(ranks: Sequence[int], views: Views) -> str:
    """Describe the collective that waiting ranks wait for."""
    waiting = views[ranks[0]].waiting
    assert waiting is not None, "ranks that wait have one"
    what = "a message" if waiting.op == "p2p" else f"{waiting.op} #{waiting.sequence}"
    verb = "waits" if len(ranks) == 1 else "wait"
    return f"{named_ranks(ranks)} {verb} for {what} of group {waiting.group}"


def _differences(views: Views, topology: Topology) -> list[str]:
    """One line per group whose ranks started different numbers or kinds of collectives."""
    groups: set[tuple[str, Ranks]] = set()
    for view in views.values():
        for group in view.collectives:
            if group != MESSAGES:
                groups.add((group, _members(topology, group, rank=view.rank)))
    lines = []
    for group, members in sorted(groups):
        ranks_by_text: dict[str, list[int]] = {}
        for rank in members:
            text = _last_started(views.get(rank), group)
            ranks_by_text.setdefault(text, []).append(rank)
        if len(ranks_by_text) > 1:
            parts = [f"{named_ranks(ranks)}: {text}" for text, ranks in ranks_by_text.items()]
            started = "; ".join(parts)
            lines.append(f"group {group} (ranks {ranks_text(members)}): last started by {started}")
    return lines


def _last_started(view: RankView | None, group: str) -> str:
    """The last collective that a rank started over a group."""
    if view is None or view.beat is None:
        return "unknown"
    collective = view.collectives.get(group)
    if collective is None:
        return "nothing"
    text = f"#{collective.sequence} {collective.op}"
    if collective.op == "all_to_all":  # whose sizes differ between ranks
        return text
    return f"{text} of {collective.num_bytes:,} bytes"


def _row(view: RankView, topology: Topology) -> tuple[str, ...]:
    """The row of a rank in the table, see `COLUMNS`."""
    state = STATES.get(view.state, view.state)
    coords = topology.coords_text(view.rank)
    process = (str(view.rank), coords, view.host, str(view.pid), state)
    beat = view.beat
    if beat is None:
        return (*process, "?", "?", "?", "?", "?")
    newest = [f"{group} #{last.sequence} {last.op}" for group, last in beat.collectives.items()]
    waits_for = "" if beat.waiting is None else _awaited_text(beat.waiting)
    return (*process, str(beat.step), beat.phase, beat.action, waits_for, ", ".join(newest))


def _awaited_text(waiting: Waiting) -> str:
    if waiting.peer is not None:
        return f"{waiting.group} {waiting.op} from rank {waiting.peer}"
    return f"{waiting.group} {waiting.op} #{waiting.sequence}"


def unmatched_collectives(
    recorded: Mapping[int, Sequence[RecordedCollective]], topology: Topology
) -> tuple[str, ...]:
    """One line per process group in which a rank waits on the device, or has not arrived.

    Args:
        recorded: results of `recorded_collectives` by rank, if its recorder could be read.
        topology: topology of the run.
    """
    groups: dict[tuple[str, Ranks], dict[int, RecordedCollective]] = {}
    for rank, collectives in recorded.items():
        for newest in collectives:
            members = newest.ranks or _members(topology, newest.group, rank=rank)
            groups.setdefault((newest.group, members), {})[rank] = newest
    lines = []
    for (name, ranks), by_rank in groups.items():
        line = _unmatched(name, ranks, by_rank=by_rank, known=set(recorded))
        if line:
            lines.append(line)
    return tuple(sorted(lines))


def _unmatched(
    name: str, ranks: Ranks, *, by_rank: Mapping[int, RecordedCollective], known: set[int]
) -> str:
    """A process group's awaited collective and the ranks that lack it; "" if none waits."""
    awaited = _oldest_awaited(by_rank.values())
    arrived = [rank for rank, last in by_rank.items() if last.sequence >= awaited.sequence]
    absent = [rank for rank in ranks if rank in known and rank not in arrived]
    if not absent and all(last.state == COMPLETED for last in by_rank.values()):
        return ""
    operands = [
        f"{list(size)} {dtype}"
        for size, dtype in zip(awaited.input_sizes, awaited.dtypes, strict=False)
    ]
    sizes = ", ".join(operands) or "unknown sizes"
    states = ", ".join(sorted({by_rank[rank].state for rank in arrived}))
    text = (
        f"group {name} (ranks {ranks_text(ranks)}): {awaited.op} #{awaited.sequence} of {sizes}: "
    )
    text += f"{named_ranks(arrived)} arrived ({states})"
    if absent:
        text += f", {named_ranks(absent)} did not"
    unknown = [rank for rank in ranks if rank not in known]
    if unknown:
        text += f", nothing is known of {named_ranks(unknown)}"
    return text


def _oldest_awaited(newest: Iterable[RecordedCollective]) -> RecordedCollective:
    """The collective that a group waits for, given the newest one of each rank.

    A rank whose newest collective is complete has arrived at all up to that number; a waiting rank
    at its own. On gloo a failed collective is not active any more: then it is the newest of all.
    """
    waiting = [last for last in newest if last.state != COMPLETED]
    if waiting:
        return min(waiting, key=attrgetter("sequence"))
    return max(newest, key=attrgetter("sequence"))
