"""`nanotrain prepare`: text to token files.

    inputs -> pieces -> part files, all cores -> one pair + record

    1 plan       cut the inputs into pieces (documents.py); only the inputs decide how
    2 tokenizer  load it, or train it on the inputs (bpe:SIZE), and leave a copy for the workers
    3 parts      every piece becomes a part file (parts.py); finished ones of an earlier run are kept
    4 merge      the parts, in order, become PREFIX.bin/.idx; PREFIX.nanotrain.json says how

The result does not depend on the number of workers, nor on how often the work was interrupted.
"""

import argparse
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from nanotrain.data import hf
from nanotrain.data.sources import Record, read_record, tokenizer_path, write_record
from nanotrain.data.token_format import bin_path, check_dtype, idx_path, smallest_dtype
from nanotrain.data.tokenizer import FastTokenizer, Tokenizer, load_tokenizer
from nanotrain.errors import DataError, EnvironmentFault
from nanotrain.prepare.bpe import train_bpe
from nanotrain.prepare.documents import Piece, plan_pieces, streamed_corpus
from nanotrain.prepare.parts import PartJob, is_complete, open_parts, part_prefix, write_parts
from nanotrain.prepare.progress import PrepareProgress
from nanotrain.prepare.readers import pick_text, read_documents
from nanotrain.prepare.token_writer import TokenWriter

_STREAMED_ROWS = 256  # rows in a piece of a stream
_TRAINED_BYTES = 512 << 20  # text a BPE is trained on, at most


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `nanotrain prepare`."""
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="NAME", help="files, folders (.txt .jsonl .parquet) or hub names")
    add("--output", required=True, metavar="PREFIX", help="write PREFIX.bin and PREFIX.idx")
    add(
        "--tokenizer",
        required=True,
        metavar="NAME",
        help="Hugging Face name or folder, tokenizer.json, bytes, bpe:SIZE",
    )
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores, %(default)s)")
    add("--text-column", default="text", metavar="NAME", help="field that holds the text (default: %(default)s)")
    add("--subset", metavar="NAME", help="configuration of a hub corpus")
    add("--split-name", default="train", metavar="NAME", help="split of a hub corpus (default: %(default)s)")
    add("--streaming", action="store_true", help="read hub corpora as they arrive, without keeping them on disk")
    add("--max-documents", type=int, metavar="N", help="with --streaming: stop after so many rows of each corpus")
    add("--append-eod", action=argparse.BooleanOptionalAction, default=True, help="end documents with the eod token")
    add(
        "--dtype",
        choices=["auto", "uint8", "uint16", "int32"],
        default="auto",
        help="token type (default: by vocabulary)",
    )
    add("--overwrite", action="store_true", help="replace an existing PREFIX")


def run(args: argparse.Namespace) -> None:
    """Carry out `nanotrain prepare`.

    Raises:
        DataError: an input, a document or a tokenizer that cannot be used.
        EnvironmentFault: a folder that cannot be written, or a process that was killed.
    """
    _check_arguments(args)
    prefix = Path(args.output).expanduser()
    pieces = None if args.streaming else plan_pieces(args.input, subset=args.subset, split=args.split_name)
    trained = args.tokenizer.startswith("bpe:")
    tokenizer = None if trained else load_tokenizer(args.tokenizer)
    plan = _plan(args, pieces, tokenizer=tokenizer)
    if _is_prepared(prefix, plan, overwrite=args.overwrite):
        print(f"{prefix} is prepared already: {_summary(read_record(prefix))}")
        return
    folder = prefix.with_name(prefix.name + ".parts")
    try:
        open_parts(folder, plan)
    except OSError as error:
        raise EnvironmentFault(
            f"{folder} cannot be written", why=error.strerror or "", fix="choose another --output"
        ) from None
    if tokenizer is None:
        tokenizer = _trained_tokenizer(folder, args, pieces=pieces)
    _check_eod(tokenizer, args)
    left = tokenizer.save(folder / "tokenizer")
    named = left if left == "bytes" else str(folder / left)
    dtype = smallest_dtype(tokenizer.vocab_size) if args.dtype == "auto" else np.dtype(args.dtype)
    check_dtype(dtype, tokenizer.vocab_size)
    job = PartJob(folder, named, dtype.name, args.text_column, args.append_eod)
    numbered = enumerate(_stream(args) if pieces is None else pieces)
    num_parts = _write_missing(job, numbered, planned=pieces or (), workers=args.workers)
    record = _merge(prefix, job, num_parts=num_parts, tokenizer=tokenizer, plan_hash=_hash(plan))
    print(f"{bin_path(prefix)}: {_summary(record)}")


def _check_arguments(args: argparse.Namespace) -> None:
    size = args.tokenizer.removeprefix("bpe:")
    if args.tokenizer.startswith("bpe:") and not size.isdecimal():
        raise DataError(f"--tokenizer {args.tokenizer} has no size", fix="write for example bpe:8192")
    if args.workers < 1:
        raise DataError(f"--workers {args.workers} would do no work", fix="give at least 1")
    if args.max_documents is not None and not args.streaming:
        raise DataError("--max-documents has no effect without --streaming", fix="add --streaming or leave it out")


def _plan(args: argparse.Namespace, pieces: tuple[Piece, ...] | None, *, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """All that decides the content of the parts; equal plans give equal bytes."""
    files = sorted({file for piece in pieces or () for file in piece.files})
    return {
        "inputs": args.input,
        "files": [[file, (stat := os.stat(file)).st_size, stat.st_mtime_ns] for file in files],
        "pieces": _hash([[p.kind, p.files, p.start, p.stop] for p in pieces or ()]),
        "tokenizer": args.tokenizer,
        "vocabulary": _hash(tokenizer.backend.to_str()) if isinstance(tokenizer, FastTokenizer) else None,
        "options": [args.subset, args.split_name, args.text_column, args.append_eod, args.dtype],
        "streaming": [args.streaming, args.max_documents],
    }


def _is_prepared(prefix: Path, plan: dict[str, Any], *, overwrite: bool) -> bool:
    if not idx_path(prefix).exists():
        return False
    if read_record(prefix).plan == _hash(plan):
        shutil.rmtree(prefix.with_name(prefix.name + ".parts"), ignore_errors=True)
        return True
    if not overwrite:
        raise DataError(
            f"{idx_path(prefix)} exists",
            why="it was made from other inputs or with other options",
            fix="choose another --output, or pass --overwrite",
        )
    return False


def _trained_tokenizer(folder: Path, args: argparse.Namespace, *, pieces: tuple[Piece, ...] | None) -> Tokenizer:
    """The tokenizer an earlier run trained, or a new one."""
    if (folder / "tokenizer" / "tokenizer_config.json").is_file():
        return load_tokenizer(str(folder / "tokenizer"))
    print(f"training a BPE of {args.tokenizer.removeprefix('bpe:')} tokens", flush=True)
    sample = _stream(args) if pieces is None else _spread(pieces)
    texts = chain.from_iterable(read_documents(piece, args.text_column) for piece in sample)
    return train_bpe(_at_most(texts, _TRAINED_BYTES), int(args.tokenizer.removeprefix("bpe:")))


def _spread(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """Pieces from all over the input that together are small enough to train on."""
    return pieces[:: max(1, -(-sum(piece.num_bytes for piece in pieces) // _TRAINED_BYTES))]


def _at_most(texts: Iterable[str], num_bytes: int) -> Iterator[str]:
    for text in texts:
        yield text
        num_bytes -= len(text)
        if num_bytes < 0:
            return


def _check_eod(tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    if args.append_eod and tokenizer.eod is None:
        raise DataError(
            f"the tokenizer {args.tokenizer} has no end-of-document token",
            why="none is named in its tokenizer_config.json, and none has a usual name",
            fix="pass --no-append-eod, or name an eos_token in tokenizer_config.json",
        )


def _stream(args: argparse.Namespace) -> Iterator[Piece]:
    for name in args.input:
        rows = islice(
            hf.stream_rows(streamed_corpus(name, subset=args.subset, split=args.split_name)), args.max_documents
        )
        while texts := tuple(pick_text(row, args.text_column, place=name) for row in islice(rows, _STREAMED_ROWS)):
            yield Piece("texts", texts=texts)


def _write_missing(
    job: PartJob, numbered: Iterable[tuple[int, Piece]], *, planned: tuple[Piece, ...], workers: int
) -> int:
    """Write the parts that are not there yet; returns how many parts there are in all."""
    num_parts = 0

    def missing() -> Iterator[tuple[int, Piece]]:
        nonlocal num_parts
        for number, piece in numbered:
            num_parts = number + 1
            if not is_complete(job.folder, number):
                yield number, piece

    kept = [piece.num_bytes for number, piece in enumerate(planned) if is_complete(job.folder, number)]
    if kept:
        print(f"going on: {len(kept)} of {len(planned)} parts are there already", flush=True)
    with PrepareProgress(sum(piece.num_bytes for piece in planned), done_bytes=sum(kept)) as progress:
        for part in write_parts(job, missing(), workers=min(workers, len(planned) or workers)):
            progress.add(part)
    return num_parts


def _merge(prefix: Path, job: PartJob, *, num_parts: int, tokenizer: Tokenizer, plan_hash: str) -> Record:
    idx_path(prefix).unlink(missing_ok=True)
    with TokenWriter(prefix, np.dtype(job.dtype)) as writer:
        for number in range(num_parts):
            writer.append_pair(part_prefix(job.folder, number))
        if not writer.num_tokens:
            raise DataError(f"nothing was written to {prefix}", why="the input holds no text", fix="check --input")
        named = tokenizer.save(tokenizer_path(prefix))
        record = Record(named, tokenizer.vocab_size, tokenizer.eod, writer.num_documents, writer.num_tokens, plan_hash)
        write_record(prefix, record)
    shutil.rmtree(job.folder)
    return record


def _summary(record: Record) -> str:
    return f"{record.documents:,} documents, {record.tokens:,} tokens, vocabulary {record.vocab_size:,}"


def _hash(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
