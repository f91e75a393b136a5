"""The summary that a run prints is read in every unit."""

import subprocess
from types import SimpleNamespace

import pytest

from benchmarks import planned_memory
from nanotrain.quantities import describe_bytes


@pytest.mark.parametrize(
    "planned, measured", [(890_400_000, 1_120_000_000), (4_200_000, 865_200_000)]
)
def test_planned_and_measured_gigabytes_are_read(
    planned: int, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = f"memory        planned {describe_bytes(planned)} per rank; measured at most {describe_bytes(measured)} above"
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=summary, stderr="")
    )
    found = planned_memory.Layout("1 rank", 1).run()
    assert found == (pytest.approx(planned / 1e9), pytest.approx(measured / 1e9))
