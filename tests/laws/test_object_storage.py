"""Runs in an S3 bucket equal runs on a disk, to the bit, over saves, resumes on other machines and other layouts."""

from pathlib import Path

import pytest

from nanotrain.checkpoint.stored import fetched
from nanotrain.storage.remote import parse
from tests import s3_server
from tests.harness import run_ranks
from tests.laws.command_line import arguments, assert_same_to_the_bit, run_command_lines

SIX = "--train-iters 6 --micro-batch-size 3 --async-save --keep-last 1"


@pytest.fixture(scope="module")
def bucket() -> str:
    return s3_server.make_bucket("laws")


def stored(run: str, machine: Path, *more: str) -> list[str]:
    """The command line of a run in object storage, started on a machine."""
    return [*arguments(machine.parent / "unused", *more), f"train.run_dir={run}", f"checkpoint.staging_dir={machine}"]


def test_a_run_that_is_resumed_on_another_machine_equals_one_on_a_disk(bucket: str, tmp_path: Path) -> None:
    full, run = tmp_path / "full", f"{bucket}/a/run"
    lines = [stored(run, tmp_path / name, SIX, "--exit-interval 3") for name in ("one", "two")]
    run_ranks(2, run_command_lines, arguments(full, SIX), *lines, strategy="optim")
    assert_same_to_the_bit(fetched(parse(run), tmp_path / "back"), full)
