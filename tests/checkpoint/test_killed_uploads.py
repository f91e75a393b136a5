"""SIGKILL of ranks during an upload: the bucket has the last committed checkpoint, whole, and the
run goes on.

Ranks are killed between two calls of the disk, two requests or two parts of a shard, and by the
server when a request has arrived. `scripts/kill_drill` with an address kills whole runs.
"""

import os
import signal
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from nanotrain.checkpoint.checkpointer import Checkpointer
from nanotrain.checkpoint.read import read_global_tensors
from nanotrain.checkpoint.remote_checkpointer import RemoteCheckpointer
from nanotrain.checkpoint.store import checkpoint_to_resume, read_manifest
from nanotrain.checkpoint.stored import mirror
from nanotrain.comm.group import Group
from nanotrain.storage import remote
from nanotrain.storage.remote import Remote, parse
from tests import s3_server
from tests.checkpoint import test_killed_ranks as ranks
from tests.harness import HANG_S, forkserver

INSTANTS = 0.4, 0.8  # shares of the calls, most of which send a part of a shard
# of the first tensor: a request for the shard of rank 0, and two parts of that of rank 1
ROWS = 2_400_000
PART_BYTES = 5 * 2**20  # the least that a provider takes


@pytest.fixture(scope="module")
def run() -> Remote:
    return parse(s3_server.make_bucket("kills")) / "run"


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ranks.TENSORS, "model/first", ROWS)


def test_a_kill_of_one_or_both_ranks_leaves_a_whole_checkpoint_in_the_bucket(
    run: Remote, tmp_path: Path
) -> None:
    counted = ranks.Kill(tmp_path / "counted", True, run / "counted")
    in_a_process(kill_at_instants, counted, folder=tmp_path)
    kills = [
        tmp_path / f"{rank}-{number}"
        for rank in range(ranks.SIZE)
        for number in range(len(INSTANTS))
    ]
    steps = [check(run / folder.name, folder) for folder in kills]
    assert 2 in steps and set(steps) <= {2, 3}, "most instants are before the new manifest"


def test_a_kill_by_the_server_at_each_request_leaves_a_whole_checkpoint(
    run: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that has arrived is carried out, or is never answered."""
    monkeypatch.setitem(ranks.TENSORS, "model/first", 90)
    steps, number, codes = [], 0, [-signal.SIGKILL]
    while codes == [-signal.SIGKILL]:
        folder, calls = tmp_path / f"{number}", iter(range(10**6))
        folder.mkdir()
        process = forkserver().Process(
            target=save_alone, args=(environment(), run / f"alone-{number}", folder)
        )

        def kill(
            request: s3_server.Request,
            calls: Any = calls,
            number: int = number,
            process: Any = process,
        ) -> Any:
            is_counted = "/checkpoints/step-00000003" in request.path or request.query == "delete"
            if is_counted and next(calls) == number:
                os.kill(process.pid, signal.SIGKILL)
                return "reset" if number % 2 else None
            return None

        with s3_server.server().faults(kill):
            process.start()
            process.join(HANG_S)
        codes = [process.exitcode]
        steps.append(check(run / f"alone-{number}", folder))
        number += 1
    assert codes == [0] and number > 5 and steps == sorted(steps) and set(steps) == {2, 3}, steps


def check(run: Remote, folder: Path) -> int:
    """The step of the checkpoint in the bucket; the run goes on from it, or on the same machine
    from a newer one.
    """
    steps, other = [], folder / "other"
    for machine in (other, folder):
        mirror(run, machine / run.path)
        newest = checkpoint_to_resume(machine / run.path / "checkpoints")
        assert newest is not None, f"{run}: no checkpoint is left"
        steps.append(read_manifest(newest).step)
        for name, tensor in read_global_tensors(newest, list(ranks.TENSORS)):  # compares checksums
            assert (tensor == steps[-1]).all() and len(tensor) == ranks.TENSORS[name]
    assert steps[0] <= steps[1]
    write_alone(run, folder if steps[1] % 2 else other, step=4)
    assert {name.split("/")[1] for name in run.sizes()} == {"step-00000004"}
    return steps[0]


def write_alone(run: Remote, machine: Path, *, step: int) -> None:
    local = Checkpointer(
        machine / run.path / "checkpoints", group=Group.single_rank("world"), keep_last=1
    )
    ranks.write(RemoteCheckpointer(local, run, store=HashStore()), step)


def save_alone(variables: dict[str, str], run: Remote, folder: Path) -> None:
    """One rank saves twice."""
    os.environ |= variables
    for step in (2, 3):
        write_alone(run, folder, step=step)


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


def in_a_process(target: Any, *args: Any, folder: Path) -> None:
    """Call a function in a process without threads, which may be forked."""
    process = forkserver().Process(target=target, args=(environment(), *args))
    process.start()
    process.join(HANG_S)
    assert not process.is_alive(), f"the ranks hang; their folders are in {folder}"
    assert process.exitcode == 0, (folder / "error").read_text()


def kill_at_instants(variables: dict[str, str], counted: ranks.Kill) -> None:
    import s3fs  # noqa: F401  before the forks

    os.environ |= variables
    ranks.TENSORS["model/first"], remote.PART_BYTES = ROWS, PART_BYTES
    torch.set_num_threads(1)
    try:
        assert ranks.save_on_two_ranks(counted) == [0, 0]
        list(ranks.sampled(counted, INSTANTS))
    except BaseException:
        (counted.folder.parent / "error").write_text(traceback.format_exc())
        raise
