"""`nanotrain prove`: what it prints, its exit codes, and what it refuses."""

import pytest

from nanotrain.cli.main import main
from nanotrain.prove.seams import Seams

TINY = ["prove", "+config=tiny", "--vocab-size", "512", "--world-size"]


def test_a_layout_is_proved(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "2"]) == 0
    output = capsys.readouterr().out
    assert (
        output.startswith("2 ranks: 1 rank of a small model typed, ")
        and "\nproved: the gradients of " in output
    )


def test_a_fault_is_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Seams, "check_weights", lambda seams, run: seams.recorder.fault("wrong"))
    assert main([*TINY, "2"]) == 1
    output = capsys.readouterr().out
    assert "error: wrong" in output and "proved" not in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["3", "--tensor-model-parallel-size", "2"], "3 ranks"),
        (["2", "--data-parallel-size", "4"], "data"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, *words]) == 2
    output = capsys.readouterr()
    assert message in output.err and "Traceback" not in output.err and not output.out
