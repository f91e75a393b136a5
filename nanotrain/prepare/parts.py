"""Part files: a worker process writes every chunk of the input as one small `.bin/.idx` pair.

    PREFIX.parts/plan.json        the plan of this corpus; parts of another plan are deleted
                 tokenizer/       the tokenizer that every worker loads
                 ready            written when both are there, for processes of other machines
                 000000.bin .idx  complete as soon as the .idx exists (TokenWriter renames it last)

A restarted run skips complete parts, so a killed run loses at most the parts in progress.
"""

import json
import signal
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from nanotrain.data.token_format import bin_path, idx_path
from nanotrain.data.tokenizer import load_tokenizer
from nanotrain.data.worker import WorkerContext, exit_with_parent
from nanotrain.errors import EnvironmentFault, NanotrainError
from nanotrain.prepare.chat import ChatTemplate
from nanotrain.prepare.chunks import InputChunk
from nanotrain.prepare.encoder import DocumentEncoder
from nanotrain.prepare.options import PrepareOptions
from nanotrain.prepare.readers import DocumentReader
from nanotrain.prepare.text_counts import TextCounts
from nanotrain.prepare.token_writer import TokenWriter
from nanotrain.runs.files import disk_errors, disk_fault, make_folder, remove_folder, write_text

PLAN_FILE = "plan.json"
READY = "ready"
CURE = "choose another --output"  # the cure for errors of the disk
_DOCUMENTS_PER_WRITE, _CHARACTERS_PER_WRITE = 64, 1 << 20
_INDEX_BYTES = 20  # bytes of a document in the index


@dataclass(frozen=True)
class PartJob:
    """Options of writing chunks as part files."""

    options: PrepareOptions
    tokenizer: str  # what `load_tokenizer` takes
    dtype: str  # name of the token dtype


def part_prefix(folder: Path, number: int) -> Path:
    """Prefix of a part's `.bin/.idx` pair."""
    return folder / f"{number:06d}"


def counts_path(prefix: Path) -> Path:
    """Path of the file with the `TextCounts` of a part."""
    return prefix.with_name(prefix.name + ".counts.json")


def read_counts(folder: Path, num_parts: int) -> TextCounts:
    """The sum of the counts of all parts; parts of older versions have none."""
    counts = []
    for number in range(num_parts):
        file = counts_path(part_prefix(folder, number))
        if file.is_file():
            counts.append(TextCounts.parse(file.read_text()))
    return TextCounts.total(counts)


def is_complete(folder: Path, number: int) -> bool:
    """Whether a part is complete."""
    return idx_path(part_prefix(folder, number)).is_file()


def open_parts(folder: Path, plan: dict[str, Any]) -> None:
    """Create the folder of part files, and delete parts of another plan.

    Raises:
        EnvironmentFault: the folder cannot be written, or has content that is not of `nanotrain
            prepare`.
    """
    if not _has_plan(folder, plan):
        remove_folder(folder)
    make_folder(folder, fix=CURE)
    write_text(folder / PLAN_FILE, _plan_text(plan))


def _has_plan(folder: Path, plan: dict[str, Any]) -> bool:
    """Whether a folder has the parts of a plan."""
    file = folder / PLAN_FILE
    return file.is_file() and file.read_text(errors="replace") == _plan_text(plan)


def _plan_text(plan: dict[str, Any]) -> str:
    return json.dumps(plan, indent=2, sort_keys=True) + "\n"


def is_ready(folder: Path, plan: dict[str, Any]) -> bool:
    """Whether another process has prepared the folder of a plan, its tokenizer included."""
    return (folder / READY).is_file() and _has_plan(folder, plan)


def write_parts(
    job: PartJob, chunks: Iterable[tuple[int, InputChunk]], *, workers: int
) -> Iterator[int]:
    """Write the parts of numbered chunks in processes; yields the planned bytes of complete parts.

    Chunks are consumed only as fast as they are written.

    Raises:
        DataError: a document that cannot be read or encoded.
        EnvironmentFault: a worker process was killed.
    """
    context = WorkerContext(preload=["nanotrain.prepare.parts"])
    waiting = iter(chunks)
    try:
        with ProcessPoolExecutor(workers, context, initializer=_start_worker) as pool:

            def submit(count: int) -> "set[Future[int | NanotrainError]]":
                return {pool.submit(write_part, job, chunk) for chunk in islice(waiting, count)}

            running = submit(workers)
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                running |= submit(len(done))
                for future in done:
                    outcome = future.result()
                    if isinstance(outcome, NanotrainError):
                        raise outcome
                    yield outcome
    except BrokenProcessPool:
        raise EnvironmentFault(
            "a tokenizing process died",
            why=context.how_ended() or "the usual reason is that the machine ran out of memory",
            fix="run the same command again with fewer --workers; complete parts are kept",
        ) from None


class PartWriter:
    """Writes part files; keeps the tokenizer and open datasets between chunks."""

    def __init__(self, job: PartJob) -> None:
        options = job.options
        self.job = job
        self.reader = DocumentReader(options.column, options.limits, is_chat=options.is_chat)
        self.chat = ChatTemplate(job.tokenizer) if options.is_chat else None
        tokenizer = load_tokenizer(job.tokenizer)
        self.encoder = DocumentEncoder(tokenizer, parse_special=options.parse_special)
        self._num_targets = 0
        self._eod: list[int] = []
        if options.append_eod and tokenizer.eod is not None:
            self._eod = [tokenizer.eod]

    def write(self, number: int, chunk: InputChunk) -> None:
        """Tokenize one chunk into its part file."""
        self._start_counts()
        texts = self.reader.read(chunk)
        prefix = part_prefix(self.job.options.parts, number)
        dtype = np.dtype(self.job.dtype)
        with TokenWriter(prefix, dtype, has_mask=self.chat is not None) as writer:
            while batch := _next_texts(texts):
                # One text at a time keeps to one thread: the processes are the parallelism.
                documents, masks = self._encode(batch)
                needed = dtype.itemsize * (writer.num_tokens + sum(map(len, documents)))
                with disk_errors(bin_path(prefix), needed=needed, fix=CURE):
                    writer.add_documents(documents, masks)
            needed = dtype.itemsize * writer.num_tokens + _INDEX_BYTES * writer.num_documents
            # before the space of the part is free again
            with disk_errors(bin_path(prefix), needed=needed, fix=CURE):
                writer.complete()
                write_text(counts_path(prefix), self._counts().to_json())

    def _start_counts(self) -> None:
        """Set all counts of a part to zero."""
        self.encoder.counts = TextCounts()
        self.reader.num_empty = 0
        self.reader.num_surrogates = 0
        self._num_targets = 0

    def _counts(self) -> TextCounts:
        """The counts since `_start_counts`."""
        reader = self.reader
        return replace(
            self.encoder.counts,
            empty=reader.num_empty,
            surrogates=reader.num_surrogates,
            targets=self._num_targets,
        )

    def _encode(self, texts: Sequence[str]) -> tuple[list[list[int]], list[np.ndarray]]:
        """Token ids of documents, and the masks of conversations.

        The end of a conversation is a target if its last token is; one that the template leaves
        without tokens has none.
        """
        documents: list[list[int]] = []
        masks: list[np.ndarray] = []
        for text in texts:
            if self.chat is None:
                documents.append(self.encoder.encode(text) + self._eod)
                continue
            ids, mask = self.chat.encode(text)
            end = [] if ids[-1:] == self._eod else self._eod
            documents.append(ids + end)
            last = mask[-1:] if ids else np.zeros(1, dtype=np.uint8)
            mask = np.append(mask, last.repeat(len(end)))
            self._num_targets += int(mask.sum())
            masks.append(mask)
        return documents, masks


def _next_texts(texts: Iterator[str]) -> list[str]:
    """The next documents to hold in memory with their tokens; empty at the end."""
    batch: list[str] = []
    num_characters = 0
    for text in texts:
        batch.append(text)
        num_characters += len(text)
        if len(batch) == _DOCUMENTS_PER_WRITE or num_characters > _CHARACTERS_PER_WRITE:
            break
    return batch


_part_writer = cache(PartWriter)  # one per worker process


def _start_worker() -> None:
    # Ctrl-C reaches every process of the terminal; the parent alone handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_with_parent()


def write_part(job: PartJob, numbered: tuple[int, InputChunk]) -> int | NanotrainError:
    """Write a part in a worker process.

    Errors are returned: the pool would add a traceback to a raised error.
    """
    number, chunk = numbered
    try:
        _part_writer(job).write(number, chunk)
        return chunk.num_bytes
    except NanotrainError as error:
        return error
    except OSError as error:
        return disk_fault(error, Path(error.filename or job.options.parts), fix=CURE)
