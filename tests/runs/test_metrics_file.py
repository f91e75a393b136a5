"""metrics.jsonl: rows survive every start, and a full disk, a removed folder or another writer is
one error.
"""

import json
import os
import re
import resource
import shutil
from contextlib import contextmanager
from dataclasses import asdict
from zlib import crc32

import pytest

from nanotrain.errors import EnvironmentFault
from nanotrain.runs.files import FolderVanished, open_append
from nanotrain.runs.metrics_file import (
    MetricsFile,
    MetricsSeal,
    Sealer,
    set_aside_after,
    warn_of_changes,
)


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


@pytest.fixture
def sealed(tmp_path):
    """A file of three rows, and its seal."""
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, step=0)
    for step in (1, 2, 3):
        file.append({"step": step, "loss": 2.5})
    file.close()
    seal = Sealer(path).seal()
    assert seal == MetricsSeal(1, rows=3, crc32=crc32(path.read_bytes()))
    return path, MetricsSeal.from_json(asdict(seal))


def test_rows_that_were_changed_or_cut_are_mentioned_at_the_next_start(sealed, logged):
    path, _ = sealed
    sound = path.read_bytes()
    warn_of_changes(path, step=3)
    assert not logged and json.loads(sound.splitlines()[0])["loss"] == 2.5

    where = f"{path} was changed: "
    path.write_bytes(sound.replace(b'"step": 2, "loss": 2.5', b'"step": 2, "loss": 2.4'))
    warn_of_changes(path, step=3)
    assert logged[-1] == where + "1 row is not as written, first line 2"
    path.write_bytes(b"".join(sound.splitlines(keepends=True)[:1]))
    warn_of_changes(path, step=3)
    assert logged[-1] == where + "2 rows are missing, first step 2"


def without_sums(content):
    return re.sub(rb', "crc32": "[0-9a-f]{8}"', b"", content)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda content: content.split(b"\n", 1)[1], "1 row is missing, first step 1"),
        (lambda content: b"", "3 rows are missing, first step 1"),
        (None, "3 rows are missing, first step 1"),
        (without_sums, "3 rows without a checksum"),
        (
            lambda content: without_sums(content).replace(b"2.5", b"0.1"),
            "3 rows without a checksum",
        ),
        (lambda content: content.rsplit(b"\n", 2)[0] + b"\n", "1 row is missing, first step 3"),
        (lambda content: content + content.splitlines(keepends=True)[0], "not those of the check"),
    ],
)
def test_every_change_of_sealed_rows_is_one_line(sealed, change, fault, logged):
    path, seal = sealed
    warn_of_changes(path, step=3, seal=seal)
    assert not logged
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))
    warn_of_changes(path, step=3, seal=seal)
    assert len(logged) == 1 and fault in logged[0]


def test_no_changed_bit_of_sealed_rows_goes_unnoticed(sealed, logged):
    path, seal = sealed
    sound = path.read_bytes()
    for bit in range(8):  # of every seventh byte
        for offset in range(bit, len(sound), 7):
            logged.clear()
            changed = bytes([sound[offset] ^ 1 << bit])
            path.write_bytes(sound[:offset] + changed + sound[offset + 1 :])
            warn_of_changes(path, step=3, seal=seal)
            assert len(logged) == 1, (offset, bit)


def test_later_rows_do_not_break_a_seal_and_a_replaced_file_has_another(sealed, logged):
    path, seal = sealed
    sealer = Sealer(path)
    assert sealer.seal() == seal
    file = MetricsFile(path, step=3)
    file.append({"step": 4, "loss": 2.5})
    file.close()
    warn_of_changes(path, step=3, seal=seal)
    assert not logged
    longer = sealer.seal()
    assert longer == Sealer(path).seal() and longer.rows == 4
    set_aside_after(path, 2)
    assert sealer.seal() == Sealer(path).seal() and sealer.seal().rows == 2


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


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_no_byte_of_a_row_without_its_end_is_lost(tmp_path, step):
    """A killed writer may have left out the newline alone; the next row begins a line."""
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "metrics-superseded.jsonl"
    path.write_text(lines(1, 2, 3).rstrip("\n"))
    set_aside_after(path, step)
    kept = [number for number in (1, 2) if number <= step]
    assert path.read_text() == lines(*kept)
    assert aside.read_text() == lines(*(number for number in (1, 2, 3) if number not in kept))
