"""scripts/hostile_drill: it finds what it looks for, and a sample of it finds nothing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts import SCRIPTS, load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("hostile_drill")


def test_there_are_hundreds_of_cases_of_different_names(script: ModuleType) -> None:
    names = [case.name for case in script.all_cases()]
    assert len(names) == len(set(names)) > 700
    assert len({case.place for case in script.all_cases()}) > 20


def leak(folder: Path) -> list[str]:
    (folder / "written").write_text(os.environ["GH_PAT"])
    return ["--help"]


def look_up(folder: Path) -> list[str]:
    """A request that the drill records after the case is built: by a command of two words."""
    from nanotrain.cli import main as module

    def command(argv: object) -> int:
        import socket

        try:
            socket.getaddrinfo("evil.invalid", 80)
        except OSError:
            return 2
        return 0

    module.COMMANDS["report"] = command
    return ["report"]


def fail(folder: Path) -> list[str]:
    from nanotrain.cli import main as module

    def command(argv: object) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    module.COMMANDS["report"] = command
    return ["report"]


def hang(folder: Path) -> list[str]:
    from nanotrain.cli import main as module

    module.COMMANDS["report"] = lambda argv: time.sleep(60) or 0
    return ["report"]


@pytest.mark.parametrize(
    ("build", "column"),
    [(leak, "leaks"), (look_up, "requests"), (fail, "tracebacks"), (hang, "hangs")],
)
def test_what_a_case_does_is_counted(
    build: Callable[[Path], list[str]],
    column: str,
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GH_PAT", script.CANARY)
    monkeypatch.setattr(script, "LIMIT_S", 5.0)
    (tmp_path / "good").mkdir()
    case = script.Case("test", build)
    outcome = script.run_case(case, tmp_path / "good", tmp_path / "case")
    counts = {name: getattr(outcome, name) for name in ("requests", "leaks", "tracebacks", "hangs")}
    assert counts == {**dict.fromkeys(counts, 0), column: 1}, outcome.text


def test_a_sample_of_the_drill_finds_nothing() -> None:
    finished = subprocess.run(
        [sys.executable, SCRIPTS / "hostile_drill", "--only", "manifest data", "--every", "15"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "| all | 3 | 0 | 0 | 0 | 0 |" in finished.stdout
