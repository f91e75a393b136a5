"""Whether all members of every group start the same collectives, and every send has its receive.

    RankClasses     the ranks that run the same program, and those that are run
    full_calls      what a rank has recorded, replayed in the order of the full schedule
    disagreements   every group and pair of ranks compared

A class are the ranks of one pipeline rank and one context-parallel rank with equally many rows of
the vocabulary. Its first and last rank are run, and stand for all; in a small world all ranks are.
The shards of replicated parameters and of tied embeddings differ between data-parallel ranks, so
sums over tp and embed are compared between ranks of one of them.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from nanotrain.comm.recorder import Call
from nanotrain.config.config import Config
from nanotrain.dry_run.rank import RankRecord
from nanotrain.parallel.pp.actions import Action, Pair
from nanotrain.parallel.pp.transfers import RankPlan
from nanotrain.spec.shape import ModelShape
from nanotrain.topology.groups import GroupName, GroupSpec
from nanotrain.topology.topology import Topology

Message = tuple[str, int]  # operation, and index of the other side in the group
MAX_ALL = 8  # ranks of a world that are all run
# of more context-parallel ranks the first, the last and one of the others are run
MAX_CP_CLASSES = 8


@dataclass(frozen=True)
class RankClasses:
    """The equivalence classes of the ranks of a run."""

    config: Config
    topology: Topology

    @cached_property
    def _keys(self) -> list[tuple[int, ...]]:
        """By rank: what the ranks of its class have in common, and the data-parallel rank."""
        shape, size = ModelShape.of(self.config.model), self.topology.size
        (tp, cp), ends = (size("tp"), size("cp")), self.topology.end_ranks
        rows = shape.padded_vocab_size // tp
        kinds = [
            rank if cp <= MAX_CP_CLASSES or rank == cp - 1 else min(rank, 1) for rank in range(cp)
        ]
        tokens = [min(rows, max(0, shape.vocab_size - index * rows)) for index in range(tp)]
        coords = map(self.topology.dense.coords, range(self.topology.world_size))
        return [
            (c["pp"], kinds[c["cp"]], tokens[c["tp"]] * (c["pp"] in ends), c["dp"]) for c in coords
        ]

    @cached_property
    def bounds(self) -> dict[tuple[int, ...], tuple[int, int]]:
        """The first and the last rank of every class."""
        bounds: dict[tuple[int, ...], tuple[int, int]] = {}
        for rank, (*key, _) in enumerate(self._keys):
            bounds[*key] = bounds.get((*key,), (rank, rank))[0], rank
        return bounds

    @property
    def run_ranks(self) -> tuple[list[int], list[int]]:
        """The first ranks of all classes; and the last ones, or in a small world all others."""
        firsts = [first for first, _ in self.bounds.values()]
        number = self.topology.world_size
        others = range(number) if number <= MAX_ALL else [last for _, last in self.bounds.values()]
        return firsts, [rank for rank in others if rank not in firsts]

    def stand_in(self, rank: int) -> int:
        """The rank that is run for a rank: itself, or one of the same data-parallel rank, or the
        first of the class.
        """
        if self.topology.world_size <= MAX_ALL:
            return rank
        *key, dp = self._keys[rank]
        first, last = self.bounds[*key]
        return (
            last if rank == last or (self._keys[last][-1] == dp != self._keys[first][-1]) else first
        )


def full_calls(record: RankRecord, full: RankPlan) -> Iterator[Call]:
    """The calls of a step with the full schedule: an action's are those of a microbatch that was
    run.

    The first and last microbatches are those at the same distance from the ends, the others one
    between.
    """
    few, pp = record.plan.train_schedule, record.plan.groups["pp"]
    actions, by_action = [*few.actions], defaultdict[Action, list[Call]](list)
    step: list[Call] = []
    messages: list[Call] = []
    for call in record.step:
        (messages if call.peer is not None and call.ranks == pp.ranks else step).append(call)
    for call in step:
        if isinstance(call.moment, int):
            by_action[actions[call.moment]].append(call)
    first = next((i for i, call in enumerate(step) if isinstance(call.moment, int)), len(step))
    yield from step[:first]
    number, total = few.num_microbatches, full.num_microbatches
    for planned in full.steps:
        if isinstance(planned, Action | Pair):
            assert isinstance(planned, Action), "the dry run has no pairs"
            index, to_end = planned.microbatch, total - planned.microbatch
            near = (
                index
                if index < number // 2
                else number - to_end
                if to_end <= number - number // 2
                else number // 2
            )
            yield from by_action[planned._replace(microbatch=near)]
            continue
        for op, transfers in (("receive", planned.receives), ("send", planned.sends)):
            for transfer, message in zip(transfers, messages[:1] * len(transfers), strict=False):
                yield message._replace(op=op, peer=transfer.peer)
    yield from (call for call in step[first:] if isinstance(call.moment, str))


@dataclass(frozen=True)
class Side:
    """The calls of one rank in one group."""

    record: RankRecord
    group: GroupSpec
    calls: Sequence[Call]


def disagreements(
    records: Mapping[int, RankRecord], calls: Mapping[int, Sequence[Call]], *, classes: RankClasses
) -> Iterator[str]:
    """The first disagreement of every group and pair of ranks.

    Args:
        records: what the ranks did that were run.
        calls: calls of some of them, perhaps of the full schedule.
        classes: classes of all ranks.
    """
    series = {rank: _series(each) for rank, each in calls.items()}

    def side(rank: int, name: GroupName, *, message: Message | None = None) -> Side:
        spec = records[rank].plan.groups[name]
        return Side(records[rank], spec, series[rank][spec.ranks, message])

    for rank in calls:
        groups = {
            spec.ranks: spec
            for spec in reversed([*records[rank].plan.groups.values()])
            if spec.size > 1
        }
        for spec in groups.values():
            for other in {classes.stand_in(member) for member in spec.ranks}.intersection(calls):
                if rank < other:
                    yield from _first_difference(side(rank, spec.name), side(other, spec.name))
            for op, peer in [
                message for ranks, message in series[rank] if message and ranks == spec.ranks
            ]:
                other = classes.stand_in(spec.ranks[peer])
                if other in calls:
                    back = (
                        records[other].plan.groups[spec.name].index - peer + spec.index
                    ) % spec.size
                    theirs = side(
                        other, spec.name, message=("send" if op == "receive" else "receive", back)
                    )
                    yield from _first_difference(side(rank, spec.name, message=(op, peer)), theirs)


def _series(calls: Sequence[Call]) -> dict[tuple[tuple[int, ...], Message | None], list[Call]]:
    """The collectives of every group, and its messages by operation and peer."""
    series = defaultdict[tuple[tuple[int, ...], Message | None], list[Call]](list)
    for call in calls:
        series[call.ranks, None if call.peer is None else (call.op, call.peer)].append(call)
    return series


def _first_difference(one: Side, two: Side) -> Iterator[str]:
    for number, pair in enumerate(zip_longest(one.calls, two.calls), start=1):
        if pair[0] is not pair[1] and not _match(*pair, groups=(one.group, two.group)):
            sides = (
                f"rank {s.record.plan.rank} {s.record.describe(call)}"
                for s, call in zip((one, two), pair, strict=True)
            )
            first, last = one.group.ranks[0], one.group.ranks[-1]
            yield f"group {one.group.name} (ranks {first} to {last}), call {number}: {', but '.join(sides)}"
            return


def _match(ours: Call | None, theirs: Call | None, *, groups: tuple[GroupSpec, GroupSpec]) -> bool:
    """Whether two calls are one collective, or the two sides of a message."""
    if (
        ours is None
        or theirs is None
        or ours.size != theirs.size
        or (ours.peer is None and ours.op != theirs.op)
    ):
        return False
    if not ours.splits:
        return True
    (sent, received), (their_sent, their_received), (one, two) = ours.splits, theirs.splits, groups
    return (
        sent[two.index] == their_received[one.index]
        and received[two.index] == their_sent[one.index]
    )
