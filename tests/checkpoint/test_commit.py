"""Shards of all ranks become one manifest, or one error."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanotrain.checkpoint.commit import merge_shards
from nanotrain.checkpoint.manifest import Manifest
from nanotrain.checkpoint.write import shard_name, write_shard
from nanotrain.errors import CheckpointError
from nanotrain.spec.boxes import Box, TensorBox

MANIFEST = Manifest(3, {}, {}, objects={"seen": 1}, config={}, topology={})


def shards(folder: Path, size: int = 2) -> list[Manifest]:
    """One row of a tensor per rank, written."""
    boxes = [TensorBox("model/w", (size, 4), Box((rank, 0), (rank + 1, 4))) for rank in range(size)]
    return [
        write_shard(
            folder / shard_name(rank, size),
            {box: torch.full((1, 4), float(rank))},
            manifest=MANIFEST,
        )
        for rank, box in enumerate(boxes)
    ]


def test_the_merged_manifest_has_the_files_and_chunks_of_all_ranks(tmp_path: Path) -> None:
    nothing = {TensorBox("model/w", (2, 4), Box((2, 0), (2, 4))): torch.empty(0, 4)}
    empty = write_shard(tmp_path / "of a third rank", nothing, manifest=MANIFEST)
    merged = merge_shards(MANIFEST, [*shards(tmp_path), empty])
    assert [chunk.file for chunk in merged.tensors["model/w"].chunks] == [
        shard_name(0, 2),
        shard_name(1, 2),
    ]
    assert dict(merged.files) == {path.name: path.stat().st_size for path in tmp_path.iterdir()}


def test_ranks_that_save_different_things_are_refused(tmp_path: Path) -> None:
    first, second = shards(tmp_path)
    with pytest.raises(CheckpointError, match="rank 1 saves step 4, rank 0 step 3"):
        merge_shards(MANIFEST, [first, replace(second, step=4)])
    with pytest.raises(CheckpointError, match="rank 1 saves other objects than rank 0"):
        merge_shards(MANIFEST, [first, replace(second, objects={"seen": 2})])
    with pytest.raises(CheckpointError, match="written 2 times|written by no rank"):
        merge_shards(MANIFEST, [first, first])


def test_tensors_that_are_not_finite_on_any_rank_are_recorded(tmp_path: Path) -> None:
    first, second = shards(tmp_path)
    for of_first, of_second in ((("a",), ("b", "c")), (("a", "b"), ()), ((), ("c",))):
        merged = merge_shards(
            MANIFEST, [replace(first, not_finite=of_first), replace(second, not_finite=of_second)]
        )
        assert merged.not_finite == (*of_first, *of_second)
