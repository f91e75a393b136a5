"""The run folder: writable and described."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from nanotrain.errors import EnvironmentFault
from nanotrain.runs import folder
from nanotrain.runs.folder import RunFolder
from nanotrain.runs.lock import lock_run


def test_a_folder_is_made_and_left_empty(tmp_path):
    made = RunFolder(tmp_path / "runs" / "new")
    made.require_writable()
    assert made.path.is_dir() and not list(made.path.iterdir())


def test_a_check_creates_nothing(tmp_path):
    RunFolder(tmp_path / "runs" / "new").check_writable()
    assert not list(tmp_path.iterdir())


def test_ranks_check_a_folder_at_the_same_time(tmp_path):
    with ThreadPoolExecutor(8) as ranks:
        list(ranks.map(lambda _: RunFolder(tmp_path / "run").require_writable(), range(800)))
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "report.html"])
def test_files_of_others_are_refused_and_those_of_a_run_are_not(tmp_path, name):
    RunFolder(tmp_path).require_own()
    (tmp_path / "notes.txt").write_text("mine")
    RunFolder(tmp_path).require_own()
    (tmp_path / name).write_text("mine")
    with pytest.raises(
        EnvironmentFault, match=f"{name} exists and was not written by nanotrain.*--run-dir"
    ):
        RunFolder(tmp_path).require_own()
    with lock_run(tmp_path):
        RunFolder(tmp_path).require_own()


def test_a_folder_below_a_file_is_an_error_with_its_name(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match=r"file/run cannot be written.*--run-dir"):
        RunFolder(tmp_path / "file" / "run").require_writable()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("probes", [True, False])
def test_a_folder_without_permission_is_an_error(tmp_path, probes):
    tmp_path.chmod(0o500)
    with pytest.raises(EnvironmentFault, match="Permission denied"):
        RunFolder(tmp_path).require_writable(probes=probes)


def test_without_probes_no_file_is_written_and_a_file_in_the_way_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "NamedTemporaryFile", None)
    RunFolder(tmp_path / "run").require_writable(probes=False)
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match=r"file/run cannot be written.*--run-dir"):
        RunFolder(tmp_path / "file" / "run").require_writable(probes=False)


def test_the_description_holds_configuration_and_environment(tmp_path):
    RunFolder(tmp_path).write_description("model: {}\n", {"world_size": 2})
    assert (tmp_path / "config.yaml").read_text() == "model: {}\n"
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["world_size"] == 2
    assert environment["packages"]["torch"] and environment["python"] and environment["command"]
    assert "git_revision" in environment


def test_a_start_is_a_line_with_the_settings_that_changed(tmp_path):
    folder, texts = (
        RunFolder(tmp_path),
        ["a: {b: 1, c: 2020-01-01}\n", "a: {b: 2, c: 2020-01-01}\n"],
    )
    for step, text in enumerate([texts[0], *texts]):
        folder.add_start(text, step=step, world_size=2)
        folder.write_description(text, {})
    (tmp_path / "config.yaml").write_text("{")  # damaged
    folder.add_start(texts[0], step=3, world_size=1)
    starts = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert [start["changed"] for start in starts] == [{}, {}, {"a.b": [1, 2]}, {}]
    assert [(start["step"], start["world_size"]) for start in starts] == [
        (0, 2),
        (1, 2),
        (2, 2),
        (3, 1),
    ]


def test_values_that_nobody_set_are_no_changed_settings(tmp_path):
    folder = RunFolder(tmp_path)
    first = {"a.b": "default", "a.c": "command line: --c 1"}
    folder.add_start("a: {b: 1, c: 1}\n", step=0, world_size=1, origins=first)
    folder.write_description("a: {b: 1, c: 1}\n", {"origins": first})
    # b follows from something else, c is left out again, d is new in this version
    second = {"a.b": "default, not 2: no use", "a.c": "default", "a.d": "default", "a.e": "x.yaml"}
    folder.add_start("a: {b: 3, c: 2, d: 4, e: 5}\n", step=1, world_size=1, origins=second)
    starts = [json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines()]
    assert starts[1]["changed"] == {"a.c": [1, 2], "a.e": [None, 5]}
