"""Whether all members of every group start the same collectives, and every send has its receive.

full_calls      the recorded calls of a rank, replayed in the order of the full schedule
disagreements   every group and pair of ranks compared
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from nanotrain.comm.recorder import Call
from nanotrain.dry_run.rank import RankRecord
from nanotrain.dry_run.rank_classes import RankClasses
from nanotrain.parallel.pp.actions import Action, Pair
from nanotrain.parallel.pp.transfers import RankPlan, TransferBatch
from nanotrain.topology.groups import GroupName, GroupSpec


class Message(NamedTuple):
    """A series of messages between two ranks."""

    op: str  # send or receive
    peer: int  # index of the other side in the group

    @property
    def opposite_op(self) -> str:
        """The operation that the other side of a message runs: send for receive."""
        return "send" if self.op == "receive" else "receive"


class SeriesKey(NamedTuple):
    """A series of calls of one rank: collectives of a group, or messages in it."""

    ranks: tuple[int, ...]  # members of the group
    message: Message | None  # None for collectives


def full_calls(record: RankRecord, full: RankPlan) -> Iterator[Call]:
    """The calls of a step with the full schedule, from a record of fewer microbatches.

    The first and last microbatches keep their distance from the ends, all others stand for one
    between.
    """
    few = record.plan.train_schedule
    recorded = _recorded_calls(record)
    yield from recorded.before
    for planned in full.steps:
        if isinstance(planned, TransferBatch):
            if recorded.message is not None:
                yield from _message_calls(recorded.message, planned)
            continue
        assert not isinstance(planned, Pair), "the dry run has no pairs"
        microbatch = _recorded_microbatch(
            planned.microbatch, few.num_microbatches, total=full.num_microbatches
        )
        yield from recorded.by_action[planned._replace(microbatch=microbatch)]
    yield from recorded.after


class _RecordedCalls(NamedTuple):
    """The recorded calls of a step."""

    before: list[Call]  # before the first action
    by_action: Mapping[Action, list[Call]]  # without messages of the pipeline
    message: Call | None  # one message of the pipeline, whose tensors all have one size
    after: list[Call]  # after the last action, without messages


def _recorded_calls(record: RankRecord) -> _RecordedCalls:
    """Sort the recorded calls of a step by the actions that start them."""
    pp = record.plan.groups["pp"]
    actions = [*record.plan.train_schedule.actions]
    messages: list[Call] = []
    before: list[Call] = []
    by_action = defaultdict[Action, list[Call]](list)
    after: list[Call] = []
    for call in record.step:
        if call.peer is not None and call.ranks == pp.ranks:
            messages.append(call)
        elif isinstance(call.moment, int):
            by_action[actions[call.moment]].append(call)
        elif by_action:
            after.append(call)
        else:
            before.append(call)
    return _RecordedCalls(before, by_action, messages[0] if messages else None, after)


def _recorded_microbatch(microbatch: int, num_recorded: int, *, total: int) -> int:
    """The recorded microbatch that stands for one of the full schedule."""
    middle = num_recorded // 2
    if microbatch < middle:
        return microbatch
    to_end = total - microbatch
    if to_end <= num_recorded - middle:
        return num_recorded - to_end
    return middle


def _message_calls(message: Call, transfers: TransferBatch) -> Iterator[Call]:
    """The messages of transfers, as a recorded message."""
    for transfer in transfers.receives:
        yield message._replace(op="receive", peer=transfer.peer)
    for transfer in transfers.sends:
        yield message._replace(op="send", peer=transfer.peer)


@dataclass(frozen=True)
class Side:
    """The calls of one rank in one group."""

    record: RankRecord
    group: GroupSpec
    calls: Sequence[Call]

    def describe(self, call: Call | None) -> str:
        """One call of the rank for messages."""
        return f"rank {self.record.plan.rank} {self.record.describe(call)}"


class Comparison:
    """Ranks whose calls are compared.

    Args:
        records: records of the ranks that were run.
        calls: calls of some of them, perhaps of the full schedule.
        classes: classes of all ranks.
    """

    def __init__(
        self,
        records: Mapping[int, RankRecord],
        calls: Mapping[int, Sequence[Call]],
        *,
        classes: RankClasses,
    ) -> None:
        self.records = records
        self.classes = classes
        self.series = {rank: _split_series(rank_calls) for rank, rank_calls in calls.items()}

    def disagreements(self) -> Iterator[str]:
        """The first disagreement of every group and pair of ranks."""
        for rank in self.series:
            for spec in self.records[rank].distinct_groups:
                yield from self._collectives(rank, spec)
                yield from self._messages(rank, spec)

    def _collectives(self, rank: int, spec: GroupSpec) -> Iterator[str]:
        """Disagreements of a rank with the later ranks of a group."""
        others = {self.classes.stand_in(member) for member in spec.ranks}
        for other in others.intersection(self.series):
            if rank < other:
                ours = self._side(rank, spec.name)
                yield from _first_difference(ours, self._side(other, spec.name))

    def _messages(self, rank: int, spec: GroupSpec) -> Iterator[str]:
        """Messages of a rank in a group that the other side does not have."""
        for ranks, message in [*self.series[rank]]:
            if message is None or ranks != spec.ranks:
                continue
            other = self.classes.stand_in(spec.ranks[message.peer])
            if other not in self.series:
                continue
            # the rank that stands for the peer has a partner at the same distance
            group = self.records[other].plan.groups[spec.name]
            partner = (group.index - message.peer + spec.index) % spec.size
            ours = self._side(rank, spec.name, message=message)
            theirs = self._side(other, spec.name, message=Message(message.opposite_op, partner))
            yield from _first_difference(ours, theirs)

    def _side(self, rank: int, name: GroupName, *, message: Message | None = None) -> Side:
        """Collectives of a rank in a group, or its messages."""
        spec = self.records[rank].plan.groups[name]
        calls = self.series[rank][SeriesKey(spec.ranks, message)]
        return Side(self.records[rank], spec, calls)


def disagreements(
    records: Mapping[int, RankRecord], calls: Mapping[int, Sequence[Call]], *, classes: RankClasses
) -> Iterator[str]:
    """The first disagreement of every group and pair of ranks; arguments as for `Comparison`."""
    return Comparison(records, calls, classes=classes).disagreements()


def _split_series(calls: Sequence[Call]) -> dict[SeriesKey, list[Call]]:
    """The collectives of every group, and its messages by operation and peer."""
    series = defaultdict[SeriesKey, list[Call]](list)
    for call in calls:
        message = None if call.peer is None else Message(call.op, call.peer)
        series[SeriesKey(call.ranks, message)].append(call)
    return series


def _first_difference(one: Side, two: Side) -> Iterator[str]:
    """The first calls of two sides that do not match."""
    pairs = zip_longest(one.calls, two.calls)
    for call_number, (ours, theirs) in enumerate(pairs, start=1):
        if ours is theirs or _do_match(ours, theirs, groups=(one.group, two.group)):
            continue
        first = one.group.ranks[0]
        last = one.group.ranks[-1]
        where = f"group {one.group.name} (ranks {first} to {last}), call {call_number}"
        yield f"{where}: {one.describe(ours)}, but {two.describe(theirs)}"
        return


def _do_match(
    ours: Call | None, theirs: Call | None, *, groups: tuple[GroupSpec, GroupSpec]
) -> bool:
    """Whether two calls are one collective, or the two sides of a message."""
    if ours is None or theirs is None or ours.size != theirs.size:
        return False
    is_collective = ours.peer is None
    if is_collective and ours.op != theirs.op:
        return False
    if not ours.splits:
        return True
    our_sent, our_received = ours.splits
    their_sent, their_received = theirs.splits
    our_index = groups[0].index
    their_index = groups[1].index
    receives_what_we_send = our_sent[their_index] == their_received[our_index]
    sends_what_we_receive = our_received[their_index] == their_sent[our_index]
    return receives_what_we_send and sends_what_we_receive
