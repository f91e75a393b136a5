"""Part files: every chunk of the input becomes one small `.bin/.idx` pair, written by any worker process.

    PREFIX.parts/plan.json        the plan of this corpus; parts of another plan are deleted
                 tokenizer/       the tokenizer that every worker loads
                 000000.bin .idx  complete as soon as the .idx exists (TokenWriter renames it last)

A restarted run skips complete parts, so a killed run loses at most the parts in progress. `PrepareProgress` shows a bar
on a terminal, a line every few seconds elsewhere.
"""

import json
import multiprocessing
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from nanotrain.data.token_format import bin_path, idx_path
from nanotrain.data.tokenizer import load_tokenizer
from nanotrain.data.worker import exit_with_parent
from nanotrain.errors import EnvironmentFault, NanotrainError
from nanotrain.prepare.chunks import InputChunk
from nanotrain.prepare.readers import DocumentReader
from nanotrain.prepare.token_writer import TokenWriter
from nanotrain.quantities import count_of
from nanotrain.runs.files import disk_errors, disk_fault, make_folder, remove_folder, write_text

CURE = "choose another --output"  # of errors of the disk
_DOCUMENTS_PER_WRITE = 64
_INDEX_BYTES = 20  # of a document, in the index


@dataclass(frozen=True)
class PartJob:
    """How chunks become part files."""

    folder: Path  # the folder of part files
    tokenizer: str  # what `load_tokenizer` takes
    dtype: str  # name of the token dtype
    column: str = "text"  # field that holds the text
    append_eod: bool = True  # end each document with the end-of-document token


@dataclass(frozen=True)
class PartDone:
    """Sizes of a finished part; `num_bytes` is the planned size of its chunk."""

    documents: int
    tokens: int
    text_bytes: int
    num_bytes: int


def part_prefix(folder: Path, number: int) -> Path:
    """Prefix of a part's `.bin/.idx` pair."""
    return folder / f"{number:06d}"


def is_complete(folder: Path, number: int) -> bool:
    """Whether a part is complete."""
    return idx_path(part_prefix(folder, number)).is_file()


def open_parts(folder: Path, plan: dict[str, Any]) -> None:
    """Create the folder of part files, and delete parts of another plan.

    Raises:
        EnvironmentFault: the folder cannot be written, or has content that is not of `nanotrain prepare`.
    """
    text = json.dumps(plan, indent=2, sort_keys=True) + "\n"
    file = folder / "plan.json"
    if not (file.is_file() and file.read_text(errors="replace") == text):
        remove_folder(folder)
    make_folder(folder, fix=CURE)
    write_text(file, text)


def write_parts(job: PartJob, chunks: Iterable[tuple[int, InputChunk]], *, workers: int) -> Iterator[PartDone]:
    """Write the parts of numbered chunks in `workers` processes; yields each part when it is complete.

    Chunks are consumed only as fast as they are written.

    Raises:
        DataError: a document that cannot be read or encoded.
        EnvironmentFault: a worker process was killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nanotrain.prepare.parts"])
    waiting = iter(chunks)
    processes: list[BaseProcess] = []
    idle: list[Connection] = []
    busy: set[Connection] = set()
    try:
        for _ in range(workers):
            parent_end, worker_end = context.Pipe()
            processes.append(context.Process(target=_work, args=(job, worker_end)))
            processes[-1].start()
            worker_end.close()  # the worker has the only copy, so its end is noticed here
            idle.append(parent_end)
        while True:
            while idle and (numbered := next(waiting, None)) is not None:
                with _lost_worker_is_an_error():
                    idle[-1].send(numbered)
                busy.add(idle.pop())
            if not busy:
                return
            for connection in [ready for ready in wait(busy) if isinstance(ready, Connection)]:
                with _lost_worker_is_an_error():
                    outcome: PartDone | NanotrainError = connection.recv()
                busy.remove(connection)
                idle.append(connection)
                if isinstance(outcome, NanotrainError):
                    raise outcome
                yield outcome
    finally:
        for connection in (*idle, *busy):
            connection.close()  # a worker ends when it finds its connection closed
        for process in processes:
            process.join()


class PartWriter:
    """Writes part files; keeps the tokenizer and open datasets between chunks."""

    def __init__(self, job: PartJob) -> None:
        self.job, self.reader = job, DocumentReader(job.column)
        self.tokenizer = load_tokenizer(job.tokenizer)
        self._eod = [self.tokenizer.eod] if job.append_eod and self.tokenizer.eod is not None else []

    def write(self, number: int, chunk: InputChunk) -> PartDone:
        """Tokenize one chunk into its part file."""
        documents = tokens = text_bytes = 0
        texts, prefix, dtype = self.reader.read(chunk), part_prefix(self.job.folder, number), np.dtype(self.job.dtype)
        with TokenWriter(prefix, dtype) as writer:
            while some := list(islice(texts, _DOCUMENTS_PER_WRITE)):
                # One text at a time keeps to one thread: the processes are the parallelism.
                rows = [self.tokenizer.encode(text) + self._eod for text in some]
                lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
                ids = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum()))
                documents, tokens = documents + len(some), tokens + len(ids)
                with disk_errors(bin_path(prefix), needed=tokens * dtype.itemsize, fix=CURE):
                    writer.add_documents(ids, lengths)
                text_bytes += sum(len(text.encode()) for text in some)
            needed = tokens * dtype.itemsize + _INDEX_BYTES * documents
            with disk_errors(bin_path(prefix), needed=needed, fix=CURE):  # before the space of the part is free again
                writer.complete()
        return PartDone(documents, tokens, text_bytes, chunk.num_bytes)


@contextmanager
def _lost_worker_is_an_error() -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError):
        raise EnvironmentFault(
            "a tokenizing process was killed",
            why="the usual reason is that the machine ran out of memory",
            fix="run the same command again with fewer --workers; complete parts are kept",
        ) from None


def _work(job: PartJob, connection: Connection) -> None:
    """Run a worker process: write the part of every chunk received, and send the outcome."""
    # Ctrl-C reaches every process of the terminal; the parent alone handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_with_parent()
    try:
        writer = PartWriter(job)
        while True:
            connection.send(writer.write(*connection.recv()))
    except NanotrainError as error:
        connection.send(error)
    except (EOFError, ConnectionError):
        return  # the parent has closed its end
    except OSError as error:
        connection.send(disk_fault(error, Path(error.filename or job.folder), fix=CURE))


_SECONDS_BETWEEN_LINES = 5.0


class PrepareProgress:
    """Counts and displays finished parts; a context manager.

    The input has `total_bytes` (0 if unknown), of which an earlier run finished `done_bytes`.
    """

    def __init__(self, total_bytes: int, *, done_bytes: int = 0) -> None:
        self.total_bytes, self.done_bytes = total_bytes, done_bytes
        self.documents = self.tokens = self.text_bytes = 0
        self._started = self._printed = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> "PrepareProgress":
        if sys.stdout.isatty():
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            columns = TextColumn("tokenizing"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rates]}")
            self._bar = Progress(*columns, TimeRemainingColumn())
            self._bar.start()
            total = self.total_bytes or None
            self._task = self._bar.add_task("", total=total, completed=self.done_bytes, rates="")
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def add(self, part: PartDone) -> None:
        """Count a finished part and update the display."""
        self.done_bytes += part.num_bytes
        self.documents += part.documents
        self.tokens += part.tokens
        self.text_bytes += part.text_bytes
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done_bytes, rates=self.rates())
        elif time.monotonic() - self._printed > _SECONDS_BETWEEN_LINES:
            self._printed = time.monotonic()
            percent = f"{100 * self.done_bytes / self.total_bytes:.0f} %  " if self.total_bytes else ""
            print(f"{percent}{count_of(self.documents, 'document')}  {self.rates()}", flush=True)

    def rates(self) -> str:
        """Rates of this run: text in MB/s and tokens per second."""
        elapsed = max(1e-9, time.monotonic() - self._started)
        return f"{self.text_bytes / elapsed / 1e6:.1f} MB/s  {self.tokens / elapsed:,.0f} tok/s"
