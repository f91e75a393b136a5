"""The run folder: writable, described, and its metrics truncated to the step a run resumes from."""

import json
import os

import pytest

from nanotrain.errors import EnvironmentFault
from nanotrain.runs.folder import RunFolder


def lines(*steps: int) -> str:
    return "".join(json.dumps({"step": step}) + "\n" for step in steps)


def test_a_folder_is_made_and_left_empty(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "new")
    folder.require_writable()
    assert folder.path.is_dir() and not list(folder.path.iterdir())


def test_a_folder_below_a_file_is_an_error_with_its_name(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match=r"file/run cannot be written.*train.run_dir"):
        RunFolder(tmp_path / "file" / "run").require_writable()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_an_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(EnvironmentFault, match="Permission denied"):
        RunFolder(tmp_path).require_writable()


def test_the_description_holds_configuration_and_environment(tmp_path):
    RunFolder(tmp_path).write_description("model: {}\n", {"world_size": 2})
    assert (tmp_path / "config.yaml").read_text() == "model: {}\n"
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["world_size"] == 2
    assert environment["packages"]["torch"] and environment["python"] and environment["command"]
    assert "git_revision" in environment


def test_metrics_of_steps_after_the_resumed_one_are_dropped(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text(lines(1, 2, 3, 4))
    folder.drop_metrics_after(2)
    assert folder.metrics.read_text() == lines(1, 2)
    folder.drop_metrics_after(0)
    assert folder.metrics.read_text() == ""


def test_a_line_truncated_by_a_crash_is_dropped(tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics.write_text(lines(1, 2) + '{"step": 3, "lo')
    folder.drop_metrics_after(3)
    assert folder.metrics.read_text() == lines(1, 2)


def test_missing_metrics_are_left_missing(tmp_path):
    RunFolder(tmp_path).drop_metrics_after(3)
    assert not list(tmp_path.iterdir())
