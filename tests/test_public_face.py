"""What `import nanotrain` gives and what it costs."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

import nanotrain


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_all_is_sorted_and_every_name_in_it_is_there():
    assert list(nanotrain.__all__) == sorted(nanotrain.__all__) == dir(nanotrain)
    for name in nanotrain.__all__:
        assert getattr(nanotrain, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no public name 'Trainerr'"):
        nanotrain.Trainerr  # noqa: B018


def test_the_face_fits_on_a_screen():
    assert len(Path(nanotrain.__file__).read_text().splitlines()) <= 40


def test_the_pure_rooms_come_without_torch():
    """Configuration and topology are what a planner on a laptop needs, and what `--help` waits for."""
    rooms = "nanotrain, nanotrain.cli, nanotrain.config.load, nanotrain.config.compose, nanotrain.topology.topology"
    loaded = run_python(f"import sys, {rooms}; nanotrain.load_config(['+config=tiny']); print(*sys.modules)").split()
    assert not {"torch", "numpy", "transformers", "wandb"} & set(loaded)


def test_import_is_quick():
    """Best of three: another process may hold the cores."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        run_python("import nanotrain")
        seconds.append(time.perf_counter() - began)
    assert min(seconds) < 1
