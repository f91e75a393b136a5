"""hang-report.txt: the ranks that the others wait for, the collective, and the state of every rank. Pure.

A rank that waits for a collective waits for the ranks of the group that have not started it; a rank that waits for a
message waits for its sender. Ranks that others wait for, and that wait for none themselves, are behind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nanotrain.comm.heartbeat import Beat
from nanotrain.topology.groups import GroupName, Ranks
from nanotrain.topology.topology import Topology

LOST, UNKNOWN = "lost", "no reply"
STATES = {"T": "stopped", "R": "running", "S": "sleeping", "D": "waiting for a disk", "": LOST, "?": UNKNOWN}
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
        return f"rank {self.rank} ({f'{coords}, ' if coords else ''}host {self.host}, pid {self.pid})"


@dataclass(frozen=True)
class Diagnosis:
    """The ranks that are behind, and the reason."""

    ranks: tuple[int, ...]  # that the others wait for; empty if none can be named
    headline: str  # one sentence per cause
    details: tuple[str, ...] = ()  # collectives in which the ranks differ


def diagnose(views: Mapping[int, RankView], topology: Topology) -> Diagnosis:
    """Find the ranks that the others wait for.

    Args:
        views: of all ranks.
        topology: of the run.
    """
    details = tuple(_differences(views, topology))
    for states, text in (
        (("",), "ended without an error message: it was killed, or its machine ran out of memory"),
        (
            ("T",),
            "is stopped (SIGSTOP, a debugger, or a suspended container)",
        ),
    ):
        found = [view for view in views.values() if view.state in states and not _is_done(view)]
        if found:
            return _name(found, text, topology=topology, details=details)
    silent = [view for view in views.values() if view.state == "?"]
    if silent:
        text = "did not reply: its machine, its network or the shared file system is gone"
        return _name(silent, text, topology=topology, details=details)
    waits = {rank: _waits_for(view, views, topology=topology) for rank, view in views.items()}
    behind = sorted({peer for peers in waits.values() for peer in peers if not waits[peer]})
    if behind:
        texts = []
        for rank in behind:
            waiting = [other for other, peers in waits.items() if rank in peers]
            texts.append(
                f"{views[rank].describe(topology)} is behind: {_waited(waiting, views)}; {_place(views[rank])}"
            )
        return Diagnosis(tuple(behind), "\n".join(texts), details)
    if any(waits.values()):
        blocked = sorted(rank for rank, peers in waits.items() if peers)
        text = f"ranks {ranks_text(blocked)} wait for each other: they started their collectives in different orders"
        return Diagnosis(tuple(blocked), text, details)
    # A host that blocks where it queues an operation, as with a full queue of a GPU, records nothing that it waits for.
    fewer = {rank: _started_fewer(view, views, topology=topology) for rank, view in views.items()}
    behind = sorted({peer for peers in fewer.values() for peer in peers if not fewer[peer]})
    if behind:
        text = f"started fewer collectives than {named_ranks([rank for rank in fewer if fewer[rank]])}"
        return _name([views[rank] for rank in behind], text, topology=topology, details=details)
    if details:
        return Diagnosis((), "the ranks of a group started different collectives", details)
    idle = [f"{view.describe(topology)}: {_place(view)}" for view in views.values() if not _is_waiting(view)]
    text = "no rank waits for another one; look at the stacks:\n" + "\n".join(idle[:MAX_ROWS])
    return Diagnosis((), text if idle else "all ranks wait for a collective that all of them started", details)


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
        diagnosis: of these ranks.
        views: of all ranks.
        topology: of the run.
        title: first lines, with reason and time.
        recorded: lines from the flight recorders of the ranks.
    """
    order = [*diagnosis.ranks, *(rank for rank in sorted(views) if rank not in diagnosis.ranks)]
    rows = [_row(views[rank], topology) for rank in order[:MAX_ROWS]]
    header = ("rank", "coordinates", "host", "pid", "state", "step", "phase", "action", "waits for", "last collectives")
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [header, *rows]]
    if len(order) > MAX_ROWS:
        table.append(f"... and {len(order) - MAX_ROWS} more ranks")
    parts = [*title, "", diagnosis.headline]
    if diagnosis.details:
        parts += ["", "Where the ranks of a group differ:", *(f"  {line}" for line in diagnosis.details)]
    if recorded:
        parts += ["", "In torch's flight recorders, numbered per process group:", *(f"  {line}" for line in recorded)]
    return "\n".join([*parts, "", *(line.rstrip() for line in table), ""])


def _name(found: Sequence[RankView], text: str, *, topology: Topology, details: tuple[str, ...]) -> Diagnosis:
    lines = [f"{view.describe(topology)} {text}; {_place(view)}" for view in found]
    return Diagnosis(tuple(view.rank for view in found), "\n".join(lines), details)


def _is_done(view: RankView) -> bool:
    return view.beat is not None and view.beat.phase in ("finished", "failed")


def _is_waiting(view: RankView) -> bool:
    return view.beat is not None and view.beat.waiting is not None


def _members(topology: Topology, group: str, *, rank: int) -> Ranks:
    if group in ("control", "world"):
        return tuple(range(topology.world_size))
    name: GroupName = group  # type: ignore[assignment]
    try:
        return topology.members(rank, name)
    except KeyError:  # a group of a test
        return (rank,)


def _sequence(view: RankView, group: str) -> int:
    collective = view.beat.collectives.get(group) if view.beat else None
    return collective.sequence if collective else 0


def _waits_for(view: RankView, views: Mapping[int, RankView], *, topology: Topology) -> set[int]:
    """The ranks that a rank waits for."""
    waiting = view.beat.waiting if view.beat else None
    if waiting is None:
        return set()
    if waiting.op == "p2p":
        return {waiting.peer} & views.keys() if waiting.peer is not None else set()
    members = _members(topology, waiting.group, rank=view.rank)
    return {rank for rank in members if rank in views and _sequence(views[rank], waiting.group) < waiting.sequence}


def _started_fewer(view: RankView, views: Mapping[int, RankView], *, topology: Topology) -> set[int]:
    """The ranks that started fewer collectives than this one over a group of both."""
    return {
        rank
        for group, mine in (view.beat.collectives if view.beat else {}).items()
        if group != "pp"  # messages are not collectives
        for rank in _members(topology, group, rank=view.rank)
        if rank in views and _sequence(views[rank], group) < mine.sequence
    }


def _waited(ranks: Sequence[int], views: Mapping[int, RankView]) -> str:
    beat = views[ranks[0]].beat
    waiting = beat.waiting if beat else None
    assert waiting is not None, "ranks that wait have one"
    verb = "waits" if len(ranks) == 1 else "wait"
    what = "a message" if waiting.op == "p2p" else f"{waiting.op} #{waiting.sequence}"
    return f"{named_ranks(ranks)} {verb} for {what} of group {waiting.group}"


def _place(view: RankView) -> str:
    beat = view.beat
    if beat is None:
        return "its place is unknown"
    action = f", action {beat.action}" if beat.action else ""
    waiting = f", waiting for {beat.waiting.op} of group {beat.waiting.group}" if beat.waiting else ""
    return f"it was in step {beat.step}, phase {beat.phase}{action}{waiting}"


def _differences(views: Mapping[int, RankView], topology: Topology) -> list[str]:
    """One line per group whose ranks started different numbers or kinds of collectives."""
    lines: dict[tuple[str, Ranks], str] = {}
    for view in views.values():
        for group in view.beat.collectives if view.beat else ():
            members = _members(topology, group, rank=view.rank)
            if group == "pp" or len(members) < 2 or (group, members) in lines:  # messages are not collectives
                continue
            last: dict[str, list[int]] = {}
            for rank in members:
                beat = views[rank].beat if rank in views else None
                collective = beat.collectives.get(group) if beat else None
                if collective:
                    text = f"#{collective.sequence} {collective.op}"
                    if collective.op != "all_to_all":  # its sizes differ
                        text += f" of {collective.num_bytes:,} bytes"
                else:
                    text = "nothing" if beat else "unknown"
                last.setdefault(text, []).append(rank)
            if len(last) > 1:
                parts = [f"{named_ranks(ranks)}: {text}" for text, ranks in last.items()]
                lines[group, members] = (
                    f"group {group} (ranks {ranks_text(members)}): last started by {'; '.join(parts)}"
                )
            else:
                lines[group, members] = ""
    return [line for line in lines.values() if line]


def _row(view: RankView, topology: Topology) -> tuple[str, ...]:
    beat, coords = view.beat, topology.coords_text(view.rank)
    who = (str(view.rank), coords, view.host, str(view.pid), STATES.get(view.state, view.state))
    if beat is None:
        return (*who, *("?",) * 5)
    waiting = ""
    if beat.waiting is not None:
        source = f" from rank {beat.waiting.peer}" if beat.waiting.peer is not None else f" #{beat.waiting.sequence}"
        waiting = f"{beat.waiting.group} {beat.waiting.op}{source}"
    last = ", ".join(f"{group} #{each.sequence} {each.op}" for group, each in beat.collectives.items())
    return (*who, str(beat.step), beat.phase, beat.action, waiting, last)


def named_ranks(ranks: Sequence[int]) -> str:
    """`ranks_text` after "rank" or "ranks"."""
    return f"rank{'s' * (len(ranks) != 1)} {ranks_text(ranks)}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks with ranges.

    >>> ranks_text([0, 1, 2, 3, 7])
    '0-3, 7'
    """
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
