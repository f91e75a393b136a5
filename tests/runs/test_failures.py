"""The notes of ranks on their failures."""

import pytest

from nanotrain.errors import ConfigError, LocalFault
from nanotrain.runs.failures import (
    FOLDER,
    HANG,
    HangRank,
    HangRecord,
    RankFailure,
    Reporter,
    read_failures,
    read_hang,
    recording,
    remove_cured,
    write_failure,
)
from nanotrain.runs.lock import LOCK_NAME, InUse


def fail(folder, error: Exception, *, rank: int) -> None:
    with pytest.raises(type(error)), recording(folder, Reporter.of({"RANK": str(rank)})):
        raise error


def test_once_the_first_rank_has_left_the_next_one_notes_what_all_raise(tmp_path):
    (tmp_path / LOCK_NAME).touch()
    reporter = Reporter.of({"RANK": "1", "LOCAL_RANK": "1"})
    reporter.take_over()
    with pytest.raises(ConfigError), recording(tmp_path, reporter):
        raise ConfigError("tp=3", why="8 ranks", fix="tp=2")
    assert [failure.rank for failure in read_failures(tmp_path)] == [1]


def test_what_all_ranks_raise_is_noted_once_and_what_one_raises_by_it(tmp_path):
    (tmp_path / LOCK_NAME).touch()
    for rank in range(3):
        fail(tmp_path, ConfigError("tp=3", why="8 ranks", fix="tp=2"), rank=rank)
    fail(tmp_path, LocalFault("rank 5 ran out of memory"), rank=5)
    fail(tmp_path, KeyError("layers"), rank=6)
    first, memory, code = read_failures(tmp_path)
    assert (first.rank, first.text, first.is_foreseen) == (0, "ConfigError: tp=3: 8 ranks", True)
    assert (memory.rank, memory.kind, memory.fix) == (5, "LocalFault", "")
    assert (code.rank, code.is_foreseen) == (6, False)
    assert code.text.startswith("KeyError: 'layers': test_failures.py:")
    assert read_failures(tmp_path, since_s=code.time_s) == [code]


def test_nothing_is_noted_of_an_interrupt_and_in_folders_that_are_not_there_or_in_use(tmp_path):
    fail(tmp_path, ConfigError("a folder of somebody else"), rank=0)
    assert not (tmp_path / FOLDER).exists()
    (tmp_path / LOCK_NAME).touch()
    fail(tmp_path / "none", ConfigError("x"), rank=0)
    assert not (tmp_path / "none").exists()
    with pytest.raises(KeyboardInterrupt), recording(tmp_path, Reporter.of({})):
        raise KeyboardInterrupt
    fail(tmp_path, InUse("the run folder is in use"), rank=0)
    assert not (tmp_path / FOLDER).exists()


def test_damaged_notes_are_left_out(tmp_path):
    (tmp_path / LOCK_NAME).touch()
    write_failure(tmp_path, RankFailure(1, "a", 2.0, "KeyError", "x"))
    (tmp_path / FOLDER / "rank-00002.json").write_text('{"rank": 2}')
    (tmp_path / FOLDER / "rank-00003.json").write_text("{")
    assert [failure.rank for failure in read_failures(tmp_path)] == [1]


def test_a_hang_record_is_read_back_unless_it_is_older(tmp_path):
    assert read_hang(tmp_path) is None
    record = HangRecord(5.0, "rank 1 is behind", (HangRank(1, "node7", "running"),))
    record.write(tmp_path)
    assert read_hang(tmp_path, since_s=5.0) == record
    assert read_hang(tmp_path, since_s=6.0) is None
    (tmp_path / HANG).write_text('{"time_s": 5.0, "headline": "x", "ranks": [1]}')
    assert read_hang(tmp_path) is None


def test_a_rank_that_has_left_leaves_no_note_of_its_error(tmp_path):
    (tmp_path / LOCK_NAME).touch()
    for rank in range(4):
        fail(tmp_path, KeyError("layers"), rank=rank)
    HangRecord(5.0, "rank 1 is behind", ()).write(tmp_path)
    remove_cured(tmp_path, members=(0, 2))
    assert [failure.rank for failure in read_failures(tmp_path)] == [0, 2]
    assert read_hang(tmp_path) is None
    remove_cured(tmp_path, members=(0, 2))
