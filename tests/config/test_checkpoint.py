"""Settings of checkpoints: bounds, paths, and what a run does without any."""

from dataclasses import fields

import pytest

from nanotrain.config.checkpoint import CheckpointConfig
from nanotrain.config.load import load
from nanotrain.config.schema import KEYS
from nanotrain.errors import ConfigError

BASE = ["--mock-data", "--vocab-size", "300"]


def checkpoint(*words: str) -> CheckpointConfig:
    return load([*BASE, *words]).config.checkpoint


def test_a_run_saves_keeps_three_and_resumes_by_itself() -> None:
    assert checkpoint() == CheckpointConfig()
    default = CheckpointConfig()
    assert default.save and default.auto_resume and default.save_optim and default.load_optim
    assert (default.save_interval, default.keep_last, default.load) == (500, 3, None)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--no-save", "save", False),
        ("--save-interval 0", "save_interval", 0),
        ("--keep-last 0", "keep_last", 0),
        ("--save-retain-interval 1", "save_retain_interval", 1),
        ("--async-save", "async_save", True),
        ("--memory-checkpoint-interval 5", "memory_checkpoint_interval", 5),
        ("--memory-checkpoint-interval 5 --memory-checkpoint-dir m", "memory_checkpoint_dir", "m"),
        ("--no-save-optim", "save_optim", False),
        ("--no-auto-resume", "auto_resume", False),
    ],
)
def test_every_flag_sets_its_field(words: str, name: str, value: object) -> None:
    assert getattr(checkpoint(*words.split()), name) == value


@pytest.mark.parametrize(
    "words",
    [
        *("--save-interval -1", "--keep-last -1", "--save-retain-interval 0"),
        "--memory-checkpoint-interval -1",
    ],
)
def test_a_number_below_its_bound_is_refused(words: str) -> None:
    with pytest.raises(ConfigError, match="it must be at least"):
        checkpoint(*words.split())


def test_every_field_is_a_key_with_a_description() -> None:
    for field in fields(CheckpointConfig):
        assert KEYS[f"checkpoint.{field.name}"].help, field.name


@pytest.mark.parametrize("words", ["often", "2.5", ""])
def test_an_interval_of_memory_checkpoints_is_a_whole_number(words: str) -> None:
    with pytest.raises(ConfigError, match="memory_checkpoint_interval"):
        checkpoint(f"--memory-checkpoint-interval={words}")


def test_a_folder_of_memory_checkpoints_without_an_interval_has_no_effect() -> None:
    with pytest.raises(ConfigError, match="memory_checkpoint_dir = m has no effect"):
        checkpoint("--memory-checkpoint-dir", "m")
