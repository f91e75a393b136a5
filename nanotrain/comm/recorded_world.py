"""Process groups that send nothing and record: one process is one rank of a world of any size.

    recorded_world    the context of a rank, whose operations are in flight until a wait

Values of other ranks are made up: numbers on the host are summed as if every rank had the same.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.comm.recorder import Call, InFlight, Recorder, unrecorded
from nanotrain.topology.topology import Topology

BACKEND = "recording"
_REDUCTIONS = ("SUM", "AVG", "MAX", "MIN")


@dataclass(frozen=True)
class Handle:
    """torch's `Work` of an operation in flight."""

    recorder: Recorder
    operation: InFlight

    def wait(self, *_: Any) -> bool:
        """Complete the operation."""
        self.recorder.complete(self.operation)
        return True


_ProcessGroup: Any = dist.ProcessGroup  # its signatures differ between versions of torch


class RecordingGroup(_ProcessGroup):
    """A recorded group, with the methods that torch.distributed calls."""

    recorder: Recorder
    ranks: tuple[int, ...]

    def allreduce(self, tensors: list[Tensor], options: Any) -> Handle:
        """All-reduce."""
        handle = self._start("all_reduce", tensors[0], outputs=tensors, reduction=options.reduceOp)
        if not tensors[0].is_meta:
            with unrecorded():
                tensors[0].mul_(self.size())
        return handle

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, *options: Any) -> Handle:
        """Reduce-scatter."""
        return self._start(
            "reduce_scatter",
            tensor,
            inputs=[tensor],
            outputs=[output],
            reduction=options[0].reduceOp,
        )

    def all_gather_single(self, output: Tensor, tensor: Tensor, *_: Any) -> Handle:
        """All-gather; an input inside the output is not written."""
        with unrecorded():
            slices, index = output.view(self.size(), -1), self.rank()
            is_in_place = output.untyped_storage()._cdata == tensor.untyped_storage()._cdata
            written = [slices[:index], slices[index + 1 :]] if is_in_place else [slices]
        return self._start(
            "all_gather",
            output,
            inputs=[tensor],
            outputs=[part for part in written if len(part)],
            gathered=output,
        )

    def all_to_all_single(self, output: Tensor, tensor: Tensor, *options: Any) -> Handle:
        """All-to-all of rows; the options begin with the numbers of rows received and sent."""
        splits = tuple(options[1]), tuple(options[0])
        return self._start("all_to_all", tensor, inputs=[tensor], outputs=[output], splits=splits)

    def send(self, tensors: list[Tensor], peer: int, *_: Any) -> Handle:
        """Send to an index in the group."""
        return self._start("send", tensors[0], inputs=tensors, peer=peer)

    def recv(self, tensors: list[Tensor], peer: int, *_: Any) -> Handle:
        """Receive from an index in the group."""
        return self._start("receive", tensors[0], outputs=tensors, peer=peer)

    # names of torch 2.10
    _reduce_scatter_base = reduce_scatter_single
    _allgather_base = all_gather_single
    alltoall_base = all_to_all_single

    def _get_backend(self, device: torch.device) -> "RecordingGroup":
        """The group itself, which batches no messages; torch 2.14 asks on every device."""
        return self

    def _start(
        self,
        op: str,
        whole: Tensor,
        *,
        inputs: Sequence[Tensor] = (),
        outputs: Sequence[Tensor] = (),
        reduction: Any = None,
        gathered: Tensor | None = None,
        **fields: Any,
    ) -> Handle:
        """Record the start of an operation.

        Args:
            op: its name.
            whole: the tensor whose size is listed.
            inputs, outputs: the memory that it reads and writes.
            reduction: how values are reduced.
            gathered: the whole output, where it contains the input; None for `outputs`.
            fields: further fields of the call.
        """
        operation = self.recorder.start(op, inputs=inputs, outputs=outputs)
        dtype = str(whole.dtype).removeprefix("torch.")
        size = dtype if fields.get("splits") else f"{whole.numel():,} {dtype}"
        size += "".join(
            f" {name.lower()}" for name in _REDUCTIONS if reduction == getattr(dist.ReduceOp, name)
        )
        call = Call(
            self.ranks, op, size, whole.nbytes, operation.started_at, self.recorder.moment, **fields
        )
        whole_outputs = outputs if gathered is None else [gathered]
        self.recorder.add_call(call, inputs=inputs, outputs=whole_outputs)
        return Handle(self.recorder, operation)


@contextmanager
def recorded_world(
    topology: Topology, rank: int, *, recorder: Recorder
) -> Iterator[ParallelContext]:
    """The context of one rank of a world, on the meta device.

    Args:
        topology: topology of the world.
        rank: rank that this process is.
        recorder: recorder of the rank.
    """

    def create(common: Any, options: Any) -> RecordingGroup:
        return RecordingGroup(common.group_rank, common.group_size)

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])
    dist.init_process_group(BACKEND, rank=rank, world_size=topology.world_size, store=HashStore())
    try:
        context = ParallelContext.attach(topology, timeout_s=1.0, device=torch.device("meta"))
        for group in (*context.groups.values(), context.control):
            if isinstance(group.process_group, RecordingGroup):
                group.process_group.recorder, group.process_group.ranks = recorder, group.ranks
        context.heartbeat.observer = recorder.observe
        yield context
    finally:
        dist.destroy_process_group()
