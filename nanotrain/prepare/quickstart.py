"""The quick-start corpus: the source files of the running Python's standard library.

About 1800 files, one document per file: 31 MB if the library's own tests are installed, else 13 MB.
A BPE is trained on them. It is real text without a network, ready in seconds.

The folder's name contains everything the corpus depends on. It is taken from the user's cache where
an earlier run has left it there, which saves 10 s of CPU time or more. It is built under a
temporary name and renamed when complete, so an outdated corpus is never used, and of two processes
that build at once one wins. Folders appear in the cache complete, and are copied out, so that no
run depends on it. A cache that cannot be read or written is as if empty.
"""

import hashlib
import json
import os
import platform
import secrets
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from platformdirs import user_cache_path

from nanotrain.data.corpus_info import CorpusInfo, tokenizer_path, write_info
from nanotrain.data.token_format import idx_path, smallest_dtype
from nanotrain.errors import DataError
from nanotrain.log import progress
from nanotrain.prepare.bpe import train_bpe
from nanotrain.prepare.token_writer import TokenWriter
from nanotrain.runs.files import (
    MARKER,
    disk_errors,
    make_folder,
    remove_folder,
    write_bytes,
    write_text,
)

_VERSION = 2  # increase it when the same Python and vocabulary would give other tokens
_CURE = "choose another --run-dir"
_ENCODE_BATCH = 64
NUM_QUESTIONS, NUM_CHOICES = 64, 4
CONTEXT_LINES, CONTEXT_CHARACTERS = 8, 300
_EXCLUDED = {"site-packages", "dist-packages", "__pycache__"}


def prepare_quickstart(folder: Path, vocab_size: int, *, cache: Path | None = None) -> Path:
    """Prepare the corpus below `folder`, unless it is there; prints progress on standard error.

    Args:
        folder: parent of the corpus folder.
        vocab_size: size of the tokenizer's vocabulary.
        cache: folder in which other runs have left a corpus and this one is left; None for no
            cache.

    Returns:
        The prefix of its `.bin/.idx` pair.

    Raises:
        DataError: this Python has no library sources.
        EnvironmentFault: the folder cannot be written.
    """
    prefix = folder / f"python-{platform.python_version()}-bpe-{vocab_size}-v{_VERSION}" / "corpus"
    if idx_path(prefix).is_file():
        return prefix
    building = folder / f".building-{secrets.token_hex(4)}"
    make_folder(building, fix=_CURE)
    try:
        with disk_errors(building / "corpus", fix=_CURE):
            _fetch_or_build(building, vocab_size, name=prefix.parent.name, cache=cache)
            try:
                building.rename(prefix.parent)
            except OSError:
                # else another process was first, and its corpus is equal
                if not idx_path(prefix).is_file():
                    raise
    finally:
        remove_folder(building)
    return prefix


def _fetch_or_build(building: Path, vocab_size: int, *, name: str, cache: Path | None) -> None:
    """Take the corpus from the cache, or build it and leave it there."""
    if cache is None:
        _build(building / "corpus", vocab_size)
        return
    # earlier releases left corpora without checksums there, under a shorter name
    cached = cache / f"{name}-checked-{_digest_of_library()}"
    if not fetch(cached, building):
        _build(building / "corpus", vocab_size)
        keep(building, cached)


def task_path(prefix: Path) -> Path:
    """The file of the task of a quick-start corpus."""
    return prefix.with_name("next-line.jsonl")


def find_quickstart(folder: Path, vocab_size: int) -> Path | None:
    """Prefix of the newest quick-start corpus in a folder, of any Python version, or None."""
    corpora = sorted(folder.glob(f"python-*-bpe-{vocab_size}-v*/corpus.idx"))
    return corpora[-1].with_suffix("") if corpora else None


def library_sources(root: Path | None = None) -> Iterator[str]:
    """Iterate over the library's source files as text, in a fixed random order.

    The validation split takes the last documents, so files of one package must be spread. `root` is
    the folder of the library; None for the running Python's.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    for file in sorted(_library_files(root), key=_name_digest):
        try:
            text = (root / file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # the library's tests contain files that are invalid on purpose
        if text:
            yield text


def _name_digest(file: Path) -> bytes:
    return hashlib.blake2b(file.as_posix().encode()).digest()


def _library_files(root: Path) -> Iterator[Path]:
    """Source files, relative to the folder of the library."""
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _EXCLUDED]
        for name in names:
            if name.endswith(".py"):
                yield Path(folder, name).relative_to(root)


def _digest_of_library() -> str:
    """A digest of the names and sizes of the library's files, with or without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted((file.as_posix(), (root / file).stat().st_size) for file in _library_files(root))
    return hashlib.blake2b(repr(files).encode(), digest_size=8).hexdigest()


def _build(prefix: Path, vocab_size: int) -> None:
    """Write the corpus, its tokenizer and its task."""
    texts = list(library_sources())
    if not texts:
        raise DataError(
            "this Python has no library sources",
            why=f"there are no .py files below {sysconfig.get_path('stdlib')}",
            fix="give another corpus with --data-path",
        )
    megabytes = sum(map(len, texts)) / 1e6
    files = f"{len(texts)} library files, {megabytes:.0f} MB"
    _print(f"quick start: training a BPE of {vocab_size} tokens on {files}")
    tokenizer = train_bpe(texts, vocab_size)
    assert tokenizer.eod is not None, "train_bpe adds an end-of-document token"
    _print("quick start: tokenizing")
    dtype = smallest_dtype(tokenizer.vocab_size)
    with TokenWriter(prefix, dtype) as writer, progress("tokenizing", total=len(texts)) as advance:
        for first in range(0, len(texts), _ENCODE_BATCH):
            encoded = tokenizer.encode_documents(texts[first : first + _ENCODE_BATCH])
            writer.add_documents([[*ids, tokenizer.eod] for ids in encoded])
            advance(_ENCODE_BATCH)
        writer.complete()
        for path, sums in writer.checksums().items():
            write_bytes(path, sums, fix=_CURE)
        saved = tokenizer.save(tokenizer_path(prefix))
        info = CorpusInfo(
            saved, tokenizer.vocab_size, tokenizer.eod, writer.num_documents, writer.num_tokens
        )
        write_info(prefix, info)
    questions = "".join(json.dumps(question) + "\n" for question in next_line_questions(texts))
    write_text(task_path(prefix), questions)
    _print(f"quick start: {info.tokens:,} tokens in {prefix.parent.parent}")


def _print(line: str) -> None:  # not a log line: logging is silent on every rank but the first
    print(line, file=sys.stderr, flush=True)


def next_line_questions(texts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Multiple-choice questions for `data/tasks.py`: choose the line that continues a file.

    The files belong to the validation split. The wrong lines are from other files, with the
    indentation of the right one and about its length.
    """
    random = Random(0)
    lines = _candidate_lines(texts[round(0.97 * len(texts)) :])
    pool = [line.text.strip() for line in lines]
    for line in random.sample(lines, min(NUM_QUESTIONS, len(lines))):
        text = line.text.strip()
        others = set(random.sample(pool, min(30, len(pool)))) - {text}
        # the nearest lengths first, then by alphabet
        ranked = sorted((abs(len(other) - len(text)), other) for other in others)
        choices = [line.text.replace(text, other) for _, other in ranked[: NUM_CHOICES - 1]]
        gold = random.randrange(len(choices) + 1)
        choices.insert(gold, line.text)
        query = line.before[-CONTEXT_CHARACTERS:] + "\n"
        yield {"query": query, "choices": choices, "gold": gold, "delimiter": ""}


class _Line(NamedTuple):
    """A line of a file, and the lines before it."""

    before: str
    text: str


def _candidate_lines(texts: Sequence[str]) -> list[_Line]:
    """Lines of some length with enough lines before them."""
    candidates = []
    for text in texts:
        lines = text.splitlines()
        for number in range(CONTEXT_LINES, len(lines)):
            if 12 <= len(lines[number].strip()) <= 60:
                before = "\n".join(lines[number - CONTEXT_LINES : number])
                candidates.append(_Line(before, lines[number].rstrip()))
    return candidates


def user_cache(kind: str) -> Path:
    """The folder of the user's cache for one kind of content; it need not exist."""
    return user_cache_path("nanotrain", appauthor=False) / kind


def fetch(cached: Path, target: Path) -> bool:
    """Copy a cached folder into an existing one; False, perhaps with a partial copy, on failure."""
    try:
        shutil.copytree(cached, target, dirs_exist_ok=True)
    except OSError:  # shutil.Error too
        return False
    return True


def keep(folder: Path, cached: Path) -> None:
    """Copy a complete folder into the cache; does nothing if that fails or it is there."""
    partial = cached.with_name(f".{cached.name}.{secrets.token_hex(4)}.partial")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(folder, partial, ignore=shutil.ignore_patterns(MARKER))
        partial.rename(cached)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
