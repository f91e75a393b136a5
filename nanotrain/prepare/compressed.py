"""Input files that may be compressed, by the ends of their names."""

import bz2
import gzip
import io
import lzma
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from nanotrain.errors import DataError, NanotrainError


def uncompressed_suffix(path: Path) -> str:
    """The type of a file by its name, in small letters: .jsonl of corpus.jsonl.gz and of CORPUS.JSONL."""
    return (Path(path.stem) if is_compressed(path) else path).suffix.lower()


def is_compressed(path: Path) -> bool:
    """Whether the name ends as that of a compressed file."""
    return path.suffix.lower() in _OPENERS


@contextmanager
def open_input(file: str) -> Iterator[BinaryIO]:
    """Read a file, decompressed where its name ends as that of a compressed file.

    Raises:
        DataError: unreadable, damaged, or zstandard is not installed.
    """
    try:
        with _OPENERS.get(Path(file).suffix.lower(), _open_plain)(file) as stream:
            yield stream
    except NanotrainError:
        raise
    except PermissionError as error:
        raise DataError(f"{file} cannot be read", why=error.strerror or "", fix="check its permissions") from None
    except Exception as error:  # each format has its own
        why = str(error) or type(error).__name__
        raise DataError(f"{file} cannot be read", why=why, fix="write or copy it again, or leave it out") from None


def check_zstandard(file: str) -> None:
    """Check that a .zst file can be read.

    Raises:
        DataError: zstandard is not installed.
    """
    if Path(file).suffix.lower() == ".zst" and find_spec("zstandard") is None:
        fix = "pip install zstandard, or decompress the file with zstd -d"
        raise DataError(f"{file} cannot be read", why="the package zstandard is not installed", fix=fix)


def _open_plain(file: str) -> Any:
    return Path(file).open("rb")


def _open_zst(file: str) -> Any:
    check_zstandard(file)
    import zstandard

    stream = zstandard.ZstdDecompressor().stream_reader(_open_plain(file), read_across_frames=True)
    return io.BufferedReader(stream)


_OPENERS: dict[str, Callable[[str], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": _open_zst}
