"""Which ranks log, and what a line begins with."""

import io
import re
from collections.abc import Iterator

import pytest

from nanotrain import log
from nanotrain.log import get_logger, progress, start_logging


@pytest.fixture(autouse=True)
def silent_afterwards() -> Iterator[None]:
    root = get_logger("nanotrain")
    before = (root.handlers[:], root.level, root.propagate)
    yield
    root.handlers[:], level, root.propagate = before
    root.setLevel(level)


def test_the_first_rank_logs_for_all_and_warnings_begin_with_coordinates(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for rank in (0, 1):
        start_logging(coordinates=f"dp{rank}", is_first=rank == 0)
        get_logger("nanotrain.train").info("saved")
        get_logger("nanotrain.train").warning("slow disk")
    assert capsys.readouterr().err.splitlines() == ["saved", "[dp0] slow disk", "[dp1] slow disk"]


def test_lines_of_a_job_of_one_rank_have_no_coordinates(capsys: pytest.CaptureFixture[str]) -> None:
    start_logging()
    get_logger("nanotrain.data").warning("slow disk")
    assert capsys.readouterr().err == "slow disk\n"


@pytest.mark.parametrize(("after_s", "shown"), [(0.0, True), (60.0, False)])
def test_what_takes_long_has_a_line_at_its_start_and_its_end(
    capsys, monkeypatch, after_s, shown
) -> None:
    monkeypatch.setattr(log, "SHOWN_AFTER_S", after_s)
    with progress("tokenizing", total=2) as advance:
        while shown and "tokenizing ..." not in (text := capsys.readouterr().err):
            assert not text
        advance(1)
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r"[\d.]+ s", "N s", line) for line in lines] == [
        "tokenizing: done after N s"
    ] * shown


def test_progress_is_not_shown_on_other_ranks_and_ends_with_an_error(capsys, monkeypatch) -> None:
    monkeypatch.setattr(log, "SHOWN_AFTER_S", 0.0)
    with progress("tokenizing", is_shown=False) as advance:
        advance(1)
    with pytest.raises(ValueError), progress("exporting"):
        raise ValueError
    assert "tokenizing" not in (text := capsys.readouterr().err) and "done" not in text


def test_a_function_may_be_shown_as_a_whole(capsys, monkeypatch) -> None:
    monkeypatch.setattr(log, "SHOWN_AFTER_S", 0.0)

    @progress("exporting")
    def export(count: int) -> int:
        return count + 1

    assert [export(1), export(2)] == [2, 3]
    assert capsys.readouterr().err.count("exporting: done after") == 2


def test_on_a_terminal_there_is_a_bar_which_goes_away(monkeypatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(log, "SHOWN_AFTER_S", 0.0)
    with progress("tokenizing", total=4) as advance:
        advance(1)
        while "25%" not in terminal.getvalue():
            pass
    assert terminal.getvalue().splitlines()[-1].endswith(" s"), "the last line is that of the end"
