"""A corpus that is already there: the source files of the running Python's standard library.

Some 1800 files, 31 MB where the library's own tests are installed and 13 MB where not, one document a file, and a BPE
trained on them: real text with no network, ready in seconds.

The corpus lies in a folder named after what it depends on, is built under another name and renamed when complete.
So an old one is never taken for a new one, and two processes that build at once leave one whole corpus.
"""

import hashlib
import os
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nanotrain.data.sources import Record, read_record, tokenizer_path, write_record
from nanotrain.data.token_format import idx_path, smallest_dtype
from nanotrain.data.tokenizer import FastTokenizer
from nanotrain.errors import DataError, EnvironmentFault
from nanotrain.prepare.bpe import train_bpe
from nanotrain.prepare.token_writer import TokenWriter

_LAYOUT = 1  # raise it when the same Python and vocabulary would give other files
_ENCODED_TOGETHER = 64
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class QuickStart:
    """A prepared quick-start corpus.

    Args:
        prefix: of its `.bin/.idx` pair.
        tokenizer_path: its tokenizer.json.
        vocab_size: tokens of that tokenizer.
    """

    prefix: Path
    tokenizer_path: Path
    vocab_size: int


def prepare_quickstart(
    folder: Path, vocab_size: int, *, progress: Callable[[str], None] = lambda line: None
) -> QuickStart:
    """Prepare the corpus, or find it prepared.

    Args:
        folder: where it is kept.
        vocab_size: tokens the BPE learns.
        progress: is told what is going on, a line at a time.

    Raises:
        DataError: this Python has no library sources.
        EnvironmentFault: the folder cannot be written.
    """
    home = folder / f"python-{platform.python_version()}-bpe-{vocab_size}-v{_LAYOUT}"
    if not idx_path(home / "corpus").is_file():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            building = Path(tempfile.mkdtemp(prefix=".building-", dir=folder))
        except OSError as error:
            raise EnvironmentFault(
                f"{folder} cannot be written", why=error.strerror or "", fix="choose another train.run_dir"
            ) from None
        try:
            _build(building / "corpus", vocab_size, progress=progress)
            _publish(building, home)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    prefix = home / "corpus"
    return QuickStart(prefix, tokenizer_path(prefix) / "tokenizer.json", read_record(prefix).vocab_size)


def library_sources(root: Path | None = None) -> Iterator[str]:
    """The library's source files as text, in an order that is random and always the same.

    Args:
        root: folder of the library; the running Python's when None.

    A validation split takes the last documents, so neighbours of the alphabet must not sit together.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    files = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in _LEFT_OUT]
        files += [Path(folder, name).relative_to(root) for name in names if name.endswith(".py")]
    for file in sorted(files, key=lambda file: hashlib.blake2b(file.as_posix().encode()).digest()):
        try:
            text = (root / file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue  # the library's tests hold files that are broken on purpose
        if text:
            yield text


def _build(prefix: Path, vocab_size: int, *, progress: Callable[[str], None]) -> None:
    texts = list(library_sources())
    if not texts:
        raise DataError(
            "this Python has no library sources",
            why=f"no .py files lie below {sysconfig.get_path('stdlib')}",
            fix="give a corpus of your own with --data-path",
        )
    size = sum(map(len, texts)) / 1e6
    progress(f"quick start: training a BPE of {vocab_size} tokens on {len(texts)} library files, {size:.0f} MB")
    tokenizer = train_bpe(texts, vocab_size)
    progress("quick start: tokenizing")
    with TokenWriter(prefix, smallest_dtype(tokenizer.vocab_size)) as writer:
        for first in range(0, len(texts), _ENCODED_TOGETHER):
            _write_documents(writer, tokenizer, texts=texts[first : first + _ENCODED_TOGETHER])
        named = tokenizer.save(tokenizer_path(prefix))
        record = Record(named, tokenizer.vocab_size, tokenizer.eod, writer.num_documents, writer.num_tokens)
        write_record(prefix, record)
    progress(f"quick start: {record.tokens:,} tokens in {prefix.parent.parent}")


def _write_documents(writer: TokenWriter, tokenizer: FastTokenizer, *, texts: list[str]) -> None:
    for ids in tokenizer.encode_batch(texts):
        writer.add_document(np.asarray([*ids, tokenizer.eod], dtype=np.int64))


def _publish(building: Path, home: Path) -> None:
    os.chmod(building, 0o755)  # mkdtemp's folder is for its owner only
    try:
        building.rename(home)
    except OSError:
        if not idx_path(home / "corpus").is_file():  # else another process was first, and its corpus is as good
            raise
