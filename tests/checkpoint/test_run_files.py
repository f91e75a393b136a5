"""Files of a run in its local folder and in object storage: the newer version stays, whatever the
clocks say.
"""

import itertools
import os
import time
from pathlib import Path

import pytest

from nanotrain.checkpoint.run_files import RECORD, FileUploads
from nanotrain.checkpoint.stored import mirror
from nanotrain.storage.remote import Remote, parse
from tests import s3_server

SKEWS_S = (-600.0, 0.0, 600.0)  # of the local clock
ROWS = [f'{{"step": {step}}}\n' for step in range(1, 11)]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.without_pauses(monkeypatch)


@pytest.fixture(scope="module")
def bucket() -> str:
    return s3_server.make_bucket("run-files")


_numbers = itertools.count()


@pytest.fixture
def run(bucket: str) -> Remote:
    return parse(f"{bucket}/run-{next(_numbers)}")


class Machine:
    """The local folder of a run on a machine with a clock of its own."""

    def __init__(self, run: Remote, folder: Path, *, skew_s: float) -> None:
        self.run, self.folder, self.skew_s = run, folder / run.path, skew_s
        self.folder.mkdir(parents=True)
        self.start()

    def start(self) -> None:
        mirror(self.run, self.folder)
        self.uploads = FileUploads(self.folder, self.run)

    def write(self, text: str, *, name: str = "metrics.jsonl") -> None:
        (self.folder / name).write_text(text)
        now = time.time() + self.skew_s
        os.utime(self.folder / name, (now, now))

    def save(self, step: int) -> None:
        """Upload the files, then commit a checkpoint."""
        self.uploads.upload()
        (self.run / f"checkpoints/step-{step:08}/manifest.json").write(b"{}")

    def read(self, name: str = "metrics.jsonl") -> str:
        return (self.folder / name).read_text()


@pytest.mark.parametrize("skew_s", SKEWS_S)
def test_rows_after_the_last_upload_stay_on_their_machine(
    run: Remote, tmp_path: Path, skew_s: float
) -> None:
    machine = Machine(run, tmp_path, skew_s=skew_s)
    machine.write("".join(ROWS[:4]))
    machine.save(4)
    machine.write("".join(ROWS))  # killed at step 10
    machine.start()
    assert machine.read() == "".join(ROWS)
    machine.save(10)
    assert (run / "metrics.jsonl").read().decode() == "".join(ROWS)


@pytest.mark.parametrize("skew_s", SKEWS_S)
@pytest.mark.parametrize("has_record", [True, False])
def test_what_another_machine_has_saved_since_counts(
    run: Remote, tmp_path: Path, skew_s: float, has_record: bool
) -> None:
    """Also where a kill, or an older version, has left no record of what was uploaded."""
    first = Machine(run, tmp_path / "first", skew_s=skew_s)
    first.write("".join(ROWS[:4]))
    first.write("lr: 1", name="config.yaml")
    first.save(4)
    first.write("".join([*ROWS[:4], "rows of this machine alone\n"]))
    second = Machine(run, tmp_path / "second", skew_s=0.0)
    assert second.read() == "".join(ROWS[:4])
    second.write("".join(ROWS))
    second.write("lr: 2", name="config.yaml")
    second.save(10)
    if not has_record:
        (first.folder / RECORD).unlink()
    first.start()
    assert (first.read(), first.read("config.yaml")) == ("".join(ROWS), "lr: 2")
    kept = first.folder / ".metrics.jsonl.replaced"
    assert kept.read_text().endswith("rows of this machine alone\n")


@pytest.mark.parametrize("skew_s", SKEWS_S)
def test_a_checkpoint_that_only_the_folder_has_keeps_its_files(
    run: Remote, tmp_path: Path, skew_s: float
) -> None:
    """Killed between the two commits of step 6; another machine went on from 4 and failed at 5."""
    first = Machine(run, tmp_path / "first", skew_s=skew_s)
    first.write("".join(ROWS[:4]))
    first.save(4)
    first.write("".join(ROWS[:6]))
    (first.folder / "checkpoints/step-00000006").mkdir(parents=True)
    (first.folder / "checkpoints/step-00000006/manifest.json").write_text("{}")
    second = Machine(run, tmp_path / "second", skew_s=0.0)
    second.write("".join([*ROWS[:4], "the fifth of the other machine\n"]))
    second.uploads.upload()
    first.start()
    assert first.read() == "".join(ROWS[:6])


def test_of_two_machines_with_the_same_newest_checkpoint_the_store_counts(
    run: Remote, tmp_path: Path
) -> None:
    first = Machine(run, tmp_path / "first", skew_s=0.0)
    first.write("lr: 1", name="config.yaml")
    first.save(4)
    step = first.folder / "checkpoints/step-00000004"
    step.mkdir(parents=True, exist_ok=True)
    (step / "manifest.json").write_text("{}")
    first.write("lr: 3", name="config.yaml")
    second = Machine(run, tmp_path / "second", skew_s=0.0)
    second.write("lr: 2", name="config.yaml")
    second.uploads.upload()
    first.start()
    assert first.read("config.yaml") == "lr: 2"


@pytest.mark.parametrize(("local", "there"), [(4, 10), (10, 4), (7, 7)])
@pytest.mark.parametrize("skew_s", SKEWS_S)
def test_of_a_file_that_goes_on_the_longer_version_stays(
    run: Remote, tmp_path: Path, local: int, there: int, skew_s: float
) -> None:
    machine = Machine(run, tmp_path, skew_s=skew_s)
    machine.write("".join(ROWS[:local]))
    (run / "metrics.jsonl").write("".join(ROWS[:there]).encode())
    machine.start()
    assert machine.read() == "".join(ROWS[: max(local, there)])


def test_a_download_that_was_killed_leaves_the_old_file(
    run: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(run, tmp_path, skew_s=0.0)
    machine.write("".join(ROWS[:4]))
    machine.save(4)
    (run / "metrics.jsonl").write("".join(ROWS).encode())

    def killed(self: Remote, file: Path, size: int) -> None:
        file.write_text("half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "download", killed)
        with pytest.raises(KeyboardInterrupt):
            machine.start()
    assert machine.read() == "".join(ROWS[:4])
    machine.start()
    assert machine.read() == "".join(ROWS)


def test_files_that_have_not_changed_are_not_uploaded_again(run: Remote, tmp_path: Path) -> None:
    for name in (
        "metrics.jsonl",
        "run.lock",
        ".hidden.txt",
        "tokenizer/tokenizer.json",
        "profile/trace.json",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    FileUploads(tmp_path, run).upload()
    assert sorted(run.sizes()) == ["metrics.jsonl", "tokenizer/tokenizer.json"]
    (tmp_path / "metrics.jsonl").write_text("more")
    with s3_server.server().counted() as requests:
        FileUploads(tmp_path, run).upload()  # of a later start
    assert [request.method for request in requests] == ["PUT", "HEAD"]
    (tmp_path / RECORD).write_text('{"metrics.jsonl": 5}')  # damaged: as if there were none
    FileUploads(tmp_path, run).upload()
