"""Checkpoints in an S3 bucket: the same tensors as on a disk; faults lose nothing. Kills:
test_killed_uploads.py.
"""

import os
import random
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from nanotrain.checkpoint.all_ranks import run_on_first
from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.checkpoint.read import read_box
from nanotrain.checkpoint.remote_checkpointer import RemoteCheckpointer
from nanotrain.checkpoint.store import checkpoint_to_resume, read_manifest
from nanotrain.checkpoint.stored import mirror
from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.errors import StorageFault
from nanotrain.spec.boxes import TensorBox
from nanotrain.storage.remote import Remote, parse
from nanotrain.system import without_collection
from tests import s3_server
from tests.checkpoint.test_many_ranks import shares
from tests.harness import run_ranks
from tests.test_two_hosts import DRILLS

CONTENT: dict[str, Any] = {"objects": {}, "config": {}, "topology": {}}
BOX = TensorBox.full("model/weight", (50, 40))


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.without_pauses(monkeypatch)


@pytest.fixture(scope="module")
def bucket() -> str:
    return s3_server.make_bucket("runs-of-tests")


@pytest.fixture
def run(bucket: str, request: pytest.FixtureRequest) -> Remote:
    return parse(f"{bucket}/{request.node.name.partition('[')[0]}")


def state(step: int) -> dict[TensorBox, torch.Tensor]:
    return {BOX: torch.full((50, 40), float(step))}


class OneRank:
    """A process with one rank, with its folder on a machine."""

    def __init__(self, run: Remote, machine: Path, *, keep_last: int = 2) -> None:
        self.folder, self.run = machine / run.path, run
        self.folder.mkdir(parents=True, exist_ok=True)
        mirror(run, self.folder)
        local = Checkpointer(
            self.folder / "checkpoints", group=Group.single_rank("world"), keep_last=keep_last
        )
        self.checkpointer = RemoteCheckpointer(local, run, store=HashStore())

    def save(self, *steps: int) -> None:
        for step in steps:
            self.checkpointer.save(step, state(step), **CONTENT)

    def restored(self) -> int | None:
        """The step of the newest checkpoint, whose tensors are those of the step."""
        newest = checkpoint_to_resume(self.folder / "checkpoints")
        if newest is None:
            return None
        target = {BOX: torch.zeros(50, 40)}
        step = self.checkpointer.restore(newest, target).step
        assert torch.equal(target[BOX], state(step)[BOX]), (
            "half of a checkpoint was taken for the whole"
        )
        return step


def names(run: Remote) -> list[str]:
    return sorted({name.split("/")[1] for name in run.sizes() if name.startswith("checkpoints/")})


def test_another_machine_resumes_from_the_newest_checkpoint_and_old_ones_are_deleted(
    run: Remote, tmp_path: Path
) -> None:
    first = OneRank(run, tmp_path / "first")
    (first.folder / "metrics.jsonl").write_text("{}\n")
    first.save(1, 2, 3)
    assert names(run) == ["step-00000002", "step-00000003"]
    assert [path.name for path in (first.folder / "checkpoints").glob("*/shard*")] == [
        "shard-00000-of-00001.safetensors"
    ]
    other = OneRank(run, tmp_path / "other")
    assert other.restored() == 3 and first.restored() == 3
    assert (other.folder / "metrics.jsonl").read_text() == "{}\n"
    other.save(4)
    assert (
        names(run) == ["step-00000003", "step-00000004"]
        and OneRank(run, tmp_path / "first").restored() == 4
    )


def test_a_step_that_is_saved_again_replaces_the_old_one_when_it_is_complete(
    run: Remote, tmp_path: Path
) -> None:
    one = OneRank(run, tmp_path)
    one.save(1, 2)
    with s3_server.server().counted() as requests:
        one.save(2)
    assert names(run) == ["step-00000001", "step-00000002.2"]
    commit = next(
        i for i, each in enumerate(requests) if each.path.endswith("00002.2/manifest.json")
    )
    deletions = [i for i, each in enumerate(requests) if each.query == "delete"]
    assert deletions and min(deletions) > commit, "the old one goes when the new one is there"
    assert OneRank(run, tmp_path / "other").restored() == 2 and one.restored() == 2


def test_steps_that_the_run_went_back_from_stay_and_are_not_chosen(
    run: Remote, tmp_path: Path
) -> None:
    one = OneRank(run, tmp_path, keep_last=0)
    one.save(1, 2, 3)
    assert [path.name for path in one.checkpointer.set_aside_after(1)] == [
        "step-00000002.superseded-1",
        "step-00000003.superseded-1",
    ]
    assert one.restored() == 1 and OneRank(run, tmp_path / "other").restored() == 1
    one.save(2)
    assert names(run) == ["step-00000001", "step-00000002", "step-00000002.2", "step-00000003"]
    assert OneRank(run, tmp_path / "other").restored() == 2


def test_a_save_and_a_load_make_as_many_requests_as_the_formula_says(
    run: Remote, tmp_path: Path
) -> None:
    """The table of docs/remote_storage.md."""
    with s3_server.server().counted() as start:
        one = OneRank(run, tmp_path)
    assert kinds(start) == {"LIST": 1}
    (one.folder / "metrics.jsonl").write_text("one row\n")
    one.save(1, 2)
    (one.folder / "metrics.jsonl").write_text("two rows\n")
    with s3_server.server().counted() as saved:
        one.save(3)
    assert kinds(saved) == {
        "LIST": 1,
        "PUT metrics": 1,
        "HEAD metrics": 1,
        "PUT shard": 1,
        "GET shard": 1,
        "PUT manifest": 1,
        "DELETE": 2,
    }
    with s3_server.server().counted() as loaded:
        assert OneRank(run, tmp_path / "other").restored() == 3
    # what it does not have: two manifests and one file
    assert kinds(loaded) == {"LIST": 1, "GET manifest": 2, "GET metrics": 1, "GET shard": 1}


def kinds(requests: list[s3_server.Request]) -> Counter[str]:
    def kind(each: s3_server.Request) -> str:
        if each.query.startswith("list-type"):
            return "LIST"
        name = re.split("[-.]", each.path.rpartition("/")[2])[0]
        return "DELETE" if each.query == "delete" else f"{each.method} {name}"

    return Counter(map(kind, requests))


def test_the_chunks_of_a_large_shard_are_one_request_each(run: Remote, tmp_path: Path) -> None:
    one = OneRank(run, tmp_path)
    tensors = {
        TensorBox.full(f"model/{index}", (1 << 15,)): torch.zeros(1 << 15) for index in range(3)
    }
    one.checkpointer.save(1, tensors, **CONTENT)
    other = OneRank(run, tmp_path / "other")
    newest = checkpoint_to_resume(other.folder / "checkpoints")
    assert newest is not None
    with s3_server.server().counted() as loaded:
        tensor = read_box(newest, read_manifest(newest), box=TensorBox.full("model/1", (1 << 15,)))
    assert not tensor.any() and len(loaded) == 2, (
        "the head of the file, and the box that was wanted"
    )


def test_a_save_blocks_for_the_copy_alone(run: Remote, tmp_path: Path) -> None:
    """Its part before the thread makes no request, so it takes as long as that of a save on a disk."""
    one, may_reply = OneRank(run, tmp_path), threading.Event()

    def wait(request: s3_server.Request) -> None:
        assert may_reply.wait(60)

    with s3_server.server().faults(wait):
        one.checkpointer.start_save(1, state(1), **CONTENT)
        assert one.checkpointer.poll() is None
        may_reply.set()
        one.checkpointer.wait()
    assert one.restored() == 1


def test_the_calls_of_the_training_thread_are_those_of_a_save_on_a_disk(
    run: Remote, tmp_path: Path
) -> None:
    """Recorded by the interpreter: every Python function and every built-in one, from the call to
    the next step.
    """
    one, recorded = OneRank(run, tmp_path), []
    disk = Checkpointer(tmp_path / "disk", group=Group.single_rank("world"), keep_last=2)
    for checkpointer in (disk, one.checkpointer):
        checkpointer.start_save(1, state(1), **CONTENT)  # the first one allocates the copies
        checkpointer.wait()
        calls: list[str] = []
        record(
            calls, lambda checkpointer=checkpointer: checkpointer.start_save(2, state(2), **CONTENT)
        )
        checkpointer.wait()
        recorded.append(calls)
    assert recorded[0] == recorded[1] and len(recorded[0]) > 100


OF_FREED_THREAD = "WeakSet.__init__.<locals>._remove"


def record(calls: list[str], function: Callable[[], None]) -> None:
    """Call a function with the names of all calls of this thread recorded.

    Without collections, which call the callbacks of weak references to what they free, and without
    the callback of the thread of the last save, which is freed by whoever lets go of it last.
    """

    def note(frame: Any, event: str, argument: Any) -> None:
        if event not in ("call", "c_call"):
            return
        name = frame.f_code.co_qualname if event == "call" else argument.__qualname__
        if OF_FREED_THREAD not in (frame.f_code.co_qualname, name):
            calls.append(name)

    with without_collection():
        sys.setprofile(note)
        try:
            function()
        finally:
            sys.setprofile(None)


def test_what_arrives_damaged_is_uploaded_again_and_then_refused(
    run: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, real, damages = OneRank(run, tmp_path), Remote.put, iter([True, False, False, False])

    def put(remote: Remote, file: Path) -> None:
        if remote.path.endswith("safetensors") and next(damages, True):
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file = tmp_path / "damaged"
            file.write_bytes(data)
        real(remote, file)

    monkeypatch.setattr(Remote, "put", put)
    one.save(1)
    assert OneRank(run, tmp_path / "other").restored() == 1
    one.save(2, 3)
    with pytest.raises(StorageFault, match="uploaded 3 times, it differs.*crc32"):
        one.save(4)
    assert OneRank(run, tmp_path / "third").restored() == 3 and one.restored() == 4, (
        "the folder has it"
    )


def test_a_byte_that_is_damaged_on_the_way_back_is_read_again(
    run: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, real, damages = OneRank(run, tmp_path), Remote.read, iter([True])

    def read(remote: Remote, start: int = 0, stop: int | None = None) -> bytes:
        data = bytearray(real(remote, start, stop))
        if remote.path.endswith("safetensors") and next(damages, False):
            data[-1] ^= 1
        return bytes(data)

    monkeypatch.setattr(Remote, "read", read)
    with s3_server.server().counted() as requests:
        one.save(1)
    counts = kinds(requests)
    assert counts["PUT shard"] == 1 and counts["GET shard"] == 2


@pytest.mark.parametrize("shares_disk", [True, False], ids=["one-machine", "machine-per-rank"])
def test_any_number_of_ranks_loads_what_four_have_saved(
    run: Remote, tmp_path: Path, shares_disk: bool
) -> None:
    run = run / str(shares_disk)
    run_ranks(4, save_twice, run, tmp_path, shares_disk)
    assert run_ranks(3, load_elsewhere, run, tmp_path / "other") == [1, 1, 1]


def remote_checkpointer(ctx: ParallelContext, run: Remote, machine: Path) -> RemoteCheckpointer:
    local = Checkpointer(
        machine / run.path / "checkpoints", group=ctx.control, keep_last=1, timeout_s=60.0
    )
    return RemoteCheckpointer(local, run, store=ctx.store)


def save_twice(ctx: ParallelContext, run: Remote, folder: Path, shares_disk: bool) -> None:
    own = remote_checkpointer(ctx, run, folder if shares_disk else folder / f"{ctx.rank}")
    tensors = shares(ctx.rank, 4)
    for step in (0, 1):
        own.start_save(step, tensors, **CONTENT)
        path = own.wait()
    assert path is not None
    targets = {box: torch.zeros_like(tensor) for box, tensor in tensors.items()}
    own.restore(path, targets)  # of a machine without the other shards
    assert all(torch.equal(targets[box], tensor) for box, tensor in tensors.items())
    if not shares_disk and ctx.rank:
        assert not [*own.folder.glob("*/shard*")] and not [*own.folder.glob("*.tmp")]


def load_elsewhere(ctx: ParallelContext, run: Remote, machine: Path) -> int:
    own = remote_checkpointer(ctx, run, machine)
    run_on_first(ctx.control, lambda: mirror(run, machine / run.path))
    truths = shares(ctx.rank, 3)
    targets = {box: torch.zeros_like(tensor) for box, tensor in truths.items()}
    newest = own.latest()
    assert newest is not None
    step = own.restore(newest, targets).step
    assert all(torch.equal(targets[box], tensor) for box, tensor in truths.items())
    return step


def test_a_rank_that_cannot_upload_ends_the_save_on_all(run: Remote, tmp_path: Path) -> None:
    with s3_server.server().faults(lambda each: "denied" if "shard-00001" in each.path else None):
        errors = run_ranks(2, fail_to_save, run, tmp_path)
    assert all("shard-00001" in error and "Access Denied" in error for error in errors), errors
    assert not any(name.endswith("manifest.json") for name in run.sizes())


def fail_to_save(ctx: ParallelContext, run: Remote, folder: Path) -> str:
    own = remote_checkpointer(ctx, run, folder)
    with pytest.raises(StorageFault) as caught:
        own.save(0, shares(ctx.rank, 2), **CONTENT)
    return str(caught.value)


def test_what_the_folder_alone_has_is_uploaded_at_the_end(run: Remote, tmp_path: Path) -> None:
    """As after a kill between the commit in the folder and that in the bucket, or a network that
    was away.
    """
    one = OneRank(run, tmp_path / "one")
    one.save(1, 2)
    with s3_server.server().faults(lambda each: "denied"), suppress(StorageFault):
        one.save(3)
    (one.folder / "metrics.jsonl").write_text("{}\n")
    same = OneRank(run, tmp_path / "one")
    same.checkpointer.finish()
    assert (
        names(run) == ["step-00000002", "step-00000003"]
        and OneRank(run, tmp_path / "two").restored() == 3
    )
    with s3_server.server().counted() as more:
        same.checkpointer.finish()
    assert not more
    with s3_server.server().counted() as requests:
        (one.folder / "metrics.jsonl").write_text("{}\n{}\n")
        same.save(4)
    order = [each.path.rpartition("/")[2] for each in requests if each.method == "PUT"]
    assert order[1:] == ["metrics.jsonl", "manifest.json"], "a resume from the step needs the rows"


def test_random_faults_in_saves_lose_nothing_and_are_named(run: Remote, tmp_path: Path) -> None:
    """A share of them; with the drills, two hundred."""
    assert storm(run, tmp_path, num_faults=200 if os.environ.get(DRILLS) else 25, seed=1) > 0


def storm(run: Remote, folder: Path, *, num_faults: int, seed: int) -> int:
    """Save among faults, on machines that are lost now and then; the number of saves that were
    refused.
    """
    draw, faults, refused, step, committed, machine = random.Random(seed), 0, 0, 0, None, 0
    one = OneRank(run, folder / "0")

    def fault(request: s3_server.Request) -> str | None:
        nonlocal faults
        kind = draw.choice(["500", "slow", "truncated", "reset", "denied", *[None] * 10])
        faults += kind is not None
        return kind

    while faults < num_faults:
        step += 1
        with s3_server.server().faults(fault):
            try:
                one.save(step)
                committed = step
            except StorageFault as error:
                refused += 1
                assert error.why and error.fix and "test-secret" not in str(error)
        if draw.random() < 0.3:
            machine += 1
            one = OneRank(run, folder / f"{machine}")
            restored = one.restored()
            assert committed is None or restored is not None and committed <= restored <= step
    return refused
