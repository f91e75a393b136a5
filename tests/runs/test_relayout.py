"""Layouts of a running job: which flags change them, requests, and the record at a later start."""

from dataclasses import replace
from pathlib import Path

import pytest

from nanotrain.config.load import Loaded, load
from nanotrain.errors import ConfigError
from nanotrain.runs.relayout import (
    DONE,
    REQUEST,
    changed_keys,
    read_request,
    record_layout,
    remove_request,
    request_layout,
    with_layout,
    with_recorded_layout,
)

LINE = "+config=tiny --mock-data --vocab-size 64"
TP2 = ["--tensor-model-parallel-size", "2"]


def loaded(folder: Path, more: str = "") -> Loaded:
    return load([*f"{LINE} {more}".split(), f"train.run_dir={folder}"])


def test_a_layout_changes_its_keys_alone(tmp_path: Path) -> None:
    config = loaded(tmp_path).config
    changed = with_layout(config, [*TP2, "--micro-batch-size", "4"], world_size=2)
    assert changed_keys(config, changed) == {
        "parallel.tensor_model_parallel_size": (1, 2),
        "train.micro_batch_size": (config.train.micro_batch_size, 4),
    }
    back = with_layout(changed, ["--tensor-model-parallel-size", "1"], world_size=2)
    assert changed_keys(config, back).keys() == {"train.micro_batch_size"}


def test_all_mistakes_are_one_error(tmp_path: Path) -> None:
    config = loaded(tmp_path).config
    with pytest.raises(ConfigError, match=r"(?s)--lr 1 is no setting.*--seed 3 is no setting"):
        with_layout(config, ["--lr", "1", "--seed", "3"], world_size=2)
    with pytest.raises(ConfigError, match="cannot be shared by tp=3 ranks"):
        with_layout(config, ["--tensor-model-parallel-size", "3"], world_size=2)
    with pytest.raises(ConfigError):
        with_layout(config, ["--tensor-model-parallel-size", "many"], world_size=2)


def test_a_run_with_checkpoints_in_memory_keeps_its_layout(tmp_path: Path) -> None:
    config = loaded(tmp_path, "--memory-checkpoint-interval 5").config
    with pytest.raises(ConfigError, match="memory-checkpoint-interval keeps its layout"):
        with_layout(config, TP2, world_size=2)


def test_a_request_is_read_and_removed_unless_it_was_replaced(tmp_path: Path) -> None:
    assert read_request(tmp_path) is None
    request_layout(tmp_path, TP2, ranks=None)
    first = read_request(tmp_path)
    assert first is not None and first.arguments == tuple(TP2) and first.ranks is None
    request_layout(tmp_path, TP2, ranks=3)
    remove_request(tmp_path, first)
    second = read_request(tmp_path)
    assert second is not None and second.ranks == 3
    remove_request(tmp_path, second)
    assert read_request(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", '{"arguments": 3}', '{"arguments": [], "ranks": 0}'])
def test_a_request_written_by_hand_that_cannot_be_read_is_removed(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / REQUEST).write_text(text)
    with pytest.raises(ConfigError, match="use `nanotrain relayout`"):
        read_request(tmp_path)
    assert read_request(tmp_path) is None


def record(folder: Path, before: Loaded, flags: str, *, step: int) -> Loaded:
    """Record a relayout of a run, as it does; returns the configuration after it."""
    config = with_layout(before.config, flags.split(), world_size=4)
    record_layout(folder, {"step": step}, before=before.config, after=config)
    return replace(before, config=config)


def test_a_later_start_has_the_layout_of_the_run(tmp_path: Path) -> None:
    start = loaded(tmp_path)
    assert with_recorded_layout(start, 4) is start
    second = record(tmp_path, start, "--tensor-model-parallel-size 2", step=3)
    third = record(tmp_path, second, "--tensor-model-parallel-size 4", step=5)
    resumed = with_recorded_layout(start, 4)
    assert resumed.config == third.config
    assert resumed.notes == (
        "the layout is that of the relayout at step 5: parallel.tensor_model_parallel_size 4",
    )
    assert resumed.origins["parallel.tensor_model_parallel_size"].endswith("relayout at step 5")


@pytest.mark.parametrize(
    ("more", "world_size", "why"),
    [
        ("--tensor-model-parallel-size 4", 4, "has another parallel.tensor_model_parallel_size"),
        ("", 3, "3"),
    ],
)
def test_another_command_line_or_number_of_ranks_wins(
    tmp_path: Path, more: str, world_size: int, why: str
) -> None:
    record(tmp_path, loaded(tmp_path), "--tensor-model-parallel-size 2", step=3)
    start = loaded(tmp_path, more)
    resumed = with_recorded_layout(start, world_size)
    assert resumed.config == start.config
    (note,) = resumed.notes
    assert note.startswith("the layout of the command line is used") and why in note


def test_relayouts_from_before_a_command_line_that_won_are_left_out(tmp_path: Path) -> None:
    record(tmp_path, loaded(tmp_path), "--tensor-model-parallel-size 2", step=3)
    won = loaded(tmp_path, "--pipeline-model-parallel-size 2")
    last = record(tmp_path, won, "--pipeline-model-parallel-size 1", step=5)
    assert with_recorded_layout(won, 4).config == last.config  # without tensor parallelism
    (note,) = with_recorded_layout(loaded(tmp_path), 4).notes
    assert "has another parallel.pipeline_model_parallel_size than the run had then" in note


@pytest.mark.parametrize("row", ["{}", '{"layout_before": {}, "changed": {"lr": 1}}'])
def test_a_damaged_record_is_a_note(tmp_path: Path, row: str) -> None:
    (tmp_path / DONE).write_text(row + "\n")
    start = loaded(tmp_path)
    resumed = with_recorded_layout(start, 4)
    assert resumed.config == start.config
    assert "the layout of the command line is used" in resumed.notes[0]


def test_a_new_run_in_the_folder_does_not_read_the_record(tmp_path: Path) -> None:
    record(tmp_path, loaded(tmp_path), "--tensor-model-parallel-size 2", step=3)
    start = loaded(tmp_path, "--no-auto-resume")
    assert with_recorded_layout(start, 4) is start
