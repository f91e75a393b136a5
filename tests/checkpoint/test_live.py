"""The memory of ranks as the source of a restore, over threads and over gloo."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanotrain.checkpoint import live
from nanotrain.checkpoint.live import LiveCheckpoint
from nanotrain.checkpoint.manifest import Manifest
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.errors import CheckpointError
from nanotrain.spec.boxes import Box, TensorBox
from nanotrain.topology.topology import Topology
from tests.harness import parallel_config, run_ranks

SHAPE = (12, 5)
MANIFEST = Manifest(3, {}, {}, {"train": {"step": 3}}, {}, {})
DTYPES = {"main": torch.float32, "half": torch.bfloat16, "count": torch.int64}


def full(name: str) -> Tensor:
    """The global tensor."""
    return torch.arange(60).view(SHAPE).to(DTYPES[name]) + len(name)


def parts(num_parts: int, index: int) -> list[TensorBox]:
    """One of equal slabs of each tensor: of rows, or of the flat tensor in three boxes."""
    start, stop = index * 12 // num_parts, (index + 1) * 12 // num_parts
    boxes = [Box((start, 0), (stop, 5)), Box((start, 0), (stop, 3)), Box((start, 3), (stop, 5))]
    return [
        TensorBox("main", SHAPE, boxes[0]),
        *(TensorBox(name, SHAPE, box) for name in ("half", "count") for box in boxes[1:]),
    ]


def values(boxes: list[TensorBox]) -> dict[TensorBox, Tensor]:
    return {box: full(box.name)[box.box.slices()].clone() for box in boxes}


def empty(boxes: list[TensorBox]) -> dict[TensorBox, Tensor]:
    return {box: torch.zeros(box.box.shape, dtype=DTYPES[box.name]) for box in boxes}


def change(ctx: ParallelContext, before: int, after: int, limit: int) -> list[int]:
    """Ranks 0 to `before` - 1 hold the tensors, 0 to `after` - 1 get them, and leave the others."""
    live.ROUND_BYTES = limit
    held = values(parts(before, ctx.rank)) if ctx.rank < before else {}
    source = LiveCheckpoint(held, MANIFEST, device=torch.device("cpu"))
    everyone = ctx.rejoin(Topology.of(parallel_config(), after))
    source.connect(everyone.world, everyone.control)
    assert ctx.is_member is (ctx.rank < after)
    ctx.traffic.reset()
    if ctx.is_member:
        targets = empty(parts(after, ctx.rank))
        assert source.restore(Path(), targets).step == 3
        for box, tensor in targets.items():
            assert tensor.equal(full(box.name)[box.box.slices()]), box
        assert ctx.group("world").size == after
    else:
        source.leave()
    assert source.moved.sent_bytes + source.moved.kept_bytes == 60 * (4 + 2 + 8)
    sent = [ctx.traffic.bytes(op="p2p"), source.moved.sent_bytes, source.moved.num_rounds]
    if ctx.is_member:  # again, without those that have left
        ctx.rejoin(Topology.of(parallel_config(), after))
    return sent


@pytest.mark.parametrize(("before", "after"), [(4, 4), (4, 2), (2, 4), (3, 1), (4, 3)])
def test_boxes_of_any_layout_arrive(before: int, after: int) -> None:
    num_ranks = max(before, after)
    rows = run_ranks(num_ranks, change, before, after, 64 * 2**20)
    sent = {row[1] for row in rows}
    assert len(sent) == 1 and sum(row[0] for row in rows) == sent.pop()
    if before == after:
        assert all(row == [0, 0, 0] for row in rows)


def over_gloo(ctx: ParallelContext) -> None:
    """Several rounds, as no more than 40 bytes are sent at once."""
    _, sent, num_rounds = change(ctx, 2, 1, 40)
    assert sent == 30 * (4 + 2 + 8) and num_rounds > 1


def test_rounds_over_processes() -> None:
    run_ranks(2, over_gloo, threads=False)


def restore_other_model(ctx: ParallelContext) -> None:
    source = LiveCheckpoint(values(parts(2, ctx.rank)), MANIFEST, device=torch.device("cpu"))
    everyone = ctx.rejoin(ctx.topology)
    source.connect(everyone.world, everyone.control)
    other = TensorBox.full("main", (3, 5))
    with pytest.raises(CheckpointError, match=r"main is \[12, 5\] there, \[3, 5\] here"):
        source.restore(Path(), {other: torch.zeros(3, 5)} if ctx.rank else {})


def test_tensors_of_another_shape_are_refused_on_all_ranks_before_any_is_sent() -> None:
    run_ranks(2, restore_other_model)
