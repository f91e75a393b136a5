"""Compare the flight recorders of ranks: the collectives that not all ranks of a group have reached. Pure."""

from collections.abc import Mapping, Sequence

from nanotrain.comm.flight_recorder import RecordedCollective
from nanotrain.topology.groups import GroupName, Ranks
from nanotrain.topology.topology import Topology
from nanotrain.watch.report import named_ranks, ranks_text


def unmatched_collectives(recorded: Mapping[int, Sequence[RecordedCollective]], topology: Topology) -> tuple[str, ...]:
    """One line per process group in which a rank waits on the device, or has not arrived.

    Args:
        recorded: of every rank whose recorder could be read, what `recorded_collectives` returned there.
        topology: of the run.
    """
    groups: dict[tuple[str, Ranks], dict[int, RecordedCollective]] = {}
    for rank, collectives in recorded.items():
        for each in collectives:
            groups.setdefault((each.group, _members(each, rank, topology=topology)), {})[rank] = each
    lines = [_line(name, ranks, by_rank=by_rank, known=set(recorded)) for (name, ranks), by_rank in groups.items()]
    return tuple(sorted(line for line in lines if line))


def _line(name: str, ranks: Ranks, *, by_rank: Mapping[int, RecordedCollective], known: set[int]) -> str:
    """The collective that a process group waits for, and the ranks that have not arrived; "" if none waits."""
    # A rank whose newest collective is complete has arrived at all up to that number; a waiting rank at its own.
    oldest = min((each for each in by_rank.values() if each.state != "completed"), key=_sequence, default=None)
    if oldest is None:  # gloo: a failed collective is no longer active, so the newest one of all ranks is compared
        oldest = max(by_rank.values(), key=_sequence)
    arrived = [rank for rank, each in by_rank.items() if each.sequence >= oldest.sequence]
    absent = [rank for rank in ranks if rank in known and rank not in arrived]
    if not absent and all(each.state == "completed" for each in by_rank.values()):
        return ""
    sizes = ", ".join(f"{list(size)} {dtype}" for size, dtype in zip(oldest.input_sizes, oldest.dtypes, strict=False))
    unknown = [rank for rank in ranks if rank not in known]
    states = sorted({by_rank[rank].state for rank in arrived})
    text = f"group {name} (ranks {ranks_text(ranks)}): {oldest.op} #{oldest.sequence} of {sizes or 'unknown sizes'}: "
    text += f"{named_ranks(arrived)} arrived ({', '.join(states)})"
    text += f", {named_ranks(absent)} did not" if absent else ""
    return text + (f", nothing is known of {named_ranks(unknown)}" if unknown else "")


def _sequence(each: RecordedCollective) -> int:
    return each.sequence


def _members(each: RecordedCollective, rank: int, *, topology: Topology) -> Ranks:
    if each.ranks:
        return each.ranks
    if each.group in ("world", "control"):
        return tuple(range(topology.world_size))
    name: GroupName = each.group  # type: ignore[assignment]
    try:
        return topology.members(rank, name)
    except KeyError:  # not a group of the topology
        return (rank,)
