"""`nanotrain parity`: which comparison the arguments ask for, and its exit code."""

from types import SimpleNamespace
from typing import Any

import pytest

from nanotrain.cli.main import main
from nanotrain.cli.parity import parity
from nanotrain.parity import by_perturbation, check
from nanotrain.prove import check as proof


@pytest.mark.parametrize("holds", [True, False])
@pytest.mark.parametrize("keeps_precision", [True, False])
def test_the_flag_chooses_the_judge(
    keeps_precision: bool,
    holds: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls: list[dict[str, Any]] = []
    report = SimpleNamespace(holds=holds, text=lambda: "a table", to_json=lambda: "{}")

    def compare(loaded: Any, world_size: int, **options: Any) -> SimpleNamespace:
        calls.append({"dtype": loaded.config.precision.params_dtype, "ranks": world_size} | options)
        return report

    judge = (
        (by_perturbation, "check_by_perturbation") if keeps_precision else (check, "check_parity")
    )
    monkeypatch.setattr(*judge, compare)
    monkeypatch.setattr(proof, "verdict", lambda loaded, world_size: [f"proved {world_size}"])
    line = ["--world-size", "2", "+config=tiny", "--params-dtype", "bf16"]
    if keeps_precision:
        line.append("--keep-precision")
    assert parity(line) == (0 if holds else 2)
    assert capsys.readouterr().out == "a table\nproved 2\n"
    expected = {"dtype": "bf16", "ranks": 2, "num_steps": 3}
    assert calls == [expected if keeps_precision else expected | {"tolerance": 1e-5}]
    assert parity([*line, "--json"]) == (0 if holds else 2)
    assert capsys.readouterr().out == "{}\n"


@pytest.mark.parametrize("judge", ["--invariant", "--keep-precision"])
def test_a_tolerance_that_nothing_is_judged_by_is_refused(
    judge: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["parity", "--world-size", "2", "+config=tiny", judge]
    assert main([*line, "--tolerance", "1e-5"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --tolerance 1e-05 has no effect with {judge}: ")
    assert error.endswith("; leave --tolerance out\n")
