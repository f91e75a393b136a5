"""Too low a limit of open files is one error before a run starts, not a hang."""

import resource
from pathlib import Path

import pytest

from nanotrain.cli import main as cli
from nanotrain.errors import EnvironmentFault
from nanotrain.runs.open_files import require_open_files


@pytest.mark.parametrize(
    ("counts", "needed"), [({}, 64), ({"num_ranks": 2}, 72), ({"num_workers": 2}, 120), ({"num_workers": 4}, 144)]
)
def test_too_few_open_files_are_one_error_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch, counts: dict[str, int], needed: int
) -> None:
    for limit in (needed, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        require_open_files(**counts)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (needed - 1, needed))
    with pytest.raises(EnvironmentFault, match=f"may open {needed - 1} files: it needs {needed}, .*ulimit -n"):
        require_open_files(**counts)


@pytest.mark.parametrize("launcher", [[], ["--nproc-per-node", "2"]], ids=["alone", "launcher"])
def test_a_run_checks_its_open_files_before_it_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, launcher: list[str]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (28, 28))
    line = ["train", *launcher, "+config=tiny", "--mock-data", "--vocab-size", "64", "--run-dir", str(tmp_path / "run")]
    assert cli.main(line) == 2
    assert "a process may open 28 files" in capsys.readouterr().err and not (tmp_path / "run").exists()
