"""One job per run folder: the second is refused with the owner's name, and a killed owner's lock is
free.
"""

import errno
import fcntl
import json
import os
import platform
import re
import signal
import subprocess
import sys

import pytest

from nanotrain.errors import EnvironmentFault
from nanotrain.runs.lock import LOCK_NAME, hold_lock, is_in_use, lock_run
from tests.harness import HANG_S

HOLDER = """
import sys, time, pathlib
from nanotrain.runs.lock import lock_run
with lock_run(pathlib.Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_a_second_job_is_refused_and_a_killed_owner_frees_the_folder(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout.readline() == "locked\n"
        with pytest.raises(EnvironmentFault) as error, lock_run(tmp_path, wait_s=0.0):
            pass
        named = rf"is in use: process {owner.pid} on {re.escape(platform.node())}, started \d{{4}}-.* holds its lock"
        assert re.search(named, str(error.value)) and "--run-dir" in error.value.fix
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    with lock_run(tmp_path, wait_s=HANG_S):
        assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()


def test_a_folder_is_in_use_while_its_lock_is_held(tmp_path):
    assert not is_in_use(tmp_path)
    with lock_run(tmp_path, wait_s=0.0):
        assert is_in_use(tmp_path)
    assert not is_in_use(tmp_path)


def test_the_lock_is_released_at_the_end_and_after_an_error(tmp_path):
    for _ in range(2):
        with pytest.raises(ValueError), lock_run(tmp_path, wait_s=0.0):
            raise ValueError


def test_a_job_waits_for_an_owner_that_is_ending(tmp_path):
    command = [sys.executable, "-c", HOLDER.replace("600", "0.5"), str(tmp_path)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "locked\n"
    with lock_run(tmp_path, wait_s=HANG_S):
        pass
    assert owner.wait() == 0


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, logged):
    def unsupported(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with lock_run(tmp_path):
        pass
    assert re.search("cannot be locked .No locks available.: a second job", logged[0])


def test_an_unreadable_owner_is_another_process(tmp_path):
    with lock_run(tmp_path):
        (tmp_path / LOCK_NAME).write_bytes(b"\xff{")
        with (
            pytest.raises(EnvironmentFault, match="another process holds its lock"),
            lock_run(tmp_path, wait_s=0.0),
        ):
            pass


def test_a_lock_file_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / "target").touch()
    (tmp_path / LOCK_NAME).symlink_to(tmp_path / "target")
    with pytest.raises(EnvironmentFault, match="is a symbolic link"), lock_run(tmp_path):
        pass
    assert not (tmp_path / "target").read_text()


def hold(path, wait_s=0.0):
    return hold_lock(path, what="the corpus c", fix="wait", wait_s=wait_s, is_removed=True)


def test_a_removed_lock_file_is_no_lock(tmp_path, monkeypatch):
    """A job that opened the file of an owner which then ended would lock a file that no other job
    finds.
    """
    path, real = tmp_path / "lock", fcntl.flock
    stale = []

    def end_the_owner_first(file, operation):
        if not stale:
            stale.append(os.fstat(file).st_ino)
            path.rename(tmp_path / "removed")
        real(file, operation)

    path.touch()
    monkeypatch.setattr(fcntl, "flock", end_the_owner_first)
    with hold(path, wait_s=30.0):
        assert json.loads(path.read_text())["pid"] == os.getpid() and path.stat().st_ino != stale[0]
        with (
            pytest.raises(
                EnvironmentFault, match=f"the corpus c is in use: process {os.getpid()} on"
            ),
            hold(path),
        ):
            pass
    assert not path.exists()


@pytest.mark.parametrize("function", ["flock", "fstat"])
def test_a_file_that_an_owner_on_another_host_removed_is_opened_again(
    tmp_path, monkeypatch, function
):
    module, calls = fcntl if function == "flock" else os, []
    real = getattr(module, function)

    def fail_first(*args):
        calls.append(args)
        if len(calls) == 1:
            raise OSError(errno.ESTALE, "Stale file handle")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, function, fail_first)
        with hold(tmp_path / "lock", wait_s=30.0):
            assert (
                len(calls) == 2
                and json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
            )


def test_a_lock_in_a_folder_that_vanished_ends_as_its_owner_does(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError), hold(tmp_path / "folder" / "lock"):
        (tmp_path / "folder").rename(tmp_path / "other")
        raise ValueError
