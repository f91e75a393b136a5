"""metrics.jsonl: rows survive every start, and a full disk, a removed folder or another writer is
one error.
"""

import json
import os
import resource
import shutil
from contextlib import contextmanager

import pytest

from nanotrain.errors import EnvironmentFault
from nanotrain.runs.files import FolderVanished, open_append
from nanotrain.runs.metrics_file import MetricsFile, set_aside_after


def lines(*steps: int) -> str:
    return "".join(json.dumps({"step": step}) + "\n" for step in steps)


@contextmanager
def file_size_limit(num_bytes: int):
    """No file of this process may grow beyond this, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_rows_of_repeated_steps_are_set_aside(tmp_path):
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "metrics-superseded.jsonl"
    path.write_text(lines(1, 2, 3, 4))
    set_aside_after(path, 2)
    assert path.read_text() == lines(1, 2) and aside.read_text() == lines(3, 4)
    set_aside_after(path, 0)
    assert path.read_text() == "" and aside.read_text() == lines(3, 4, 1, 2)


@pytest.mark.parametrize(
    "row", [b'{"step": 3, "lo', b"\xff\xfe\n", b'{"step": "x"}\n', b"3\n", b"[" * 100_000 + b"\n"]
)
def test_a_row_that_cannot_be_read_is_set_aside(tmp_path, row):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(lines(1, 2).encode() + row)
    set_aside_after(path, 5)
    assert path.read_text() == lines(1, 2)
    assert (tmp_path / "metrics-superseded.jsonl").read_bytes() == row.rstrip(b"\n") + b"\n"


def test_rows_that_were_changed_or_cut_are_mentioned_at_the_next_start(tmp_path, logged):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, step=0)
    for step in (1, 2, 3):
        file.append({"step": step, "loss": 2.5})
    file.close()
    sound = path.read_bytes()
    MetricsFile(path, step=3).close()
    assert not logged and json.loads(sound.splitlines()[0])["loss"] == 2.5

    where = f"{path} was changed: "
    path.write_bytes(sound.replace(b'"step": 2, "loss": 2.5', b'"step": 2, "loss": 2.4'))
    MetricsFile(path, step=3).close()
    assert logged[-1] == where + "1 row is not as written, first line 2"
    path.write_bytes(b"".join(sound.splitlines(keepends=True)[:1]))
    MetricsFile(path, step=3).close()
    assert logged[-1] == where + "2 rows are missing, first step 2"

    for bit in range(8):  # of every seventh byte
        for place in range(bit, len(sound), 7):
            logged.clear()
            path.write_bytes(sound[:place] + bytes([sound[place] ^ 1 << bit]) + sound[place + 1 :])
            MetricsFile(path, step=3).close()
            in_name_of_sum = sound[:place].count(b"\n") == 0 and place >= sound.index(b', "crc32')
            assert len(logged) == 1 or in_name_of_sum, (place, bit)


def test_missing_or_complete_metrics_leave_no_other_file(tmp_path):
    set_aside_after(tmp_path / "metrics.jsonl", 3)
    assert not list(tmp_path.iterdir())
    (tmp_path / "metrics.jsonl").write_text(lines(1))
    set_aside_after(tmp_path / "metrics.jsonl", 3)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_is_one_error_with_path_and_space_and_leaves_no_half_row(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl", step=0)
    file.append({"step": 1})
    with file_size_limit(40), pytest.raises(EnvironmentFault) as error:
        file.append({"step": 2})
    assert "metrics.jsonl cannot be written: File too large" in str(error.value)
    assert "33 bytes needed" in error.value.why and "bytes free in" in error.value.why
    file.append({"step": 2})  # there is space again
    assert [json.loads(line)["step"] for line in file.path.read_text().splitlines()] == [1, 2]


def test_a_removed_folder_is_noticed_at_the_next_row(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    file = MetricsFile(folder / "metrics.jsonl", step=0)
    shutil.rmtree(folder)
    with pytest.raises(FolderVanished, match="run does not exist any more"):
        file.append({"step": 1})


@pytest.mark.parametrize("what", ["replaced", "removed"])
def test_another_job_in_the_folder_is_noticed(tmp_path, what):
    file = MetricsFile(tmp_path / "metrics.jsonl", step=0)
    if what == "replaced":
        (tmp_path / "other").write_text(lines(1, 2))
        (tmp_path / "other").replace(file.path)
    else:
        file.path.unlink()
    with pytest.raises(EnvironmentFault, match=f"was {what} by another process"):
        file.append({"step": 1})
    assert what == "removed" or file.path.read_text() == lines(1, 2)


def test_metrics_are_not_written_through_a_link(tmp_path):
    (tmp_path / "target").touch()
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "target")
    with pytest.raises(EnvironmentFault, match="symbolic link"):
        MetricsFile(tmp_path / "metrics.jsonl", step=0)


def test_rows_that_cannot_be_set_aside_stay_where_they_are(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(*range(1, 21)))
    with file_size_limit(100), pytest.raises(EnvironmentFault, match="metrics-superseded"):
        set_aside_after(path, 2)  # the first 100 of 216 bytes can be written
    assert path.read_text() == lines(*range(1, 21))


def test_a_pipe_in_the_place_of_the_metrics_is_an_error_and_no_wait(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(
        EnvironmentFault, match="metrics.jsonl cannot be read: it is no regular file"
    ):
        MetricsFile(tmp_path / "metrics.jsonl", step=0)
    with pytest.raises(EnvironmentFault, match="No such device"):
        open_append(tmp_path / "metrics.jsonl")
