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
from typing import Any

from platformdirs import user_cache_path

from nanotrain.data.corpus_info import CorpusInfo, tokenizer_path, write_info
from nanotrain.data.token_format import idx_path, smallest_dtype
from nanotrain.errors import DataError
from nanotrain.log import progress
from nanotrain.prepare.bpe import train_bpe
from nanotrain.prepare.token_writer import TokenWriter
from nanotrain.runs.files import MARKER, disk_errors, make_folder, remove_folder, write_text

_VERSION = 2  # increase it when the same Python and vocabulary would give other files
_CURE = "choose another --run-dir"
_ENCODE_BATCH = 64
NUM_QUESTIONS, NUM_CHOICES, CONTEXT_LINES, CONTEXT_CHARACTERS = 64, 4, 8, 300
_EXCLUDED = {"site-packages", "dist-packages", "__pycache__"}


def prepare_quickstart(folder: Path, vocab_size: int, *, cache: Path | None = None) -> Path:
    """Prepare the corpus in a folder of `folder`, unless it is there; progress is printed on
    standard error.

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
    if not idx_path(prefix).is_file():
        building = folder / f".building-{secrets.token_hex(4)}"
        make_folder(building, fix=_CURE)
        try:
            with disk_errors(building / "corpus", fix=_CURE):
                cached = cache / f"{prefix.parent.name}-{_digest_of_library()}" if cache else None
                if cached is None or not fetch(cached, building):
                    _build(building / "corpus", vocab_size)
                    if cached is not None:
                        keep(building, cached)
                try:
                    building.rename(prefix.parent)
                except OSError:
                    # else another process was first, and its corpus is equal
                    if not idx_path(prefix).is_file():
                        raise
        finally:
            remove_folder(building)
    return prefix


def task_path(prefix: Path) -> Path:
    """The file of the task beside a quick-start corpus."""
    return prefix.with_name("next-line.jsonl")


def find_quickstart(folder: Path, vocab_size: int) -> Path | None:
    """Prefix of the newest quick-start corpus in a folder, prepared by any Python version; None if
    there is none.
    """
    found = sorted(folder.glob(f"python-*-bpe-{vocab_size}-v*/corpus.idx"))
    return found[-1].with_suffix("") if found else None


def library_sources(root: Path | None = None) -> Iterator[str]:
    """Iterate over the library's source files as text, in a fixed random order.

    The validation split takes the last documents, so files of one package must be spread. `root` is
    the folder of the library; None for the running Python's.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    for file in sorted(
        _library_files(root), key=lambda file: hashlib.blake2b(file.as_posix().encode()).digest()
    ):
        try:
            text = (root / file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # the library's tests contain files that are invalid on purpose
        if text:
            yield text


def _library_files(root: Path) -> Iterator[Path]:
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _EXCLUDED]
        yield from (Path(folder, name).relative_to(root) for name in names if name.endswith(".py"))


def _digest_of_library() -> str:
    """A digest of the names and sizes of the library's files, which may be installed with or
    without tests.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted((file.as_posix(), (root / file).stat().st_size) for file in _library_files(root))
    return hashlib.blake2b(repr(files).encode(), digest_size=8).hexdigest()


def _build(prefix: Path, vocab_size: int) -> None:
    texts = list(library_sources())
    if not texts:
        raise DataError(
            "this Python has no library sources",
            why=f"there are no .py files below {sysconfig.get_path('stdlib')}",
            fix="give another corpus with --data-path",
        )
    size = sum(map(len, texts)) / 1e6
    _print(
        f"quick start: training a BPE of {vocab_size} tokens on {len(texts)} library files, {size:.0f} MB"
    )
    tokenizer = train_bpe(texts, vocab_size)
    assert tokenizer.eod is not None, "train_bpe adds an end-of-document token"
    _print("quick start: tokenizing")
    dtype = smallest_dtype(tokenizer.vocab_size)
    with TokenWriter(prefix, dtype) as writer, progress("tokenizing", total=len(texts)) as advance:
        for first in range(0, len(texts), _ENCODE_BATCH):
            encoded = tokenizer.encode_batch(texts[first : first + _ENCODE_BATCH])
            writer.add_documents([[*ids, tokenizer.eod] for ids in encoded])
            advance(_ENCODE_BATCH)
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
    """Multiple-choice questions, as `data/tasks.py` reads them: which line continues a file of the
    validation split?

    The wrong lines are of other files, with the indentation of the right one and about its length.
    """
    random = Random(0)
    documents = [text.splitlines() for text in texts[round(0.97 * len(texts)) :]]
    places = [
        (lines, place)
        for lines in documents
        for place in range(CONTEXT_LINES, len(lines))
        if 12 <= len(lines[place].strip()) <= 60
    ]
    pool = [lines[place].strip() for lines, place in places]
    for lines, place in random.sample(places, min(NUM_QUESTIONS, len(places))):
        right = lines[place].rstrip()
        text = right.strip()
        others = set(random.sample(pool, min(30, len(pool)))) - {text}
        nearest = sorted(others, key=lambda other: (abs(len(other) - len(text)), other))[
            : NUM_CHOICES - 1
        ]
        choices = [right.replace(text, other) for other in nearest]
        gold = random.randrange(len(choices) + 1)
        choices.insert(gold, right)
        query = "\n".join(lines[place - CONTEXT_LINES : place])[-CONTEXT_CHARACTERS:] + "\n"
        yield {"query": query, "choices": choices, "gold": gold, "delimiter": ""}


def user_cache(kind: str) -> Path:
    """The folder of the user's cache for one kind of content; it need not exist."""
    return user_cache_path("nanotrain", appauthor=False) / kind


def fetch(cached: Path, target: Path) -> bool:
    """Copy a cached folder into an existing one; whether all of it was there. A partial copy may be
    left.
    """
    try:
        shutil.copytree(cached, target, dirs_exist_ok=True)
    except OSError:  # shutil.Error too
        return False
    return True


def keep(folder: Path, cached: Path) -> None:
    """Copy a complete folder into the cache; does nothing where that fails or where it is already."""
    partial = cached.with_name(f".{cached.name}.{secrets.token_hex(4)}.partial")
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(folder, partial, ignore=shutil.ignore_patterns(MARKER))
        partial.rename(cached)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
