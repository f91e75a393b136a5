"""Local folders of runs in object storage: what comes from a listing, and what a strange bucket
cannot do.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanotrain.checkpoint.run_files import RECORD
from nanotrain.checkpoint.stored import (
    MANIFEST,
    MARKER,
    MAX_FILES,
    SUPERSEDED,
    Stored,
    _current_saves,
    _drop_step,
    fetched,
    mark,
    mirror,
    require_writable,
    steps_of,
    stored_at,
)
from nanotrain.errors import CheckpointError, StorageFault
from nanotrain.storage.remote import MissingObject, Remote, Stat, parse
from nanotrain.untrusted import MAX_FILE_BYTES
from tests import s3_server


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.without_pauses(monkeypatch)


@pytest.fixture(scope="module")
def bucket() -> str:
    return s3_server.make_bucket("stored")


@pytest.fixture
def run(bucket: str, request: pytest.FixtureRequest) -> Remote:
    return parse(f"{bucket}/{request.node.name.partition('[')[0]}")


def write(run: Remote, *names: str) -> None:
    for name in names:
        (run / name).write(name.encode())


def files(folder: Path) -> list[str]:
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != RECORD)
    return sorted(str(path.relative_to(folder)) for path in paths)


@pytest.mark.parametrize(
    ("listing", "why"),
    [
        (
            {f"{number}.json": Stat(1, 0.0) for number in range(MAX_FILES + 1)},
            "it has 10,001 small files and 0 checkpoints, at most 10,000 are read",
        ),
        (
            {f"step-{number:08}/{MANIFEST}": Stat(1, 0.0) for number in range(MAX_FILES + 1)},
            "it has 0 small files and 10,001 checkpoints, at most 10,000 are read",
        ),
        (
            {"a.json": Stat(MAX_FILE_BYTES + 1, 0.0)},
            "a.json has 1,073,741,825 bytes, at most 1,073,741,824 are read",
        ),
    ],
)
def test_a_listing_of_too_much_is_refused_before_anything_is_read(
    listing: dict[str, Stat], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Remote, "sizes", lambda self: listing)
    monkeypatch.setattr(Remote, "read", lambda self, *span: pytest.fail("it is read"))
    with pytest.raises(CheckpointError, match=why):
        mirror(parse("s3://bucket/run"), tmp_path / "run")


def test_the_record_of_a_folder_comes_back_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    stored = Stored(
        parse("s3://b/run/checkpoints/step-00000001"), {"shard-00000-of-00001.safetensors": 7}
    )
    folder = tmp_path / stored.remote.path
    mark(folder, stored)
    assert stored_at(folder) == stored and stored_at(tmp_path) is None
    again = stored._replace(remote=stored.remote.parent / "step-00000001.2")
    mark(folder, again)
    assert stored_at(folder) == again == stored_at(folder.rename(folder.with_suffix(".deleted-2")))
    for text in (
        "",
        "[]",
        '{"address": "ftp://b/x", "sizes": {}}',
        '{"address": "x", "sizes": {}}',
        '{"sizes": {"a": -1}}',
        f'{{"address": "{stored.remote}", "sizes": {{"../../config.yaml": 1}}}}',
    ):
        folder.mkdir(exist_ok=True)
        (folder / MARKER).write_text(text)
        assert stored_at(folder) is None


def test_a_record_of_a_stranger_names_no_other_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint from elsewhere is read and pruned with the credentials of the user, who named a
    folder alone.
    """
    folder = tmp_path / "downloads/run/checkpoints/step-00000001"
    step = "checkpoints/step-00000001"
    for path in (f"private/run/{step}", "run/checkpoints/step-00000002", step, "step-00000001"):
        mark(folder, Stored(Remote("s3", path), {"shard-00000-of-00001.safetensors": 7}))
        with caplog.at_level("WARNING", logger="nanotrain"):
            assert stored_at(folder) is None
        assert f"names s3://{path}, which is not the address of this folder" in caplog.text


def test_the_highest_generation_is_the_last_one() -> None:
    names = [f"checkpoints/step-00000004{end}/manifest.json" for end in (".10", "", ".2")]
    saves = steps_of(dict.fromkeys(names, Stat(1, 0.0)))
    assert [save.number for save in saves["checkpoints/step-00000004"]] == [1, 2, 10]


def test_a_folder_gets_small_files_and_committed_steps_without_shards(
    run: Remote, tmp_path: Path
) -> None:
    folder = tmp_path / run.path
    shard = "shard-00000-of-00001.safetensors"
    write(run, "config.yaml", "tokenizer/tokenizer.json", f"checkpoints/step-00000001/{shard}")
    write(run, "checkpoints/step-00000001/manifest.json", f"checkpoints/step-00000002/{shard}")
    write(run, "checkpoints/step-00000003/manifest.json", "checkpoints/step-00000003/superseded")
    mirror(run, folder)
    step = "checkpoints/step-00000001"
    assert files(folder) == [
        f"{step}/manifest.json",
        f"{step}/{MARKER}",
        "config.yaml",
        "tokenizer/tokenizer.json",
    ]
    (folder / "config.yaml").write_text("newer, not uploaded")
    run.delete([f"{step}/manifest.json"])
    mirror(run, folder)
    assert files(folder) == ["config.yaml", "tokenizer/tokenizer.json"], "deleted there, gone here"
    assert (folder / "config.yaml").read_text() == "newer, not uploaded"


def test_a_local_copy_of_what_was_deleted_there_stays(run: Remote, tmp_path: Path) -> None:
    folder = tmp_path / run.path
    step, shard = "checkpoints/step-00000001", "shard-00000-of-00001.safetensors"
    write(run, f"{step}/{shard}", f"{step}/manifest.json")
    mirror(run, folder)
    (folder / step / shard).write_bytes(b"x")
    run.delete([f"{step}/{shard}", f"{step}/manifest.json"])
    mirror(run, folder)
    assert files(folder) == [f"{step}/manifest.json", f"{step}/{shard}"]


def test_names_that_lead_out_of_the_folder_are_left_out(
    run: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [
        "../a",
        "a/../../b",
        "/c",
        "d//e",
        "f/.",
        "ok",
        "g\\h",
        "step-00000001/../../manifest.json",
    ]
    monkeypatch.setattr(Remote, "sizes", lambda self: dict.fromkeys(names, Stat(1, 1.0)))
    monkeypatch.setattr(Remote, "download", lambda self, file, size: file.write_text("x"))
    mirror(run, tmp_path / "run")
    assert files(tmp_path) == ["run/ok"]


def test_a_command_gets_a_run_a_step_or_one_error(run: Remote, tmp_path: Path) -> None:
    write(run, "config.yaml", "checkpoints/step-00000001/manifest.json")
    step = "checkpoints/step-00000001"
    for name in ("checkpoints", step):
        assert fetched(run / name, tmp_path) == tmp_path / run.path / name
    assert (tmp_path / run.path / "config.yaml").is_file()
    with pytest.raises(CheckpointError, match=r"step-00000009 is not there"):
        fetched(run / "checkpoints/step-00000009", tmp_path)


def test_what_would_fail_at_the_first_save_fails_at_the_start(bucket: str, run: Remote) -> None:
    require_writable(run)
    assert run.sizes() == {}
    with pytest.raises(
        MissingObject, match=r"no-such-bucket.*make the bucket, or name another place"
    ):
        require_writable(parse("s3://no-such-bucket/run"))
    with (
        s3_server.server().faults(lambda request: "denied" if request.method == "PUT" else None),
        pytest.raises(StorageFault, match=r"Access Denied.*credentials"),
    ):
        require_writable(run)


class Killed(BaseException):
    """The end of the process between two requests."""


@pytest.mark.parametrize("num_requests", [0, 1, 2])
def test_a_deletion_that_is_killed_leaves_no_manifest_without_its_shards(num_requests: int) -> None:
    """In object storage a manifest makes a checkpoint: it is the first object to go."""
    objects = {MANIFEST, "shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors"}
    shards = objects - {MANIFEST}

    class Bucket(Remote):
        requests = 0

        def __init__(self) -> None:
            """Needs no store."""

        def delete(self, names: Iterable[str]) -> None:
            if self.requests == num_requests:
                raise Killed
            self.requests += 1
            objects.difference_update(names)

    with suppress(Killed):
        Stored(Bucket(), dict.fromkeys(shards, 1)).delete()
    assert MANIFEST not in objects or shards <= objects
    assert bool(objects) is (num_requests < 2)


SAVES = st.sets(st.tuples(st.integers(1, 3), st.integers(1, 12)), max_size=12)


@settings(deadline=None, max_examples=60)
@given(saves=SAVES, committed=SAVES, superseded=SAVES)
def test_of_each_step_the_last_committed_save_that_is_not_set_aside_counts(
    saves: set[tuple[int, int]],
    committed: set[tuple[int, int]],
    superseded: set[tuple[int, int]],
) -> None:
    names = []
    for step, number in saves:
        folder = f"step-{step:08d}" + (f".{number}" if number > 1 else "")
        names.append(f"{folder}/shard-00000-of-00001.safetensors")
        names += [f"{folder}/{MANIFEST}"] * ((step, number) in committed)
        names += [f"{folder}/{SUPERSEDED}"] * ((step, number) in superseded)
    found = steps_of(dict.fromkeys(names, Stat(1, 0.0)))
    for step in range(1, 4):
        numbers = sorted(number for other, number in saves if other == step)
        name = f"step-{step:08d}"
        assert [save.number for save in found.get(name, [])] == numbers
        counted = [n for n in numbers if (step, n) in committed and (step, n) not in superseded]
        current = _current_saves(found).get(name)
        assert (current.number if current else None) == (counted[-1] if counted else None)


@pytest.mark.parametrize("num_local", [0, 1, 2])
@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_local_step_stays_only_if_it_is_whole_and_was_deleted_by_another_hand(
    tmp_path: Path, num_local: int, is_deleted: bool
) -> None:
    names = [f"shard-{number:05d}-of-00002.safetensors" for number in range(2)]
    stored = Stored(parse("s3://b/run/checkpoints/step-00000001"), dict.fromkeys(names, 7))
    step = tmp_path / stored.remote.path
    mark(step, stored)
    for name in names[:num_local]:
        (step / name).write_bytes(bytes(7))
    _drop_step(step, is_deleted=is_deleted)
    stays = is_deleted and num_local == 2
    assert step.exists() is stays
    assert files(tmp_path) == ([f"{stored.remote.path}/{name}" for name in names] if stays else [])
