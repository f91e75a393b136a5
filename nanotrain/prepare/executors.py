"""Executors that write the parts of a corpus: processes of this machine, a Ray cluster, or Slurm.

    EXECUTORS    one function per name of --executor:
                 (job, missing chunks, workers=) -> planned bytes of complete parts

Parts lie in a folder that all machines share, and each is complete or absent. So an executor
decides about time, never about bytes, and whatever it lost is written by the next start.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from shlex import join, quote
from typing import Any

from nanotrain.errors import EnvironmentFault, NanotrainError
from nanotrain.log import get_logger
from nanotrain.prepare.chunks import InputChunk
from nanotrain.prepare.options import PrepareOptions
from nanotrain.prepare.parts import PartJob, is_complete, write_part, write_parts
from nanotrain.quantities import count_of

log = get_logger(__name__)
Numbered = tuple[int, InputChunk]
POLL_S = 5.0  # seconds between looks at the parts
GONE_S = 60.0  # seconds after which a job that Slurm does not list has ended


def on_ray(job: PartJob, missing: Iterable[Numbered], *, workers: int) -> Iterator[int]:
    """One task per part on a running Ray cluster; tasks of a lost worker run again.

    Raises:
        EnvironmentFault: Ray is not installed, or no cluster runs.
        DataError: a document that cannot be read or encoded.
    """
    ray = _connect_ray()
    task = ray.remote(max_retries=-1)(write_part)
    options = replace(job.options, output=job.options.output.absolute())
    job = replace(job, options=options)
    waiting = map(_with_absolute_paths, missing)
    running = [task.remote(job, numbered) for numbered in islice(waiting, workers)]
    while running:
        done, running = ray.wait(running)
        running += [task.remote(job, numbered) for numbered in islice(waiting, len(done))]
        for outcome in ray.get(done):
            if isinstance(outcome, NanotrainError):
                raise outcome
            yield outcome


def _connect_ray() -> Any:
    """The package `ray`, connected to a running cluster."""
    try:
        import ray
    except ImportError:
        fix = "pip install 'nanotrain[ray]'"
        raise EnvironmentFault(
            "--executor ray needs Ray", why="it is not installed", fix=fix
        ) from None
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError as error:
            fix = "start one with `ray start --head`, or set RAY_ADDRESS"
            raise EnvironmentFault(
                "no Ray cluster was found", why=str(error).splitlines()[0], fix=fix
            ) from None
    return ray


def on_slurm(job: PartJob, missing: Iterable[Numbered], *, workers: int) -> Iterator[int]:
    """An array of `workers` tasks that write shares of the parts; this process waits for them.

    Raises:
        EnvironmentFault: there is no sbatch, it refuses the job, or the job ended without all
            parts.
    """
    unfinished = dict(missing)
    if not unfinished:
        return
    folder = job.options.parts
    workers = min(workers, len(unfinished))
    array = _submit(job.options, workers)
    output = folder / "slurm-*.out"
    log.info("Slurm job %s tokenizes in %d tasks; its output is %s", array, workers, output)
    ended_at: float | None = None
    while True:
        for number in list(unfinished):
            if is_complete(folder, number):
                yield unfinished.pop(number).num_bytes
        if not unfinished:
            return
        if _is_queued(array):
            ended_at = None
        elif ended_at is None:
            ended_at = time.monotonic()
        # files of other machines appear late
        if ended_at is not None and time.monotonic() - ended_at > GONE_S:
            parts = count_of(len(unfinished), "part", verb="is")
            raise EnvironmentFault(
                f"the Slurm job {array} has ended, and {parts} missing",
                why=f"its tasks wrote why to {output}",
                fix="run the same command again; complete parts are kept",
            )
        time.sleep(POLL_S)


def _submit(options: PrepareOptions, workers: int) -> str:
    """Start the array; returns the id of the job."""
    program = shutil.which("nanotrain") or "nanotrain"
    part, _, *words = options.for_part(0, workers)
    # a shell computes the number of the task
    part_arguments = f"{part} $((SLURM_ARRAY_TASK_ID))/{workers}"
    command = f"exec {quote(program)} prepare {part_arguments} {join(words)}"
    script = f"#!/bin/sh\ncd {quote(os.getcwd())}\n{command}"
    line = [
        "sbatch",
        "--parsable",
        f"--array=1-{workers}",
        f"--output={options.parts}/slurm-%A-%a.out",
        *options.sbatch,
    ]
    try:
        submitted = subprocess.run(line, input=script, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        fix = "run it where Slurm is, or tokenize shares with --part I/N"
        raise EnvironmentFault(
            "--executor slurm needs sbatch", why="it is not on the PATH", fix=fix
        ) from None
    except subprocess.CalledProcessError as error:
        why = error.stderr.strip() or f"exit code {error.returncode}"
        raise EnvironmentFault("sbatch refused the job", why=why, fix="correct --sbatch") from None
    return submitted.stdout.strip().split(";")[0]


def _is_queued(array: str) -> bool:
    """Whether Slurm still has tasks of a job; True where it cannot be asked."""
    line = ["squeue", "--noheader", "--jobs", array]
    reply = subprocess.run(line, capture_output=True, text=True, check=False)
    if reply.stdout.strip():
        return True
    return reply.returncode != 0 and "Invalid job id" not in reply.stderr


def _with_absolute_paths(numbered: Numbered) -> Numbered:
    """A chunk whose files a process in any folder finds."""
    number, chunk = numbered
    return number, replace(chunk, files=tuple(str(Path(file).absolute()) for file in chunk.files))


Executor = Callable[..., Iterator[int]]
EXECUTORS: dict[str, Executor] = {"local": write_parts, "ray": on_ray, "slurm": on_slurm}
