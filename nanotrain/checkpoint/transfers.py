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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nanotrain.checkpoint.plan import split_box
from nanotrain.spec.boxes import Box, TensorBox

# Bytes that a rank sends, and that it receives, in one round: the buffers of a relayout.
ROUND_BYTES = 64 * 2**20
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
    holders = _holders(held)
    sent_bytes = [0] * len(held)
    kept: list[Transfer] = []
    sent: list[Transfer] = []
    for rank, boxes in enumerate(wanted):
        for target in boxes:
            sources = holders.get(target.name)
            if sources is None:
                raise NotHeld(f"no rank holds {target.name}")
            size = element_bytes[target.name]
            missing = [target.box]
            for index in sources.overlapping(target.box, rank=rank):
                copies, missing = _take(sources, index, target, missing, rank=rank, size=size)
                kept.extend(copies)
            for region in missing:
                for piece in split_box(region, size, limit=PIECE_BYTES):
                    sent += _plan_piece(
                        piece, target, sources, rank=rank, size=size, load=sent_bytes
                    )
    return TransferPlan(tuple(kept), tuple(sent))


def schedule_rounds(
    transfers: Iterable[Transfer], *, limit: int = ROUND_BYTES
) -> tuple[tuple[Transfer, ...], ...]:
    """Assign transfers to rounds: in each, a rank sends at most `limit` bytes and receives as many.

    A transfer of more than `limit` bytes has a round of its own. The first round with space for a
    transfer takes it.
    """
    sends: dict[int, list[int]] = {}
    receives: dict[int, list[int]] = {}
    rounds: list[list[Transfer]] = []
    for transfer in _interleaved(transfers):
        sent = sends.setdefault(transfer.source, [])
        received = receives.setdefault(transfer.destination, [])
        index = 0
        while not _has_space(sent, received, index=index, nbytes=transfer.nbytes, limit=limit):
            index += 1
        for totals in (sent, received):
            totals.extend([0] * (index + 1 - len(totals)))
            totals[index] += transfer.nbytes
        while len(rounds) <= index:
            rounds.append([])
        rounds[index].append(transfer)
    return tuple(tuple(chosen) for chosen in rounds)


def _has_space(
    sent: Sequence[int], received: Sequence[int], *, index: int, nbytes: int, limit: int
) -> bool:
    """Whether a round has space for a transfer, at its source and at its destination."""
    for totals in (sent, received):
        total = totals[index] if index < len(totals) else 0
        if total and total + nbytes > limit:
            return False
    return True


def _interleaved(transfers: Iterable[Transfer]) -> list[Transfer]:
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


def _holders(held: Sequence[Iterable[TensorBox]]) -> dict[str, _Holders]:
    """The ranks that hold each tensor, by name."""
    entries: dict[str, list[tuple[int, TensorBox]]] = {}
    for rank, boxes in enumerate(held):
        for box in boxes:
            entries.setdefault(box.name, []).append((rank, box))
    return {name: _Holders(chosen) for name, chosen in entries.items()}


def _plan_piece(
    piece: Box, target: TensorBox, sources: _Holders, *, rank: int, size: int, load: list[int]
) -> list[Transfer]:
    """Transfers of one region from the ranks that have sent the least; adds to their load.

    Raises:
        NotHeld: no rank holds a part of it.
    """
    transfers = []
    missing = [piece]
    by_load = lambda index: (load[sources.entries[index][0]], sources.entries[index][0])  # noqa: E731
    for index in sorted(sources.overlapping(piece), key=by_load):
        copies, missing = _take(sources, index, target, missing, rank=rank, size=size)
        for copy in copies:
            load[copy.source] += copy.nbytes
        transfers += copies
        if not missing:
            return transfers
    raise NotHeld(f"no rank holds [{missing[0].text}] of {target.name}")


def _take(
    sources: _Holders,
    index: int,
    target: TensorBox,
    missing: Sequence[Box],
    *,
    rank: int,
    size: int,
) -> tuple[list[Transfer], list[Box]]:
    """The copies of missing regions from one source, and the regions that are missing then."""
    source, box = sources.entries[index]
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
