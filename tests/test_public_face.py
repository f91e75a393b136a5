"""What `import nanotrain` gives and what it costs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import nanotrain


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_all_is_sorted_and_every_name_in_it_is_there():
    assert list(nanotrain.__all__) == sorted(nanotrain.__all__) == dir(nanotrain)
    for name in nanotrain.__all__:
        assert getattr(nanotrain, name).__name__.removeprefix("nanotrain.") == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no public name 'Trainerr'"):
        nanotrain.Trainerr  # noqa: B018


def test_the_face_fits_on_a_screen():
    assert len(Path(nanotrain.__file__).read_text().splitlines()) <= 60


def test_the_pure_rooms_come_without_torch():
    """Configuration and topology are what a planner on a laptop needs, and what `--help` waits for."""
    rooms = "nanotrain, nanotrain.cli.main, nanotrain.config.load, nanotrain.config.compose, nanotrain.topology.topology"
    loaded = run_python(
        f"import sys, {rooms}; nanotrain.load_config(['+config=tiny']); print(*sys.modules)"
    ).split()
    assert not {"torch", "transformers", "wandb"} & set(loaded)


def test_the_entry_from_python_comes_without_torch():
    code = "from nanotrain import Config, pretrain; import sys; print(callable(pretrain), 'torch' in sys.modules)"
    assert run_python(code).split() == ["True", "False"]


def test_import_is_quick():
    """In processor time of the child: a busy machine does not stretch it."""
    began = os.times()
    run_python("import nanotrain")
    ended = os.times()
    assert (
        ended.children_user + ended.children_system - began.children_user - began.children_system
        < 1
    )
