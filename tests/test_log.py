"""Which ranks log, and what a line begins with."""

from collections.abc import Iterator

import pytest

from nanotrain.log import get_logger, start_logging


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
