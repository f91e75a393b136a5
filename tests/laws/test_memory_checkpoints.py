"""Law L3 with checkpoints in the memory of hosts: a run that dies and starts from them was never
stopped, to the bit; what is lost or damaged comes from the partner or from the disk.
"""

import contextlib
import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from nanotrain.checkpoint import run_memory
from nanotrain.checkpoint.host_folder import run_key
from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.load import load
from nanotrain.plan.plan import plan_run
from nanotrain.topology.partners import Host
from nanotrain.train.fit import fit
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.inputs import open_inputs
from nanotrain.train.open_run import open_run
from nanotrain.train.run import Run
from nanotrain.train.step_report import StepReport
from tests.harness import run_ranks
from tests.laws.command_line import (
    arguments,
    assert_same_to_the_bit,
    run_command_lines,
    steps_of,
)

EIGHT = "--train-iters 8 --micro-batch-size 1 --save-interval 5"
MEMORY = "--memory-checkpoint-interval 2 --memory-checkpoint-dir"
LAYOUTS = {
    "two ranks": (2, "--data-parallel-sharding-strategy optim --params-dtype bf16"),
    "tp 2": (4, "--tensor-model-parallel-size 2 --data-parallel-sharding-strategy optim_grads"),
    "two instances": (4, "--num-distributed-optimizer-instances 2"),
}
DIED_AFTER = 7  # in memory: step 6; on the disk: step 5
pytestmark = pytest.mark.timeout(600)


class Died(RuntimeError):
    """The end of a process that nothing handles."""


class DieAfter(Hook):
    """Ends every rank after a step, as a kill of all processes does: nothing more is saved."""

    def __init__(self, step: int) -> None:
        self._step = step

    def after_step(self, run: Run, report: StepReport) -> None:
        if report.step == self._step:
            raise Died


class Lines(logging.Handler):
    """Keeps what this thread logs."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if threading.get_ident() == self._thread:
            self.texts.append(record.getMessage())


def two_hosts(control: Group) -> tuple[Host, ...]:
    per_host = max(1, control.size // 2)
    return tuple(Host(f"host-{rank // per_host}") for rank in range(control.size))


def train(ctx: ParallelContext, line: Sequence[str], dies_after: int | None) -> list[str]:
    """Run a command line on this rank of two hosts; returns what it logs."""
    run_memory.gather_hosts = two_hosts
    lines = Lines()
    logger = logging.getLogger("nanotrain")
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    config, inputs = open_inputs(load(line))
    plan = plan_run(config, ctx.topology.world_size, rank=ctx.rank)
    context = ParallelContext.attach(plan.topology)
    with contextlib.suppress(Died), open_run(plan, inputs, context=context) as (run, hooks):
        fit(run, hooks if dies_after is None else [*hooks, DieAfter(dies_after)])
    return lines.texts


class Dead:
    """A run that died, its memory, and the run that was never stopped."""

    def __init__(self, folder: Path, num_ranks: int, how: str) -> None:
        self.full, self.run, self.memory = folder / "full", folder / "run", folder / "memory"
        self.num_ranks, self.how = num_ranks, how
        self.tokens = folder / "tokens"
        self.memory.mkdir()
        run_ranks(num_ranks, run_command_lines, arguments(self.full, EIGHT, how))
        run_ranks(num_ranks, train, self.line(), DIED_AFTER)

    def copy(self, folder: Path) -> "Dead":
        """The same run in another folder."""
        other = object.__new__(Dead)
        other.__dict__ |= self.__dict__
        other.run, other.memory = folder / "run", folder / "memory"
        shutil.copytree(self.run, other.run)
        shutil.copytree(self.memory, other.memory)
        for path in other.host_folders.values():
            path.rename(path.parent / other.key)
        return other

    @property
    def key(self) -> str:
        first, *_ = (self.run / "starts.jsonl").read_text().splitlines()
        return run_key(str(self.run.resolve()), first)

    @property
    def host_folders(self) -> dict[str, Path]:
        """The folder of the run on each host."""
        return {path.parent.name: path for path in self.memory.glob("nanotrain-*/host-*/*-*")}

    def line(self, how: str | None = None) -> list[str]:
        tokens = f"--data-path {self.tokens}"
        return arguments(self.run, EIGHT, how or self.how, f"{MEMORY} {self.memory}", tokens)

    def restart(self, how: str | None = None, *, num_ranks: int | None = None) -> str:
        """Start again and train to the end; what the first rank logs."""
        num_ranks = num_ranks or self.num_ranks
        logged = run_ranks(num_ranks, train, self.line(how), None)[0]
        left = set() if num_ranks > 1 else {"host-1"}  # without ranks
        assert self.host_folders.keys() <= left, "the folders are removed at the end of a run"
        return "\n".join(logged)


@pytest.fixture(scope="module")
def dead_run(tmp_path_factory: pytest.TempPathFactory) -> Dead:
    return Dead(tmp_path_factory.mktemp("dead"), *LAYOUTS["two ranks"])


@pytest.fixture
def dead(dead_run: Dead, tmp_path: Path) -> Dead:
    return dead_run.copy(tmp_path)


@pytest.mark.parametrize("layout", ["tp 2", "two instances"])
def test_a_start_from_memory_was_never_stopped(tmp_path: Path, layout: str) -> None:
    dead = Dead(tmp_path, *LAYOUTS[layout])

    logged = dead.restart()

    assert "resuming from memory: step-00000006, " in logged
    assert_same_to_the_bit(dead.run, dead.full)


def test_each_shard_is_on_its_host_and_on_that_of_its_partner(dead: Dead) -> None:
    for folder in dead.host_folders.values():
        [step] = folder.glob("step-*")
        assert step.name == "step-00000006"
        assert len(list(step.glob("shard-*"))) == 2

    assert "2 of 2 shards from the hosts that wrote them" in dead.restart()
    assert_same_to_the_bit(dead.run, dead.full)


def test_a_lost_host_is_restored_from_the_partners(dead: Dead) -> None:
    shutil.rmtree(dead.host_folders["host-1"].parent)

    logged = dead.restart()

    assert "1 of 2 shards from the hosts that wrote them, 1 from partners of host-1" in logged
    assert_same_to_the_bit(dead.run, dead.full)


def test_shards_are_read_from_the_host_that_has_them(dead: Dead) -> None:
    """Neither host has both: a rank reads the other one through the server."""
    for host, name in (
        ("host-0", "shard-00000-of-00002.safetensors"),
        ("host-1", "shard-00001-of-00002.safetensors"),
    ):
        (dead.host_folders[host] / "step-00000006" / name).unlink()

    assert "2 from partners of host-0, host-1" in dead.restart()
    assert_same_to_the_bit(dead.run, dead.full)


@pytest.mark.parametrize(
    ("num_ranks", "how"),
    [(1, "--params-dtype bf16"), (4, f"{LAYOUTS['tp 2'][1]} --params-dtype bf16")],
    ids=["one rank", "four ranks with tp 2"],
)
def test_another_layout_goes_on_from_memory(dead: Dead, num_ranks: int, how: str) -> None:
    assert "resuming from memory: step-00000006" in dead.restart(how, num_ranks=num_ranks)

    losses, expected = ([row["loss"] for row in steps_of(run)] for run in (dead.run, dead.full))
    assert losses[:6] == expected[:6]
    assert losses == pytest.approx(expected, rel=2e-3)  # bf16 sums in another order


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)


def damage_one_copy(dead: Dead) -> None:
    damage(dead.host_folders["host-0"] / "step-00000006" / "shard-00000-of-00002.safetensors")


def test_a_damaged_shard_comes_from_the_partner(dead: Dead) -> None:
    damage_one_copy(dead)

    logged = dead.restart()

    assert "is not used: its bytes in" in logged or "1 from partners of host-0" in logged
    assert "resuming from memory: step-00000006" in logged
    assert_same_to_the_bit(dead.run, dead.full)


def damage_both_copies(dead: Dead) -> None:
    for folder in dead.host_folders.values():
        damage(folder / "step-00000006" / "shard-00000-of-00002.safetensors")


def leave_half_written(dead: Dead) -> None:
    for folder in dead.host_folders.values():
        (folder / "step-00000006").rename(folder / "step-00000006.tmp")


def lose_all(dead: Dead) -> None:
    for folder in dead.host_folders.values():
        shutil.rmtree(folder)


def change_manifest(dead: Dead) -> None:
    for folder in dead.host_folders.values():
        manifest = folder / "step-00000006" / "manifest.json"
        manifest.write_text(
            manifest.read_text().replace('"consumed_samples": 72', '"consumed_samples": 60')
        )


def keep_of_another_run(dead: Dead) -> None:
    for folder in dead.host_folders.values():
        folder.rename(folder.parent / f"{folder.name.partition('-')[0]}-{16 * '0'}")


@pytest.mark.parametrize(
    "harm",
    [damage_both_copies, leave_half_written, lose_all, change_manifest, keep_of_another_run],
)
def test_what_cannot_be_trusted_is_refused_and_the_disk_is_used(
    dead: Dead, harm: Callable[[Dead], None]
) -> None:
    harm(dead)

    logged = dead.restart()

    assert "resuming from memory" not in logged
    assert "step-00000005: step 5" in logged  # loaded from the run folder
    assert_same_to_the_bit(dead.run, dead.full)


def test_an_older_step_than_that_on_the_disk_is_not_used(dead: Dead) -> None:
    saved = dead.run / "checkpoints"
    shutil.copytree(dead.full / "checkpoints" / "step-00000008", saved / "step-00000008")

    assert "resuming from memory" not in dead.restart("--train-iters 9 --params-dtype bf16")


def test_a_step_that_a_later_start_repeated_is_not_used(dead: Dead) -> None:
    """As on a host that comes back after the run began again without it."""
    with (dead.run / "starts.jsonl").open("a") as file:
        file.write('{"step": 5}\n')

    assert (
        "step-00000006 in memory is not used: a later start went on from step 5" in dead.restart()
    )


def test_changed_data_starts_from_the_disk(dead: Dead) -> None:
    logged = dead.restart(f"{dead.how} --seed 7 --allow-data-changes")

    assert "step-00000006 in memory is not used: settings of the data changed since" in logged


def test_without_resuming_nothing_of_the_memory_is_used_or_left(dead: Dead) -> None:
    assert "resuming from memory" not in dead.restart(f"{dead.how} --no-auto-resume")
    assert [row["step"] for row in steps_of(dead.run)] == list(range(1, 9))
