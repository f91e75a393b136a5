"""Part files: each piece of the input becomes one small `.bin/.idx` pair, whichever process writes it.

    PREFIX.parts/plan.json        what is being prepared; parts of another plan are thrown away
                 tokenizer/       the tokenizer every worker loads
                 00000.bin .idx   complete as soon as the .idx is there (token_writer renames it last)

A run that is started again skips complete parts, so killing one costs at most the pieces in the works.
"""

import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from nanotrain.data.token_format import idx_path
from nanotrain.data.tokenizer import Tokenizer, load_tokenizer
from nanotrain.data.worker import Failure, end_with_parent
from nanotrain.errors import DataError, EnvironmentFault
from nanotrain.prepare.documents import Piece
from nanotrain.prepare.readers import read_documents
from nanotrain.prepare.token_writer import TokenWriter

_WRITTEN_TOGETHER = 64  # documents


@dataclass(frozen=True)
class PartJob:
    """How every piece becomes tokens.

    Args:
        folder: where parts lie.
        tokenizer: what `load_tokenizer` takes.
        dtype: name of the token type.
        column: field that holds the text.
        append_eod: end each document with the end-of-document token.
    """

    folder: Path
    tokenizer: str
    dtype: str
    column: str
    append_eod: bool


@dataclass(frozen=True)
class PartDone:
    """A finished part.

    Args:
        number: which piece.
        documents: documents in it.
        tokens: tokens in it.
        text_bytes: UTF-8 bytes read.
        num_bytes: what the plan said the piece would weigh.
    """

    number: int
    documents: int
    tokens: int
    text_bytes: int
    num_bytes: int


def part_prefix(folder: Path, number: int) -> Path:
    """Where a part lies."""
    return folder / f"{number:06d}"


def is_complete(folder: Path, number: int) -> bool:
    """Whether a part has been written to its end."""
    return idx_path(part_prefix(folder, number)).is_file()


def open_parts(folder: Path, plan: dict[str, Any]) -> None:
    """Make the folder for parts, and throw away parts of another plan.

    Args:
        folder: where parts will lie.
        plan: all that decides their content.
    """
    written = json.dumps(plan, indent=2, sort_keys=True) + "\n"
    file = folder / "plan.json"
    if folder.exists() and not (file.is_file() and file.read_text() == written):
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_text(written)
    os.replace(partial, file)


def write_parts(job: PartJob, pieces: Iterable[tuple[int, Piece]], *, workers: int) -> Iterator[PartDone]:
    """Write the parts of numbered pieces, several at a time, and say so as each is done.

    Args:
        job: how pieces become tokens.
        pieces: numbers and pieces; taken from the iterator only as fast as they are worked on.
        workers: processes.

    Raises:
        DataError: a document that cannot be read or encoded.
        EnvironmentFault: a worker process was killed.
    """
    waiting = iter(pieces)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nanotrain.prepare.parts"])
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(job,))
    try:
        running = {pool.submit(_write_part, *numbered) for numbered in islice(waiting, 2 * workers)}
        while running:
            finished = wait(running, return_when=FIRST_COMPLETED).done
            running -= finished
            for done in [future.result() for future in finished]:
                if isinstance(done, Failure):
                    raise done.error()
                running |= {pool.submit(_write_part, *numbered) for numbered in islice(waiting, 1)}
                yield done
    except BrokenProcessPool:
        raise EnvironmentFault(
            "a tokenizing process was killed",
            why="most often the machine ran out of memory",
            fix="run the same command again with fewer --workers; finished parts are kept",
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def write_part(number: int, piece: Piece, *, job: PartJob, tokenizer: Tokenizer) -> PartDone:
    """Tokenize one piece into its part file."""
    documents = tokens = text_bytes = 0
    texts = read_documents(piece, job.column)
    end = [tokenizer.eod] if job.append_eod and tokenizer.eod is not None else []
    with TokenWriter(part_prefix(job.folder, number), np.dtype(job.dtype)) as writer:
        while some := [text.encode("utf-8", errors="replace") for text in islice(texts, _WRITTEN_TOGETHER)]:
            # One text at a time keeps to one thread: the processes are the parallelism.
            rows = [tokenizer.encode(data.decode()) + end for data in some]
            lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
            ids = np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=int(lengths.sum()))
            writer.add_documents(ids, lengths)
            documents, tokens = documents + len(some), tokens + len(ids)
            text_bytes += sum(map(len, some))
    return PartDone(number, documents, tokens, text_bytes, piece.num_bytes)


_worker: dict[str, Any] = {}


def _start_worker(job: PartJob) -> None:
    # Ctrl-C reaches every process of the terminal; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    _worker.update(job=job, tokenizer=load_tokenizer(job.tokenizer))


def _write_part(number: int, piece: Piece) -> PartDone | Failure:
    try:
        return write_part(number, piece, **_worker)
    except DataError as error:
        return Failure.of(error)
