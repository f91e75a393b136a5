"""The layout of a run: a grid of ranks, groups of several ranks, the schedule."""

import re
from pathlib import Path
from typing import Any

import pytest

from nanotrain.report.history import RunHistory
from nanotrain.report.layout import layout_html
from tests.report.runs import write_run


def html_of(folder: Path, world_size: int, **parallel: Any) -> str:
    config = {"train": {"train_iters": 4, "global_batch_size": 8}, "parallel": parallel}
    run = RunHistory.read(write_run(folder / "run", steps=1, config=config))
    run.environment["world_size"] = world_size
    return layout_html(run)


def rows_of(html: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", html)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]


def test_a_replica_is_a_row_and_its_ranks_are_columns(tmp_path: Path) -> None:
    html = html_of(tmp_path, 8, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert rows_of(html)[:5] == [
        ["ranks", "tp0", "tp1"],
        ["pp0 dp0", "0", "1"],
        ["pp0 dp1", "2", "3"],
        ["pp1 dp0", "4", "5"],
        ["pp1 dp1", "6", "7"],
    ]
    assert html.count('class="stage1"') == 4 and "<img " in html


def test_replicas_are_columns_where_each_is_one_rank_and_equal_groups_are_one_row(
    tmp_path: Path,
) -> None:
    assert rows_of(html_of(tmp_path, 3)) == [
        ["ranks", "dp0", "dp1", "dp2"],
        ["", "0", "1", "2"],
        ["groups", "number x ranks", "ranks"],
        ["dp, dp_cp, dp_replicate, world", "1 x 3", "[0 1 2]"],
    ]


def test_one_rank_has_no_groups_and_large_worlds_are_shortened(tmp_path: Path) -> None:
    assert "groups" not in html_of(tmp_path / "one", 1)
    header, first, *_ = rows_of(html_of(tmp_path, 1024))
    assert len(header) == 9 and first[-3:] == ["5", "..", "1023"]


@pytest.mark.parametrize("world_size", [0, 3, "many"])
def test_a_layout_that_is_none_is_left_out(tmp_path: Path, world_size: Any) -> None:
    assert html_of(tmp_path, world_size, tensor_model_parallel_size=2) == ""
