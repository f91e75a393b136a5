"""The folders of a run in memory belong to its run folder and to its first start."""

import json
from pathlib import Path

from nanotrain.checkpoint.run_memory import RunMemory
from nanotrain.comm.group import Group
from nanotrain.runs.folder import RunFolder


def test_a_run_has_a_folder_from_its_first_step_on(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "run").mkdir()
    folder = RunFolder(tmp_path / "run")
    memory = RunMemory(folder, tmp_path / "memory", control=Group.single_rank("control"))
    assert memory.open() is None and memory.start_steps() == []

    rows = [json.dumps({"step": step}) for step in (0, 7)]
    (tmp_path / "run" / "starts.jsonl").write_text("\n".join([*rows, "half a r"]))

    opened = memory.open()
    assert opened is not None and opened.folder.is_dir() and opened.is_host_first
    assert memory.start_steps() == [0, 7]
    memory.close()
    again = RunMemory(folder, tmp_path / "memory", control=Group.single_rank("control")).open()
    assert again is not None and again.folder == opened.folder
