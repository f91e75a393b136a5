"""What the command line of the checkpoint benchmark prints, and where it writes."""

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def test_the_stall_table_is_measured_in_the_folder_and_printed_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS"):  # set by the import, unless they are
        monkeypatch.setenv(name, "1" if name == "OMP_NUM_THREADS" else "PASSIVE")
    monkeypatch.syspath_prepend(str(FOLDER))  # scripts import each other by their names
    benchmark = importlib.import_module("benchmarks.checkpoint")
    arguments: list[object] = []

    def stall_table(mib: int, *, rounds: int, folder: Path | None = None) -> list[str]:
        arguments.extend((rounds, folder))
        return [f"stall row {row} of {mib} MiB" for row in range(20)]

    monkeypatch.setattr(benchmark, "stall_table", stall_table)
    monkeypatch.setattr(benchmark, "rows_of", lambda times, **_: ["a row"])
    monkeypatch.setattr(benchmark.mp, "spawn", lambda *_, **__: None)
    monkeypatch.setattr(benchmark.torch, "load", lambda _: None)
    line = [
        "checkpoint.py",
        "--ranks",
        "2",
        "--mib",
        "1",
        "--rounds",
        "3",
        "--folder",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", [*line, "--write", str(tmp_path / "table.md")])
    benchmark.main()
    assert arguments == [3, tmp_path]
    printed = capsys.readouterr().out
    for text in (printed, (tmp_path / "table.md").read_text()):
        assert (
            text.count("stall row") == 20
            and text.count("## Time for which a save stops training") == 1
        )
    assert printed.count("a row") == 1
