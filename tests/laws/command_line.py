"""Runs of the real command line, under torchrun or on the ranks of the test harness.

arguments(folder, *more)            the command line of a tiny model on a small token file
ForkedRanks(line, n)                the processes of the program, their imports done; also of another program
train_under_torchrun(line)          the same under torchrun's agent: 2 s of CPU, torchrun itself takes 14 s for imports
run_command_lines(ctx, *lines)      for run_ranks: the same code with the same arguments, 0.1 s per line
steps_of, saved_tensors             the results: lines of metrics.jsonl, tensors of the newest checkpoint
"""

import contextlib
import io
import json
import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from nanotrain.checkpoint.read import read_global_tensors
from nanotrain.checkpoint.store import find_checkpoint, read_manifest
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.load import Loaded, load
from nanotrain.config.rules.check import validate_for_world
from nanotrain.plan.plan import plan_run
from nanotrain.train import main as entry
from nanotrain.train.fit import fit
from nanotrain.train.inputs import open_inputs
from nanotrain.train.open_run import open_run
from tests.harness import HANG_S, forkserver
from tests.laws.megatron_file import write_tokens

_LOADED: dict[tuple[int, tuple[str, ...]], Loaded] = {}
_LOADING = threading.Lock()
VOCAB_SIZE, SEQ_LENGTH, GLOBAL_BATCH = 100, 16, 12
NUM_TOKENS = 1500  # 93 samples, so ten steps of twelve reach the second epoch
SIZES = f"""--num-layers 2 --hidden-size 24 --num-attention-heads 2 --num-query-groups 1 --ddp-bucket-size 3000
    --seq-length {SEQ_LENGTH} --vocab-size {VOCAB_SIZE} --global-batch-size {GLOBAL_BATCH}"""
QUIET = "--num-workers 0 --eval-interval 0 --generate-tokens 0 --no-report --split 1,0,0"


def arguments(run_dir: Path, *more: str) -> list[str]:
    """A command line; later arguments win. The token file is beside the run folder, made when
    missing.
    """
    prefix = run_dir.parent / "tokens"
    if not prefix.with_suffix(".idx").exists():
        write_tokens(prefix, random_tokens())
    folders = ["--data-path", str(prefix), f"train.run_dir={run_dir}"]
    return [
        *f"+config=tiny {SIZES} {QUIET}".split(),
        *folders,
        *(word for text in more for word in text.split()),
    ]


def random_tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB_SIZE, NUM_TOKENS).astype(np.uint16)


def train_under_torchrun(line: Sequence[str], folder: Path) -> None:
    """Train on two ranks, forked with their imports done, under torchrun's agent, which is this
    process.

    Args:
        line: arguments of the program.
        folder: for the files of standard output and standard error, `std*.log` of ranks and `agent`
            of the agent.
    """
    folder.mkdir()
    with (folder / "agent").open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    logs = DefaultLogsSpecs(log_dir=str(folder), redirects=Std.ALL)
    standalone = {
        "min_nodes": 1,
        "max_nodes": 1,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
    }
    config = LaunchConfig(
        **standalone,
        nproc_per_node=2,
        start_method="forkserver",
        run_id="standalone",
        logs_specs=logs,
    )
    elastic_launch(config, _train_and_end)(line)


def _train_and_end(line: Sequence[str]) -> int:
    """Train one rank, whose process waits until the agent has read its result, or a second.

    An agent that got a signal reads none, and kills ranks after 30 s.
    """
    code = entry.main(line)
    ends = threading.Timer(1.0, os._exit, [0])
    ends.daemon = True
    ends.start()
    return code


@dataclass(frozen=True)
class Finished:
    """Exit code and output of a finished program."""

    exit_code: int
    output: str


class ForkedRanks:
    """Ranks of the program as torchrun starts them, forked from the server of the harness.

    Args:
        line: arguments of the program.
        num_ranks: how many.
        folder: for the file of standard output and standard error; the working directory of
            `program`.
        program: a file that is run instead, as its main module; one rank of it has no torchrun.
    """

    def __init__(
        self, line: Sequence[str], *, folder: Path, num_ranks: int = 2, program: Path | None = None
    ) -> None:
        self._output = folder / "output"
        # As torchrun's agent, this process serves the store: a port that was only looked up may be
        # taken meanwhile.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        world = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "WORLD_SIZE": str(num_ranks),
        }
        world |= {"LOCAL_WORLD_SIZE": str(num_ranks)}
        world |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        world = {} if program and num_ranks == 1 else world
        self.processes = [
            forkserver().Process(
                target=_run_program, args=(line, world, rank, self._output, program)
            )
            for rank in range(num_ranks)
        ]
        for process in self.processes:
            process.start()

    @property
    def is_running(self) -> bool:
        """Whether all of them are."""
        return all(process.is_alive() for process in self.processes)

    def wait(self, *, timeout_s: float = HANG_S) -> Finished:
        """Wait for the end of all; as under torchrun, a rank that fails ends the others.

        The exit code is that of the first failed rank.
        """
        deadline, failed = time.monotonic() + timeout_s, 0
        while any(process.is_alive() for process in self.processes):
            failed = failed or next(
                (process.exitcode for process in self.processes if process.exitcode), 0
            )
            if failed or time.monotonic() > deadline:
                self.end()
            time.sleep(0.02)
        assert time.monotonic() < deadline, (
            f"did not end within {timeout_s} s:\n{self._output.read_text()}"
        )
        failed = failed or next(
            (process.exitcode for process in self.processes if process.exitcode), 0
        )
        return Finished(failed, self._output.read_text())

    def end(self) -> None:
        """Kill them."""
        for process in self.processes:
            process.kill()


def _run_program(
    line: Sequence[str], world: dict[str, str], rank: int, output: Path, program: Path | None
) -> None:
    os.environ |= {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} if world else {}
    with output.open("a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.chdir(output.parent if program else ".")
    # `wait` ends this rank once the first one has ended, however late that is
    entry.WAIT_FOR_FIRST_RANK_S = HANG_S
    exit_code = entry.main(line) if program is None else _run_file(program, line)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _run_file(program: Path, line: Sequence[str]) -> int:
    """Run a file as the interpreter does; its exit code."""
    sys.argv = [str(program), *line]
    try:
        runpy.run_path(str(program), run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def run_command_lines(ctx: ParallelContext, *lines: Sequence[str]) -> None:
    """Run command lines one after the other on this rank."""
    world_size = ctx.topology.world_size
    with contextlib.redirect_stdout(io.StringIO()):
        for number, line in enumerate(lines):
            # the harness's ranks may have no children
            loaded = _load_once(number, (*line, "--num-workers", "0"))
            validate_for_world(loaded.config, world_size)
            config, inputs = open_inputs(loaded)
            plan = plan_run(config, world_size, rank=ctx.rank)
            with open_run(plan, inputs, context=ParallelContext.attach(plan.topology)) as (
                run,
                hooks,
            ):
                fit(run, hooks)


def _load_once(number: int, line: tuple[str, ...]) -> Loaded:
    """What the ranks of a process load for their `number`-th line: ranks that are threads load it
    together.
    """
    with _LOADING:
        if (number, line) not in _LOADED:
            _LOADED[number, line] = load(line)
        return _LOADED[number, line]


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without times and memory."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    kept = (
        "step",
        "loss",
        "grad_norm",
        "lr",
        "consumed_samples",
        "consumed_tokens",
        "skipped",
        "loss_scale",
    )
    return [{name: line[name] for name in kept} for line in lines]


def saved_tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    """Every global tensor of the newest checkpoint."""
    newest = find_checkpoint(run_dir)
    return dict(read_global_tensors(newest, list(read_manifest(newest).tensors)))


def assert_same_to_the_bit(run_dir: Path, reference: Path) -> None:
    """Two runs logged the same steps and wrote the same checkpoint."""
    assert steps_of(run_dir) == steps_of(reference)
    saved, expected = saved_tensors(run_dir), saved_tensors(reference)
    assert saved.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(saved[name], tensor)]
    assert not different, f"{len(different)} of {len(expected)} tensors differ: {different[:3]}"
    objects = [read_manifest(find_checkpoint(folder)).objects for folder in (run_dir, reference)]
    for entries in objects:
        entries.pop("metrics", None)  # the seal of metrics.jsonl, which has times
    assert objects[0] == objects[1]
