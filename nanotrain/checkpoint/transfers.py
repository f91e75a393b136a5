"""Plan of a relayout (pure): which rank sends which box to which rank, and in which round.

    subtract           a box without another one, as disjoint boxes
    plan_transfers     boxes before and after -> copies inside a rank and transfers between ranks
    schedule_rounds    transfers -> rounds in which no rank sends or receives more than a limit

A rank keeps what it holds: only elements that it lacks are sent to it, each once, so the bytes sent
are the minimum. Where several ranks hold an element (replicas), the one that has sent the least so
far sends it.

    before   rank 0 [0 1 2 3]  rank 1 [4 5 6 7]     after   rank 0 [0 1]  rank 1 [2 3 4 5 6 7]

    one transfer: 2 and 3 from rank 0 to rank 1; all others stay
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanotrain.checkpoint.plan import split_box
from nanotrain.spec.boxes import Box, TensorBox

# Bytes that a rank sends, and that it receives, in one round: the buffers of a relayout.
ROUND_BYTES = 64 * 2**20
_FULL = 3 / 4  # share of a round from which no space is looked for in it
PIECE_BYTES = 16 * 2**20  # bytes of a transfer; small against a round, so that rounds are filled


@dataclass(frozen=True)
class Transfer:
    """A box that one rank sends to another, or keeps where both are the same rank."""

    source: int  # rank that holds the box
    destination: int  # rank that needs it
    held: TensorBox  # the box of the source's tensor
    wanted: TensorBox  # the box of the destination's tensor
    box: Box  # the elements, in coordinates of the global tensor
    nbytes: int  # bytes of the elements


@dataclass(frozen=True)
class TransferPlan:
    """All copies of a relayout."""

    kept: tuple[Transfer, ...]  # inside a rank
    sent: tuple[Transfer, ...]  # between ranks

    @property
    def sent_bytes(self) -> int:
        """Bytes that all ranks send together."""
        return sum(transfer.nbytes for transfer in self.sent)

    def sent_by(self, num_ranks: int) -> list[int]:
        """Bytes that each rank sends."""
        totals = [0] * num_ranks
        for transfer in self.sent:
            totals[transfer.source] += transfer.nbytes
        return totals

    def received_by(self, num_ranks: int) -> list[int]:
        """Bytes that each rank receives."""
        totals = [0] * num_ranks
        for transfer in self.sent:
            totals[transfer.destination] += transfer.nbytes
        return totals


class NotHeld(ValueError):
    """A region that a rank needs and no rank holds."""


def subtract(box: Box, other: Box) -> list[Box]:
    """The elements of a box that are not in another one, as disjoint boxes.

    >>> [part.text for part in subtract(Box((0, 0), (4, 4)), Box((1, 2), (3, 9)))]
    ['0:1,0:4', '3:4,0:4', '1:3,0:2']
    """
    shared = box.intersect(other)
    if shared is None:
        return [box]
    rest = []
    for dim in range(len(box.start)):
        for start, stop in (
            (box.start[dim], shared.start[dim]),
            (shared.stop[dim], box.stop[dim]),
        ):
            if start < stop:
                rest.append(_with_range(box, dim, start=start, stop=stop))
        box = _with_range(box, dim, start=shared.start[dim], stop=shared.stop[dim])
    return rest


def plan_transfers(
    held: Sequence[Iterable[TensorBox]],
    wanted: Sequence[Iterable[TensorBox]],
    *,
    element_bytes: Mapping[str, int],
) -> TransferPlan:
    """Plan the copies from the boxes before to the boxes after.

    Args:
        held: boxes of every rank before, by rank.
        wanted: boxes of every rank after, by rank; empty for a rank that leaves.
        element_bytes: bytes per element of every tensor, by name.

    Returns:
        Copies that cover every wanted box exactly once; the same on every rank.

    Raises:
        NotHeld: no rank holds an element that a rank needs.
    """
    sent_bytes = [0] * len(held)
    kept: list[Transfer] = []
    sent: list[Transfer] = []
    for bundle in _bundles(held, wanted):
        size = sum(element_bytes[name] for name in bundle.names)
        for transfer in _plan_bundle(bundle, size=size, load=sent_bytes):
            chosen = kept if transfer.source == transfer.destination else sent
            for name in bundle.names:
                chosen.append(_transfer_of_tensor(transfer, name, size=element_bytes[name]))
    return TransferPlan(tuple(kept), tuple(sent))


class _Bundle(NamedTuple):
    """Tensors with equal boxes on every rank, such as a weight and its moments: planned at once."""

    names: list[str]
    held: tuple[tuple[int, TensorBox], ...]  # rank and box, of the first name
    wanted: tuple[tuple[int, TensorBox], ...]


def _bundles(
    held: Sequence[Iterable[TensorBox]], wanted: Sequence[Iterable[TensorBox]]
) -> Iterator[_Bundle]:
    """The wanted tensors, where tensors with the same boxes form one bundle.

    Raises:
        NotHeld: no rank holds a part of one.
    """
    holders = _boxes_by_name(held)
    targets = _boxes_by_name(wanted)
    bundles: dict[Any, _Bundle] = {}
    for name, entries in targets.items():
        if name not in holders:
            raise NotHeld(f"no rank holds {name}")
        geometry = (_boxes_of(holders[name]), _boxes_of(entries))
        first = _Bundle([], tuple(holders[name]), tuple(entries))
        bundles.setdefault(geometry, first).names.append(name)
    yield from bundles.values()


def _boxes_by_name(boxes: Sequence[Iterable[TensorBox]]) -> dict[str, list[tuple[int, TensorBox]]]:
    """The ranks with boxes of each tensor, and the boxes."""
    entries: dict[str, list[tuple[int, TensorBox]]] = {}
    for rank, chosen in enumerate(boxes):
        for box in chosen:
            entries.setdefault(box.name, []).append((rank, box))
    return entries


def _boxes_of(entries: Iterable[tuple[int, TensorBox]]) -> tuple[Any, ...]:
    return tuple((rank, box.shape, box.box) for rank, box in entries)


def _transfer_of_tensor(transfer: Transfer, name: str, *, size: int) -> Transfer:
    """A transfer of a bundle, for one of its tensors."""
    return replace(
        transfer,
        held=replace(transfer.held, name=name),
        wanted=replace(transfer.wanted, name=name),
        nbytes=transfer.box.numel * size,
    )


def _plan_bundle(bundle: _Bundle, *, size: int, load: list[int]) -> Iterator[Transfer]:
    """Copies inside ranks and transfers of a bundle; adds to the load of the senders."""
    sources = _Holders(bundle.held)
    for rank, target in bundle.wanted:
        missing = [target.box]
        for index in sources.overlapping(target.box, rank=rank):
            entry = bundle.held[index]
            copies, missing = _take(entry, missing, target=target, rank=rank, size=size)
            yield from copies
        limit = PIECE_BYTES * len(bundle.names)  # a piece becomes a transfer per tensor
        for region in missing:
            for piece in split_box(region, size, limit=limit):
                yield from _plan_piece(
                    piece, sources, target=target, rank=rank, size=size, load=load
                )


def schedule_rounds(
    transfers: Iterable[Transfer], *, limit: int = ROUND_BYTES
) -> tuple[tuple[Transfer, ...], ...]:
    """Assign transfers to rounds: in each, a rank sends at most `limit` bytes and receives as many.

    A transfer of more than `limit` bytes is alone in its round. The first round with space for a
    transfer takes it.
    """
    sends: dict[int, _Filled] = {}
    receives: dict[int, _Filled] = {}
    rounds: list[list[Transfer]] = []
    for transfer in _interleave_destinations(transfers):
        sent = sends.setdefault(transfer.source, _Filled(limit))
        received = receives.setdefault(transfer.destination, _Filled(limit))
        nbytes = transfer.nbytes
        index = max(sent.first_open, received.first_open)
        while not (sent.has_space(index, nbytes) and received.has_space(index, nbytes)):
            index += 1
        sent.add(index, nbytes)
        received.add(index, nbytes)
        while len(rounds) <= index:
            rounds.append([])
        rounds[index].append(transfer)
    return tuple(tuple(chosen) for chosen in rounds if chosen)


class _Filled:
    """Bytes of one rank, sent or received, by round."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._totals: list[int] = []
        self.first_open = 0  # rounds before it are full, or nearly

    def has_space(self, index: int, nbytes: int) -> bool:
        """Whether a round has space; an empty one has it for any number of bytes."""
        total = self._totals[index] if index < len(self._totals) else 0
        return not total or total + nbytes <= self._limit

    def add(self, index: int, nbytes: int) -> None:
        """Count bytes in a round."""
        self._totals.extend([0] * (index + 1 - len(self._totals)))
        self._totals[index] += nbytes
        while self.first_open < len(self._totals) and self._is_full(self.first_open):
            self.first_open += 1

    def _is_full(self, index: int) -> bool:
        return self._totals[index] > self._limit * _FULL


def _interleave_destinations(transfers: Iterable[Transfer]) -> list[Transfer]:
    """The transfers, one of each destination in turn, so that all links are used at once."""
    by_destination: dict[int, list[Transfer]] = {}
    for transfer in transfers:
        by_destination.setdefault(transfer.destination, []).append(transfer)
    ordered = []
    for rank, chosen in by_destination.items():
        for position, transfer in enumerate(chosen):
            ordered.append((position, rank, transfer))
    ordered.sort(key=lambda entry: entry[:2])
    return [transfer for _, _, transfer in ordered]


class _Holders:
    """The boxes of one tensor that ranks hold."""

    def __init__(self, entries: Sequence[tuple[int, TensorBox]]) -> None:
        self.entries = entries
        self._ranks = np.array([rank for rank, _ in entries])
        self._starts = _rows([box.box.start for _, box in entries])
        self._stops = _rows([box.box.stop for _, box in entries])

    def overlapping(self, box: Box, *, rank: int | None = None) -> list[int]:
        """Indices of the entries that share elements with a box; of one rank, or of all."""
        is_chosen = ((self._starts < box.stop) & (self._stops > box.start)).all(axis=1)
        if rank is not None:
            is_chosen &= self._ranks == rank
        chosen: list[int] = np.flatnonzero(is_chosen).tolist()
        return chosen


def _rows(corners: Sequence[tuple[int, ...]]) -> NDArray[np.int64]:
    """[number of boxes, number of dims]."""
    return np.array(corners, dtype=np.int64).reshape(len(corners), -1)


def _plan_piece(
    piece: Box, sources: _Holders, *, target: TensorBox, rank: int, size: int, load: list[int]
) -> list[Transfer]:
    """Transfers of one region from the ranks that have sent the least; adds to their load.

    Raises:
        NotHeld: no rank holds a part of it.
    """
    transfers = []
    missing = [piece]

    def load_of(index: int) -> tuple[int, int]:
        source = sources.entries[index][0]
        return load[source], source

    for index in sorted(sources.overlapping(piece), key=load_of):
        entry = sources.entries[index]
        copies, missing = _take(entry, missing, target=target, rank=rank, size=size)
        for copy in copies:
            load[copy.source] += copy.nbytes
        transfers += copies
        if not missing:
            return transfers
    raise NotHeld(f"no rank holds [{missing[0].text}] of {target.name}")


def _take(
    entry: tuple[int, TensorBox],
    missing: Sequence[Box],
    *,
    target: TensorBox,
    rank: int,
    size: int,
) -> tuple[list[Transfer], list[Box]]:
    """The copies of missing regions from one source, and the regions that are missing then."""
    source, box = entry
    copies = []
    rest = []
    for region in missing:
        shared = region.intersect(box.box)
        if shared is None:
            rest.append(region)
            continue
        copies.append(Transfer(source, rank, box, target, shared, shared.numel * size))
        rest += subtract(region, box.box)
    return copies, rest


def _with_range(box: Box, dim: int, *, start: int, stop: int) -> Box:
    """The box with another range along one dim."""
    starts = list(box.start)
    stops = list(box.stop)
    starts[dim] = start
    stops[dim] = stop
    return Box(tuple(starts), tuple(stops))
