"""Folders of runs in a memory file system: those of dead runs are removed, others are not touched."""

import os
import time
from pathlib import Path

import pytest

from nanotrain.checkpoint.host_folder import (
    DEAD_S,
    IN_USE,
    host_root,
    in_use,
    remove_dead,
    remove_folder,
    run_key,
)
from nanotrain.errors import EnvironmentFault


def test_folders_of_dead_runs_are_removed_and_of_running_ones_are_not(tmp_path: Path) -> None:
    root = host_root(tmp_path, "a")
    mine = run_key("/runs/mine", "second start")
    ages = {
        mine: 0,
        run_key("/runs/mine", "first start"): 0,
        run_key("/runs/dead", "x"): DEAD_S + 60,
        run_key("/runs/restarting", "x"): DEAD_S - 60,
        run_key("/runs/running", "x"): DEAD_S + 60,
    }
    for name, age_s in ages.items():
        (root / name).mkdir()
        (root / name / IN_USE).touch()
        then = time.time() - age_s
        for path in (root / name / IN_USE, root / name):
            os.utime(path, (then, then))
    with in_use(root / run_key("/runs/running", "x")):
        removed = remove_dead(root, address="/runs/mine", key=mine)

    assert {path.name for path in removed} == {
        run_key("/runs/mine", "first start"),
        run_key("/runs/dead", "x"),
    }
    for path in root.iterdir():
        remove_folder(path)
    assert not any(tmp_path.iterdir())


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """Others may write to a memory file system: a link of theirs would be followed."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"nanotrain-{os.getuid()}").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(EnvironmentFault, match="it is no folder of user"):
        host_root(tmp_path, "a")


def test_a_file_system_that_is_missing_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="missing is no folder.*--memory-checkpoint-dir"):
        host_root(tmp_path / "missing", "a")
