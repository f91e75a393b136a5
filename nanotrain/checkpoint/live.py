"""`LiveCheckpoint`: the state of a run in the memory of its ranks, read as a checkpoint is read.

    describe   all ranks: names, shapes and dtypes of what they hold; the manifest
    plan       all ranks: the same plan, from the boxes that each has and needs (transfers.py)
    keep       copies inside a rank
    rounds     boxes between ranks, at most `ROUND_BYTES` sent and received per rank and round

No file is written. Besides the old and the new tensors a rank needs `MEMORY_BYTES`.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanotrain.checkpoint.all_ranks import reduce_on_all
from nanotrain.checkpoint.checkpointer import TargetFilter, Tensors
from nanotrain.checkpoint.compatibility import (
    check_all_loaded,
    check_compatible,
    fit_padding,
    loads,
)
from nanotrain.checkpoint.manifest import Manifest, TensorEntry
from nanotrain.checkpoint.transfers import (
    PIECE_BYTES,
    ROUND_BYTES,
    Transfer,
    TransferPlan,
    plan_transfers,
    schedule_rounds,
)
from nanotrain.comm.collectives import all_gather_object
from nanotrain.comm.group import Group
from nanotrain.comm.send_recv import Message, start_send_recv
from nanotrain.precision.dtypes import DTYPE_NAMES, TORCH_DTYPES
from nanotrain.spec.boxes import TensorBox

# what a rank sends and receives in a round, and one piece that is copied out of it
MEMORY_BYTES = 2 * ROUND_BYTES + PIECE_BYTES


@dataclass(frozen=True)
class RestoreTraffic:
    """The traffic of a restore from memory."""

    sent_bytes: int = 0  # by all ranks
    kept_bytes: int = 0  # copied inside ranks
    most_sent_bytes: int = 0  # by one rank
    most_received_bytes: int = 0  # by one rank
    num_rounds: int = 0
    seconds: float = 0.0


class LiveCheckpoint:
    """The tensors of all ranks of a run, as the source of a restore.

    Args:
        tensors: box -> tensor that this rank holds; replicas may hold the same box.
        manifest: step, objects, config and topology of the run; without tensors.
        device: device of the tensors that are sent.
    """

    def __init__(self, tensors: Tensors, manifest: Manifest, *, device: torch.device) -> None:
        self._tensors = {box: tensor.detach() for box, tensor in tensors.items()}
        self.manifest = manifest
        self._device = device
        self._dtypes: dict[str, torch.dtype] = {}  # of the tensors of all ranks, by name
        self._world = Group.single_rank("world")
        self.group = Group.single_rank("control")  # all ranks, for objects
        self.moved = RestoreTraffic()  # by the last restore

    def connect(self, world: Group, control: Group) -> None:
        """Set the groups of all ranks; ranks that leave are members too."""
        self._world = world
        self.group = control

    def restore(
        self,
        path: Path,
        targets: Tensors,
        *,
        config: Mapping[str, Any] | None = None,
        padded_rows: Mapping[str, int] | None = None,
        choose: TargetFilter | None = None,
        unread: Callable[[Manifest], Collection[str]] | None = None,
    ) -> Manifest:
        """Fill this rank's tensors. Collective; a rank outside of the new layout has no targets.

        Arguments as of `Checkpointer.restore`; `path` is not read.

        Raises:
            CheckpointError: the targets are of another model.
        """
        begun = time.perf_counter()
        described = {box: DTYPE_NAMES[tensor.dtype] for box, tensor in self._tensors.items()}
        held = all_gather_object(described, self.group)
        manifest = replace(self.manifest, tensors=_entries(held))
        self._dtypes = {name: TORCH_DTYPES[entry.dtype] for name, entry in manifest.tensors.items()}
        targets = choose(manifest, targets) if choose else targets
        fitted = fit_padding(manifest, targets, rows=padded_rows or {})

        def check() -> list[float]:
            dtypes = {box: DTYPE_NAMES[tensor.dtype] for box, tensor in fitted.items()}
            check_compatible(manifest, dtypes, config=config)
            names = {box.name for box in targets}
            return loads(manifest, names.union(unread(manifest) if unread else ()))

        loaded = reduce_on_all(self.group, check, length=len(manifest.tensors))
        check_all_loaded(manifest, loaded, config=config)
        wanted = all_gather_object(list(fitted), self.group)
        plan = plan_transfers(
            [list(boxes) for boxes in held],
            wanted,
            element_bytes={name: dtype.itemsize for name, dtype in self._dtypes.items()},
        )
        num_rounds = self._carry_out(plan, fitted)
        self.moved = _traffic_of(plan, self._world.size, num_rounds=num_rounds, begun=begun)
        return manifest

    def leave(self) -> None:
        """Send tensors to the ranks of the new layout, of which this rank is none."""
        self.restore(Path(), {})

    def release(self) -> None:
        """Drop the tensors, once the new ones are filled."""
        self._tensors = {}

    def _carry_out(self, plan: TransferPlan, targets: Tensors) -> int:
        """Copy and send; returns the number of rounds."""
        rank = self._world.rank
        for transfer in plan.kept:
            if transfer.source == rank:
                _region(transfer, targets).copy_(self._source(transfer))
        rounds = schedule_rounds(plan.sent, limit=ROUND_BYTES)
        for transfers in rounds:
            self._run_round(transfers, targets)
        return len(rounds)

    def _run_round(self, transfers: Sequence[Transfer], targets: Tensors) -> None:
        """Send and receive one message per pair of ranks."""
        rank = self._world.rank
        outgoing: dict[int, list[Transfer]] = {}
        incoming: dict[int, list[Transfer]] = {}
        for transfer in transfers:
            if transfer.source == rank:
                outgoing.setdefault(transfer.destination, []).append(transfer)
            if transfer.destination == rank:
                incoming.setdefault(transfer.source, []).append(transfer)
        sends = [Message(self._pack(chosen), peer) for peer, chosen in outgoing.items()]
        receives = [Message(self._buffer(chosen), peer) for peer, chosen in incoming.items()]
        started = start_send_recv(sends, receives, group=self._world)
        for chosen, work in zip(incoming.values(), started.received, strict=True):
            self._unpack(work.wait(), chosen, targets=targets)
        started.sent.wait()

    def _buffer(self, transfers: Iterable[Transfer]) -> Tensor:
        """Memory for the bytes of some transfers."""
        nbytes = sum(transfer.nbytes for transfer in transfers)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _pack(self, transfers: Sequence[Transfer]) -> Tensor:
        """The bytes of some transfers, one after the other."""
        buffer = self._buffer(transfers)
        start = 0
        for transfer in transfers:
            region = self._source(transfer).contiguous()
            stop = start + transfer.nbytes
            buffer[start:stop].copy_(region.view(-1).view(torch.uint8))
            start = stop
        return buffer

    def _unpack(self, buffer: Tensor, transfers: Iterable[Transfer], *, targets: Tensors) -> None:
        """Copy received bytes into the targets."""
        start = 0
        for transfer in transfers:
            stop = start + transfer.nbytes
            # a copy: the dtype of a view needs an aligned start
            values = buffer[start:stop].clone().view(self._dtypes[transfer.held.name])
            _region(transfer, targets).copy_(values.view(transfer.box.shape))
            start = stop

    def _source(self, transfer: Transfer) -> Tensor:
        """The elements of a transfer in the tensor that this rank holds."""
        held = transfer.held
        return self._tensors[held][transfer.box.within(held.box).slices()]


def _region(transfer: Transfer, targets: Tensors) -> Tensor:
    """The elements of a transfer in the target of this rank."""
    wanted = transfer.wanted
    return targets[wanted].detach()[transfer.box.within(wanted.box).slices()]


def _entries(held: Iterable[Mapping[TensorBox, str]]) -> dict[str, TensorEntry]:
    """Shape and dtype of every tensor that some rank holds, by name."""
    entries: dict[str, TensorEntry] = {}
    for dtype_of_box in held:
        for box, dtype in dtype_of_box.items():
            entries.setdefault(box.name, TensorEntry(box.shape, dtype, ()))
    return entries


def _traffic_of(
    plan: TransferPlan, num_ranks: int, *, num_rounds: int, begun: float
) -> RestoreTraffic:
    """The traffic of a plan that was carried out."""
    return RestoreTraffic(
        sent_bytes=plan.sent_bytes,
        kept_bytes=sum(transfer.nbytes for transfer in plan.kept),
        most_sent_bytes=max(plan.sent_by(num_ranks)),
        most_received_bytes=max(plan.received_by(num_ranks)),
        num_rounds=num_rounds,
        seconds=time.perf_counter() - begun,
    )
