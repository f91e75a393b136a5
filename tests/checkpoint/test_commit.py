"""Reports of all ranks become one manifest, or one error; through files they wait for each other, but not for ever."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanotrain.checkpoint.commit import (
    merge_reports,
    report_of,
    report_path,
    wait_for_reports,
    write_failure,
    write_report,
)
from nanotrain.checkpoint.manifest import Manifest
from nanotrain.checkpoint.write import shard_name, write_shard
from nanotrain.errors import CheckpointError
from nanotrain.spec.boxes import Box, TensorBox

MANIFEST = Manifest(3, {}, {}, objects={"seen": 1}, config={}, topology={})


def reports(folder: Path, size: int = 2) -> list:
    """One row of a tensor per rank, written."""
    boxes = [TensorBox("model/w", (size, 4), Box((rank, 0), (rank + 1, 4))) for rank in range(size)]
    return [
        report_of(write_shard(folder / shard_name(rank, size), {box: torch.full((1, 4), float(rank))}), MANIFEST)
        for rank, box in enumerate(boxes)
    ]


def test_the_merged_manifest_has_the_files_and_chunks_of_all_ranks(tmp_path: Path) -> None:
    nothing = {TensorBox("model/w", (2, 4), Box((2, 0), (2, 4))): torch.empty(0, 4)}
    empty = report_of(write_shard(tmp_path / "of a third rank", nothing), MANIFEST)
    merged = merge_reports(MANIFEST, [*reports(tmp_path), empty])
    assert [chunk.file for chunk in merged.tensors["model/w"].chunks] == [shard_name(0, 2), shard_name(1, 2)]
    assert dict(merged.files) == {path.name: path.stat().st_size for path in tmp_path.iterdir()}


def test_ranks_that_save_different_things_are_refused(tmp_path: Path) -> None:
    first, second = reports(tmp_path)
    with pytest.raises(CheckpointError, match="rank 1 saves step 4, rank 0 step 3"):
        merge_reports(MANIFEST, [first, replace(second, step=4)])
    with pytest.raises(CheckpointError, match="rank 1 saves other objects than rank 0"):
        merge_reports(MANIFEST, [first, replace(second, objects_crc32=0)])
    with pytest.raises(CheckpointError, match="written 2 times|written by no rank"):
        merge_reports(MANIFEST, [first, first])


def test_reports_through_files_are_those_written_and_leave_nothing(tmp_path: Path) -> None:
    written = reports(tmp_path)
    shards = sorted(path.name for path in tmp_path.iterdir())
    later = threading.Timer(0.1, write_report, (tmp_path, written[0]), {"index": 0})
    later.start()
    write_report(tmp_path, written[1], index=1)

    assert wait_for_reports(tmp_path, 2, timeout_s=30, is_cancelled=lambda: False) == written
    assert sorted(path.name for path in tmp_path.iterdir()) == shards


def test_the_failure_of_a_rank_and_a_rank_that_never_reports_are_errors_with_its_number(tmp_path: Path) -> None:
    write_failure(tmp_path, OSError(28, "No space left on device"), index=1)
    with pytest.raises(OSError, match="rank 1 could not write: .*No space left"):
        wait_for_reports(tmp_path, 2, timeout_s=30, is_cancelled=lambda: False)
    report_path(tmp_path, 1).unlink()
    with pytest.raises(OSError, match="rank 0, 1 of 2 did not finish writing within 0.05 s"):
        wait_for_reports(tmp_path, 2, timeout_s=0.05, is_cancelled=lambda: False)
    with pytest.raises(OSError, match="rank 0, 1 of 2"):
        wait_for_reports(tmp_path, 2, timeout_s=30, is_cancelled=lambda: True)
