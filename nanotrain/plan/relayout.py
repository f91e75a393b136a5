"""The plan of a relayout of any number of ranks: what is sent, before there is a rank. Pure.

    state_boxes      the boxes of a rank's main params and optimizer state, with their bytes
    plan_relayout    from one layout to another: the transfers of all ranks

State of whole matrices and of step parts is left out: a row of numbers per matrix or layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from nanotrain.checkpoint.transfers import TransferPlan, plan_transfers, schedule_rounds
from nanotrain.config.config import Config
from nanotrain.optim.state import ShardPart
from nanotrain.plan.plan import Plan, plan_run
from nanotrain.precision.dtypes import Precision
from nanotrain.spec.boxes import Box, TensorBox

FP32_BYTES = 4


@dataclass(frozen=True)
class RelayoutPlan:
    """The transfers with which ranks go from one layout to another."""

    transfers: TransferPlan
    num_ranks: int  # of the larger layout
    state_bytes: tuple[int, ...]  # that each rank holds before

    @cached_property
    def sent_by(self) -> list[int]:
        """Bytes that each rank sends."""
        return self.transfers.sent_by(self.num_ranks)

    @cached_property
    def received_by(self) -> list[int]:
        """Bytes that each rank receives."""
        return self.transfers.received_by(self.num_ranks)

    @cached_property
    def num_rounds(self) -> int:
        """Rounds of bounded bytes per rank."""
        return len(schedule_rounds(self.transfers.sent))

    def most_between_nodes(self, gpus_per_node: int) -> int:
        """The most bytes that a rank sends to other nodes, or receives from them."""
        sent = [0] * self.num_ranks
        received = [0] * self.num_ranks
        for transfer in self.transfers.sent:
            if transfer.source // gpus_per_node != transfer.destination // gpus_per_node:
                sent[transfer.source] += transfer.nbytes
                received[transfer.destination] += transfer.nbytes
        return max([*sent, *received])


def state_boxes(plan: Plan) -> Iterator[tuple[TensorBox, int]]:
    """Boxes of parameters that a rank updates, and bytes per element of all that it keeps of them.

    The name is that of the parameter.
    """
    precision = Precision.of(plan.config.precision)
    for buffer in plan.buffers:
        for part in plan.parts_of(buffer):
            size = precision.params.itemsize
            if buffer.layout.is_trainable:
                size = _element_bytes(plan, part, precision=precision)
            for param_range in part.ranges:
                for box in param_range.boxes(param_range.name):
                    yield box, size


def _element_bytes(plan: Plan, part: ShardPart, *, precision: Precision) -> int:
    """Bytes of main param, state and average per element; fp16 with scales is sent as fp32."""
    names = part.state_names(plan.rule, plan.config.optim)
    size = sum(_sent_bytes(precision.state_dtype(name)) for name in names)
    if plan.config.optim.ema_decay is not None:
        size += FP32_BYTES
    if precision.has_separate_main_params:
        return size + _sent_bytes(precision.main)
    return size + precision.params.itemsize


def _sent_bytes(dtype: torch.dtype) -> int:
    return FP32_BYTES if dtype is torch.float16 else dtype.itemsize


def plan_relayout(before: Config, after: Config, *, ranks: tuple[int, int]) -> RelayoutPlan:
    """Plan the transfers of all ranks.

    Args:
        before: complete configuration with the layout that ranks have.
        after: the same with the layout that they get.
        ranks: numbers of ranks before and after.

    Raises:
        ConfigError, TopologyError: a layout that does not fit the model or the ranks.
    """
    num_ranks = max(ranks)
    element_bytes: dict[str, int] = {}
    held: list[list[TensorBox]] = [[] for _ in range(num_ranks)]
    wanted: list[list[TensorBox]] = [[] for _ in range(num_ranks)]
    state_bytes = [0] * num_ranks
    for config, world_size, boxes in ((before, ranks[0], held), (after, ranks[1], wanted)):
        for rank in range(world_size):
            for box, size in state_boxes(plan_run(config, world_size, rank=rank)):
                boxes[rank].append(box)
                element_bytes[box.name] = size
                if boxes is held:
                    state_bytes[rank] += size * box.box.numel
    transfers = plan_transfers(
        held, _without_unheld_padding(held, wanted), element_bytes=element_bytes
    )
    return RelayoutPlan(transfers, num_ranks, tuple(state_bytes))


def _without_unheld_padding(
    held: list[list[TensorBox]], wanted: list[list[TensorBox]]
) -> list[list[TensorBox]]:
    """The wanted boxes without rows of padding that no rank holds.

    The vocabulary is padded to a multiple of the tensor-parallel size.
    """
    shapes = {box.name: box.shape for boxes in held for box in boxes}
    fitted = []
    for boxes in wanted:
        inside = []
        for box in boxes:
            shared = box.box.intersect(Box.full(shapes[box.name]))
            if shared is not None:
                inside.append(TensorBox(box.name, shapes[box.name], shared))
        fitted.append(inside)
    return fitted
