"""`nanotrain prepare`: text to token files.

    1 plan       split the inputs into chunks (chunks.py); depends on the inputs only
    2 tokenizer  load it, or train it on the inputs (bpe:SIZE), and save a copy for the workers
    3 parts      tokenize every chunk into a part file (parts.py); complete parts of an earlier run
                 are kept
    4 merge      concatenate the parts, in order, into PREFIX.bin/.idx; write PREFIX.nanotrain.json

The result depends neither on the number of workers nor on interruptions.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np

from nanotrain.data.corpus_info import CorpusInfo, read_info, tokenizer_path, write_info
from nanotrain.data.token_format import bin_path, check_dtype, idx_path, smallest_dtype
from nanotrain.data.tokenizer import ByteTokenizer, FastTokenizer, Tokenizer, load_tokenizer
from nanotrain.errors import DataError
from nanotrain.log import progress
from nanotrain.prepare.bpe import train_bpe
from nanotrain.prepare.chat import ChatTemplate, TurnEnd
from nanotrain.prepare.chunks import InputChunk, select_inputs, split_inputs, streamed_dataset
from nanotrain.prepare.executors import EXECUTORS
from nanotrain.prepare.given_template import (
    read_template,
    special_tokens,
    with_end,
    with_template,
)
from nanotrain.prepare.inputs import load_rows
from nanotrain.prepare.options import PrepareOptions
from nanotrain.prepare.parts import (
    CURE,
    READY,
    PartJob,
    is_complete,
    is_ready,
    open_parts,
    part_prefix,
    read_counts,
)
from nanotrain.prepare.readers import DocumentReader, lines_on_columns
from nanotrain.prepare.text_counts import TextCounts, lines_of
from nanotrain.prepare.token_writer import TokenWriter
from nanotrain.quantities import count_of
from nanotrain.runs.files import (
    disk_errors,
    is_own,
    make_folder,
    remove_folder,
    write_bytes,
    write_text,
)
from nanotrain.runs.lock import hold_lock
from nanotrain.system import usable_cores

SET_UP_S = 86_400.0  # how long a process waits for another one that trains the tokenizer
_STREAMED_ROWS = 256  # rows per chunk of a stream
_BPE_TRAINING_BYTES = 512 << 20  # maximum text that a BPE is trained on


def prepare_corpus(options: PrepareOptions) -> None:
    """Prepare a corpus.

    Raises:
        DataError: an input, a document or a tokenizer that cannot be used.
        EnvironmentFault: a folder that cannot be written, or a process that was killed.
    """
    prefix = options.output
    chunks: tuple[InputChunk, ...] = ()  # a stream is not split before
    if not options.streaming:
        chunks = _split_input(options)
    template = _given_template(options)
    tokenizer = None
    if options.bpe_vocab_size is None:
        tokenizer = load_tokenizer(options.tokenizer)
        for note in tokenizer.notes:
            print(f"tokenizer: {note}")
        if template is not None:
            tokenizer = with_template(tokenizer, template)
    if options.is_chat:
        chat = ChatTemplate(options.tokenizer, template=template)  # refuses slow tokenizers
        assert isinstance(tokenizer, FastTokenizer), "tokens of a chat template have offsets"
        tokenizer = _with_turn_end(tokenizer, chat.turn_end())
        template = chat.source
    plan = _plan(options, chunks, tokenizer=tokenizer, template=template)
    # the folder may be read-only
    if _is_prepared(prefix, plan) and not os.path.lexists(options.parts):
        return
    lock = prefix.with_name(f".{prefix.name}.prepare.lock")
    with disk_errors(lock, fix=CURE):
        prefix.parent.mkdir(parents=True, exist_ok=True)
    fix = "wait for it, end it, or choose another --output"
    hold = partial(hold_lock, lock, what=f"the corpus {prefix}", fix=fix, is_removed=True)
    if options.part is not None:
        with nullcontext() if is_ready(options.parts, plan) else hold(wait_s=SET_UP_S):
            job, _ = _set_up(options, plan, chunks=chunks, tokenizer=tokenizer)
        _write_missing(job, chunks, planned=chunks)
        num_complete = sum(_which_are_complete(options, len(chunks)))
        parts = count_of(len(chunks), "part")
        print(f"share {options.part} is complete; {num_complete} of {parts} are")
        return
    with hold():
        if _is_prepared(prefix, plan):
            remove_folder(options.parts)
        else:
            _prepare(options, plan, chunks=chunks, tokenizer=tokenizer)


def _given_template(options: PrepareOptions) -> str | None:
    """The template of --chat-template."""
    return None if options.chat_template is None else read_template(options.chat_template)


def _with_turn_end(tokenizer: FastTokenizer, end: TurnEnd) -> FastTokenizer:
    """The tokenizer whose texts also end where a reply does; prints how that is."""
    if end.token is None:
        ending = f"the text {end.text!r}" if end.text else "the end of the conversation"
        print(f"a reply ends with {ending}: the template writes no token of the vocabulary there")
        return tokenizer
    print(f"a reply ends with {end.text}")
    return with_end(tokenizer, end.token)


def _split_input(options: PrepareOptions) -> tuple[InputChunk, ...]:
    """The chunks of the input; prints which files are read and left out."""
    selections = select_inputs(options.input, text_suffixes=options.text_suffix)
    for selection in selections:
        print(selection.text())
    chunks = split_inputs(
        selections,
        subset=options.subset,
        split=options.split_name,
        text_suffixes=options.text_suffix,
    )
    for line in lines_on_columns(chunks, options.column, is_chat=options.is_chat):
        print(line)
    return chunks


def _which_are_complete(options: PrepareOptions, num_parts: int) -> list[bool]:
    """Whether a part is complete, for the first parts."""
    return [is_complete(options.parts, number) for number in range(num_parts)]


def _prepare(
    options: PrepareOptions,
    plan: dict[str, Any],
    *,
    chunks: tuple[InputChunk, ...],
    tokenizer: Tokenizer | None,
) -> None:
    """Prepare the corpus of a plan; no other process does so at the same time."""
    prefix = options.output
    job, tokenizer = _set_up(options, plan, chunks=chunks, tokenizer=tokenizer)
    num_parts = _write_missing(job, chunks or _stream(options), planned=chunks)
    needed = 0
    for file in options.parts.iterdir():
        if file.suffix in (".bin", ".idx", ".mask"):
            needed += file.stat().st_size
    with disk_errors(bin_path(prefix), needed=needed, fix=CURE):
        files = _input_files(chunks)
        counts = read_counts(options.parts, num_parts)
        info = _merge(
            job,
            num_parts=num_parts,
            tokenizer=tokenizer,
            plan=plan,
            files=files,
            counts=counts,
        )
    print(f"{bin_path(prefix)}: {_summary(info)}")
    for line in lines_of(
        counts,
        tokenizer=tokenizer,
        num_tokens=info.tokens,
        parse_special=options.parse_special,
    ):
        print(line)


def _input_files(chunks: Iterable[InputChunk]) -> list[str]:
    return sorted(set(chain.from_iterable(chunk.files for chunk in chunks)))


def _set_up(
    options: PrepareOptions,
    plan: dict[str, Any],
    *,
    chunks: tuple[InputChunk, ...],
    tokenizer: Tokenizer | None,
) -> tuple[PartJob, Tokenizer]:
    """Make the folder of part files with its tokenizer, unless another process of this plan has."""
    is_there = is_ready(options.parts, plan)
    if not is_there:
        _require_replaceable(options)
        open_parts(options.parts, plan)
    tokenizer = tokenizer or _trained_tokenizer(options, chunks)
    job = _plan_job(options, tokenizer)
    if not is_there:
        tokenizer.save(options.parts / "tokenizer")
        write_text(options.parts / READY, "")
    return job, tokenizer


def _plan(
    options: PrepareOptions,
    chunks: tuple[InputChunk, ...],
    *,
    tokenizer: Tokenizer | None,
    template: str | None,
) -> dict[str, Any]:
    """Everything that determines the content of the parts; equal plans give equal bytes.

    Its hash is stored with every prepared corpus: adding or renaming a key below would make every
    existing corpus count as outdated.
    """
    files = []
    for file in _input_files(chunks):
        stat = os.stat(file)
        files.append([file, stat.st_size, stat.st_mtime_ns])
    vocabulary = None
    if isinstance(tokenizer, FastTokenizer):
        vocabulary = _hash(tokenizer.backend.to_str())
    plan: dict[str, Any] = {
        "inputs": options.input,
        "files": files,
        "pieces": _hash([[chunk.kind, chunk.files, chunk.start, chunk.stop] for chunk in chunks]),
        "tokenizer": options.tokenizer,
        "vocabulary": vocabulary,
        "options": [
            options.subset,
            options.split_name,
            options.column,
            options.append_eod,
            options.dtype,
        ],
        "streaming": [options.streaming, options.max_documents],
    }
    if options.is_chat:
        plan["format"] = options.format
    if template is not None:
        plan["chat_template"] = _text_hash(template)
    if options.parse_special:
        plan["parse_special"] = True
    return plan


def _is_prepared(prefix: Path, plan: dict[str, Any]) -> bool:
    """Whether the corpus is the one of the plan; prints it if so."""
    info = read_info(prefix)
    if not idx_path(prefix).exists() or info.plan != _hash(plan):
        return False
    print(f"{prefix} is already prepared: {_summary(info)}")
    return True


def _require_replaceable(options: PrepareOptions) -> None:
    """Check that the files to be replaced were written by nanotrain, and that they may be replaced.

    Raises:
        DataError: a file or folder of others has one of the names, or --overwrite is missing.
    """
    prefix = options.output
    if read_info(prefix).plan:
        if idx_path(prefix).exists() and not options.overwrite:
            raise DataError(
                f"{idx_path(prefix)} exists",
                why="it was prepared from other inputs or with other options",
                fix="choose another --output, or pass --overwrite",
            )
        return
    foreign = [path for path in (bin_path(prefix), idx_path(prefix)) if os.path.lexists(path)]
    tokenizer = tokenizer_path(prefix)
    if tokenizer.exists() and not is_own(tokenizer):
        foreign.append(tokenizer)
    if foreign:
        raise DataError(
            f"{foreign[0]} exists and was not prepared by nanotrain",
            why=f"there is no {prefix.name}.nanotrain.json beside it",
            fix="choose another --output, or remove it",
        )


def _trained_tokenizer(options: PrepareOptions, chunks: tuple[InputChunk, ...]) -> Tokenizer:
    """The tokenizer that an interrupted run trained, or a new one."""
    folder = options.parts / "tokenizer"
    if (folder / "tokenizer_config.json").is_file():
        return load_tokenizer(str(folder))
    assert options.bpe_vocab_size is not None, "called only to train a tokenizer"
    print(f"training a BPE of {options.bpe_vocab_size} tokens", flush=True)
    # evenly spaced chunks of about the training size
    total_bytes = sum(chunk.num_bytes for chunk in chunks)
    step = max(1, -(-total_bytes // _BPE_TRAINING_BYTES))
    reader = DocumentReader(options.column, options.limits)
    texts = chain.from_iterable(map(reader.read, chunks[::step] or _stream(options)))
    template = _given_template(options)
    special = special_tokens(template or "")
    shortened = _truncate(texts, _BPE_TRAINING_BYTES)
    trained = train_bpe(shortened, options.bpe_vocab_size, special=special)
    if template is not None:
        trained = with_template(trained, template)
        found = " ".join(special) or "none"
        print(f"special tokens of --chat-template of the form <|name|>: {found}")
    if trained.vocab_size < options.bpe_vocab_size:
        print(
            f"the BPE has {trained.vocab_size:,} tokens, not {options.bpe_vocab_size:,}: "
            "the text has no further pairs to merge"
        )
    return trained


def _truncate(texts: Iterable[str], num_bytes: int) -> Iterator[str]:
    """Texts until they have more than a number of characters."""
    for text in texts:
        yield text
        num_bytes -= len(text)
        if num_bytes < 0:
            return


def _plan_job(options: PrepareOptions, tokenizer: Tokenizer) -> PartJob:
    """Check the tokenizer, and choose the token dtype."""
    if options.append_eod and tokenizer.eod is None:
        raise DataError(
            f"the tokenizer {options.tokenizer} has no end-of-document token",
            why="its tokenizer_config.json names none, and no token has a usual name",
            fix="pass --no-append-eod, or name an eos_token in tokenizer_config.json",
        )
    if options.dtype == "auto":
        dtype = smallest_dtype(tokenizer.vocab_size)
    else:
        dtype = np.dtype(options.dtype)
    check_dtype(dtype, tokenizer.vocab_size)
    saved = str(options.parts.absolute() / "tokenizer")
    if isinstance(tokenizer, ByteTokenizer):
        saved = "bytes"
    return PartJob(options, tokenizer=saved, dtype=dtype.name)


def _stream(options: PrepareOptions) -> Iterator[InputChunk]:
    """Chunks of the documents of streamed datasets."""
    reader = DocumentReader(options.column, is_chat=options.is_chat)
    for name in options.input:
        dataset = streamed_dataset(name, subset=options.subset, split=options.split_name)
        rows = islice(load_rows(dataset, streaming=True), options.max_documents)
        pick = partial(reader.pick, column=options.column, source=name)
        while texts := tuple(map(pick, islice(rows, _STREAMED_ROWS))):
            yield InputChunk("texts", texts=texts)


def _write_missing(
    job: PartJob, chunks: Iterable[InputChunk], *, planned: tuple[InputChunk, ...]
) -> int:
    """Write the missing parts of this process's share; returns the number of complete first parts.

    Args:
        job: how chunks become parts.
        chunks: chunks of all parts, in order, perhaps of a stream.
        planned: the same chunks; empty for a stream.
    """
    options = job.options
    complete = _which_are_complete(options, len(planned))
    if any(complete):
        print(f"resuming: {sum(complete)} of {len(planned)} parts are complete", flush=True)

    def is_missing(number: int) -> bool:
        is_own = number % options.share.total == options.share.number - 1
        return is_own and not is_complete(options.parts, number)

    total_bytes = 0
    for number, chunk in enumerate(planned):
        if is_missing(number):
            total_bytes += chunk.num_bytes
    missing = (pair for pair in enumerate(chunks) if is_missing(pair[0]))
    workers = min(options.workers, len(planned) or options.workers)
    write = EXECUTORS[options.executor]
    with progress("tokenizing", total=total_bytes or None) as advance:
        for num_bytes in write(job, missing, workers=workers):
            advance(num_bytes)
    return next(number for number in count() if not is_complete(options.parts, number))


def _merge(
    job: PartJob,
    *,
    num_parts: int,
    tokenizer: Tokenizer,
    plan: dict[str, Any],
    files: Sequence[str],
    counts: TextCounts,
) -> CorpusInfo:
    """Concatenate the parts, and write the files that describe the corpus."""
    options = job.options
    prefix = options.output
    folder = options.parts
    dtype = np.dtype(job.dtype)
    with TokenWriter(prefix, dtype, scratch=folder, has_mask=options.is_chat) as writer:
        for number in range(num_parts):
            writer.append_pair(part_prefix(folder, number))
        if not writer.num_tokens:
            raise DataError(
                f"nothing was written to {prefix}",
                why="the input holds no text",
                fix="check --input",
            )
        writer.complete()  # a full disk is found while the older pair is whole
        # an older pair never stands with another tokenizer and plan
        idx_path(prefix).unlink(missing_ok=True)
        for path, sums in writer.checksums().items():
            write_bytes(path, sums, fix=CURE)
        if job.tokenizer != "bytes":
            make_folder(tokenizer_path(prefix), fix=CURE)
        saved = tokenizer.save(tokenizer_path(prefix))
        tokenizer_sha256 = ""
        if isinstance(tokenizer, FastTokenizer):
            tokenizer_sha256 = _text_hash(tokenizer.backend.to_str())
        info = CorpusInfo(
            saved,
            tokenizer.vocab_size,
            tokenizer.eod,
            writer.num_documents,
            writer.num_tokens,
            _hash(plan),
            inputs=dict(zip(files, _hash_files(files), strict=True)),
            tokenizer_sha256=tokenizer_sha256,
            chat_template_sha256=plan["chat_template"] if options.is_chat else "",
            targets=counts.targets,
            uneven_documents=None if options.is_chat or not options.append_eod else counts.uneven,
        )
        write_info(prefix, info)
    remove_folder(folder)
    return info


def _hash_files(files: Sequence[str]) -> list[str]:
    """SHA-256 of files, on several threads: 0.5 to 2 GB/s each, without the interpreter lock."""

    def hash_file(name: str) -> str:
        with open(name, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(usable_cores()) as pool, progress("hashing the input"):
        return list(pool.map(hash_file, files))


def _text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _summary(info: CorpusInfo) -> str:
    """Documents, tokens and vocabulary of a corpus, in words."""
    documents = count_of(info.documents, "document")
    tokens = count_of(info.tokens, "token")
    return f"{documents}, {tokens}, vocabulary {info.vocab_size:,}"


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
