"""Many ranks: any number of ranks reads what any other wrote; an error on one rank is raised on
all, and none hangs.
"""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from nanotrain.checkpoint import checkpointer as checkpointer_module
from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.checkpoint.read import read_global_tensors
from nanotrain.checkpoint.store import complete_checkpoints, read_manifest
from nanotrain.comm.collectives import barrier
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.errors import NanotrainError, StorageFault
from nanotrain.spec.boxes import Box, TensorBox, flat_range_to_boxes
from tests.harness import ranks, run_ranks

SHAPES = {
    "model/up": (7, 5),
    "optimizer/exp_avg/up": (7, 5),
    "model/norm": (3,),
    "model/deep": (2, 3, 4),
}


def truth(name: str) -> torch.Tensor:
    return torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(len(name)))


def shares(rank: int, size: int) -> dict[TensorBox, torch.Tensor]:
    """Shards as of ZeRO: a flat range of every tensor per rank, up to five boxes; the last ranks
    may get none.
    """
    boxes = {}
    for name, shape in SHAPES.items():
        tensor = truth(name)
        step = -(-tensor.numel() // size)
        start, stop = min(rank * step, tensor.numel()), min((rank + 1) * step, tensor.numel())
        for box in flat_range_to_boxes(shape, start=start, stop=stop):
            boxes[TensorBox(name, shape, box)] = tensor[box.slices()].clone()
    return boxes


def checkpointer(ctx: ParallelContext, folder: str) -> Checkpointer:
    return Checkpointer(Path(folder), group=ctx.control, timeout_s=60.0)


def save(ctx: ParallelContext, folder: str, step: int) -> str:
    mine = shares(ctx.rank, ctx.topology.world_size)
    return str(
        checkpointer(ctx, folder).save(step, mine, objects={"step": step}, config={}, topology={})
    )


def load_and_save(ctx: ParallelContext, folder: str, step: int) -> bool:
    own = checkpointer(ctx, folder)
    truths = shares(ctx.rank, ctx.topology.world_size)
    targets = {box: torch.zeros_like(tensor) for box, tensor in truths.items()}
    path = own.latest()
    assert path is not None
    manifest = own.restore(path, targets)
    own.save(step, targets, objects=manifest.objects, config={}, topology={})
    return all(torch.equal(targets[box], tensor) for box, tensor in truths.items())


def save_with_little_space(ctx: ParallelContext, folder: str) -> None:
    usage = shutil.disk_usage(folder)._replace(free=300)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(StorageFault, match="a checkpoint needs 388 bytes"):
            save(ctx, folder, 1)
        barrier(ctx.control)  # the other rank may still read it


def test_space_is_needed_for_the_shards_of_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, save_with_little_space, str(tmp_path))


@pytest.mark.parametrize("first, second", [(1, 3), (4, 1), (3, 4), (2, 2)])
def test_save_on_one_number_of_ranks_load_on_another_save_gives_the_same_global_tensors(
    tmp_path: Path, first: int, second: int
) -> None:
    folder = str(tmp_path / "checkpoints")

    paths = run_ranks(first, save, folder, 1, shares=True)
    same = run_ranks(second, load_and_save, folder, 2, shares=True)

    assert len(set(paths)) == 1
    assert all(same)
    for path in complete_checkpoints(Path(folder)):
        for name, tensor in read_global_tensors(path, SHAPES):
            assert torch.equal(tensor, truth(name))
    assert read_manifest(complete_checkpoints(Path(folder))[1]).objects == {"step": 1}


def fail_on_one(ctx: ParallelContext, folder: str, what: str) -> str:
    """Save or restore with a fault on rank 1 only; the error that each rank raises."""
    own = checkpointer(ctx, folder)
    mine = shares(ctx.rank, ctx.topology.world_size)
    targets = {box: torch.zeros_like(tensor) for box, tensor in mine.items()}
    path = Path(folder) / "step-00000001"
    if ctx.rank == 1 and what.startswith("full disk"):
        os.pwrite = _full  # type: ignore[assignment]  this process serves one test only
    if what == "no report in the background":
        _write_nothing_of_rank_1(ctx)
    if ctx.rank == 1 and what == "twice":
        mine[TensorBox("model/norm", (3,), Box((0,), (1,)))] = torch.zeros(1)
    if ctx.rank == 1 and what == "other objects":
        own.save = lambda *args, **options: Checkpointer.save(
            own, *args, **(options | {"objects": {"a": 1}})
        )  # type: ignore
    if ctx.rank == 1 and what == "other shape":
        targets[TensorBox.full("model/norm", (4,))] = torch.zeros(4)
    if ctx.rank == 1 and what == "bug":
        mine[TensorBox.full("model/meta", (1,))] = torch.zeros(1, device="meta")
    try:
        if what.endswith("in the background"):
            for step in (2, 3):
                own.start_save(step, mine, objects={}, config={}, topology={})
        elif what in ("damaged", "other shape"):
            own.restore(path, targets)
        else:
            own.save(2, mine, objects={}, config={}, topology={})
    except (NanotrainError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _write_nothing_of_rank_1(ctx: ParallelContext) -> None:
    """Rank 1 can write neither its shard nor, at its end, why; ranks are threads, so the first one
    patches for both.
    """
    real = checkpointer_module.write_shard

    def write_shard(path: Path, *args: Any, **options: Any) -> Any:
        if path.name.startswith("shard-00001"):
            _full()
        return real(path, *args, **options)

    def write_failure(folder: Path, error: Exception, *, index: int) -> None:
        raise StorageFault("the report cannot be written either")

    if ctx.rank == 0:
        checkpointer_module.write_shard = write_shard  # type: ignore[assignment]
        checkpointer_module.write_failure = write_failure
    barrier(ctx.control)


def _full(*_: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    "what, kind, message",
    [
        ("full disk", "StorageFault", "No space left on device"),
        ("full disk in the background", "StorageFault", "No space left on device"),
        ("no report in the background", "StorageFault", "No space left on device"),
        ("twice", "CheckpointError", "written 2 times"),
        ("other objects", "CheckpointError", "rank 1 saves other objects than rank 0"),
        ("damaged", "DamagedCheckpoint", "model/deep@0:1,0:3,0:4 is damaged (on rank 0 of 2)"),
        ("other shape", "CheckpointError", "model/norm is [3] there, [4] here"),
    ],
)
def test_a_failure_on_one_rank_is_the_same_error_on_all_and_older_checkpoints_stay(
    tmp_path: Path, what: str, kind: str, message: str
) -> None:
    folder = tmp_path / "checkpoints"
    (path,) = set(run_ranks(2, save, str(folder), 1))
    if what == "damaged":
        _flip(Path(path), "model/deep@0:1,0:3,0:4")

    errors = run_ranks(2, fail_on_one, str(folder), what)

    assert len(set(errors)) == 1, errors
    assert errors[0].startswith(kind) and message in errors[0]
    assert [entry.name for entry in folder.iterdir()] == ["step-00000001"]


def test_an_unforeseen_error_on_one_rank_stops_the_others_too(tmp_path: Path) -> None:
    errors = run_ranks(2, fail_on_one, str(tmp_path), "bug")

    assert "meta" in errors[1]
    assert errors[0].startswith("RuntimeError") and errors[1].split(": ", 1)[1][:40] in errors[0]
    assert not list(tmp_path.iterdir())


def _flip(path: Path, key: str) -> None:
    entries = read_manifest(path).tensors.values()
    chunk = next(chunk for entry in entries for chunk in entry.chunks if chunk.key == key)
    file = path / chunk.file
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    offset = json.loads(content[8 : 8 + length])[key]["data_offsets"][0]
    content[8 + length + offset] ^= 1
    file.write_bytes(content)


@ranks(3)
def test_every_rank_finds_the_same_checkpoint(ctx: ParallelContext, tmp_path: Path) -> None:
    own = checkpointer(ctx, str(tmp_path))

    assert own.latest() is None
    path = save(ctx, str(tmp_path), 4)
    assert str(own.latest()) == path
