"""Input files that may be compressed, and rows of Hugging Face datasets.

`datasets` takes seconds to import, so it is imported only when such rows are read; no other file
imports it.
"""

import bz2
import csv
import gzip
import io
import lzma
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

from nanotrain.data.pretrained import first_line, go_offline_if_unreachable
from nanotrain.errors import DataError, NanotrainError
from nanotrain.untrusted import LARGEST

MAX_ZST_WINDOW = 1 << 31  # bytes of memory at most; `zstd --long=31` needs them
ZST_READ_BYTES = 1 << 10  # bytes read at a time: they inflate to 32 MiB at most
ALWAYS_BYTES = 1 << 24  # bytes that any compressed file may hold


@dataclass(frozen=True)
class Limits:
    """Limits on input sizes: a small file can be made to expand to more than the memory."""

    document_bytes: int = 1 << 28  # bytes of one document
    # bytes that a compressed file may hold per byte of its size; text has 3 to 20
    inflation: int = 200

    def file_bytes(self, file: str) -> int:
        """The bytes that a file may hold."""
        path = Path(file)
        if not is_compressed(path) and path.suffix.lower() != ".parquet":
            return LARGEST
        return ALWAYS_BYTES + self.inflation * path.stat().st_size

    def check_document(self, source: str, nbytes: int) -> None:
        """Check the bytes of a document of a source.

        Raises:
            DataError: more than the limit.
        """
        if nbytes > self.document_bytes:
            raise DataError(
                f"a document of {source} has more than {self.document_bytes:,} bytes",
                why="it is in memory with its tokens",
                fix="split it, or raise --max-document-bytes",
            )

    def check_file(self, file: str, nbytes: int, *, most: int) -> None:
        """Check the bytes that were read of a file; `most` is from `file_bytes`.

        Raises:
            DataError: more than `most`.
        """
        if nbytes > most:
            raise DataError(
                f"{file} holds more than {most:,} bytes",
                why=(
                    f"text is not {self.inflation} times smaller when compressed; "
                    "such a file is made to fill the memory"
                ),
                fix="leave it out, or raise --max-inflation",
            )


def uncompressed_suffix(path: Path) -> str:
    """The type of a file by its name: .jsonl for corpus.jsonl.gz and for CORPUS.JSONL."""
    if is_compressed(path):
        path = Path(path.stem)
    return path.suffix.lower()


def is_compressed(path: Path) -> bool:
    """Whether the name ends as the name of a compressed file."""
    return path.suffix.lower() in _OPENERS


@contextmanager
def open_input(file: str) -> Iterator[BinaryIO]:
    """Read a file, decompressed if it is compressed by its name.

    Raises:
        DataError: unreadable, damaged, or zstandard is not installed.
    """
    open_file = _OPENERS.get(Path(file).suffix.lower(), partial(open, mode="rb"))
    try:
        with open_file(file) as stream:
            yield stream
    except NanotrainError:
        raise
    except Exception as error:  # each format has its own
        why = getattr(error, "strerror", None) or first_line(error)
        fix = "check its permissions, write or copy it again, or leave it out"
        raise DataError(f"{file} cannot be read", why=why, fix=fix) from None


def check_zstandard(file: str) -> None:
    """Check that a .zst file can be read.

    Raises:
        DataError: zstandard is not installed.
    """
    if Path(file).suffix.lower() == ".zst" and find_spec("zstandard") is None:
        fix = "pip install zstandard, or decompress the file with zstd -d"
        raise DataError(
            f"{file} cannot be read", why="the package zstandard is not installed", fix=fix
        )


def _open_zst(file: str) -> Any:
    check_zstandard(file)
    return io.BufferedReader(_ZstReader(file))


class _ZstReader(io.RawIOBase):
    """The text of a .zst file of one or more frames.

    zstandard's own reader takes a truncated file for a shorter one.

    Raises:
        EOFError: the file ends inside a frame.
    """

    def __init__(self, file: str) -> None:
        self._blocks = _zst_blocks(file)
        self._block = memoryview(b"")
        self._position = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        if not self._block:
            self._block = memoryview(next(filter(None, self._blocks), b""))
        size = min(len(buffer), len(self._block))
        buffer[:size] = self._block[:size]
        self._block = self._block[size:]
        self._position += size
        return size


def _zst_blocks(file: str) -> Iterator[bytes]:
    """The decompressed content of a .zst file, which may have several frames."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_ZST_WINDOW)
    frame = None
    with Path(file).open("rb") as compressed:
        while data := compressed.read(ZST_READ_BYTES):
            while data:
                if frame is None or frame.eof:
                    frame = decompressor.decompressobj()
                yield frame.decompress(data)
                data = frame.unused_data
    if frame is not None and not frame.eof:
        raise EOFError("it ends too early")


_OPENERS: dict[str, Callable[[str], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zst,
}


@dataclass(frozen=True)
class HubDataset:
    """The arguments of `datasets.load_dataset`."""

    name: str  # hub name, a folder, or a file type ("csv") with `files`
    subset: str | None  # configuration of the dataset; None for its only one
    split: str  # split of the dataset, usually "train"
    files: tuple[str, ...] = ()  # local files, for a file type


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` of `datasets` wrote the folder: one dataset, or one per split."""
    if (folder / "dataset_dict.json").is_file():
        return True
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def load_rows(dataset: HubDataset, *, streaming: bool = False) -> Any:
    """Load a random-access `datasets.Dataset`, or an iterable one that stores nothing on disk.

    Raises:
        DataError: the dataset cannot be loaded.
    """
    if not dataset.files and not Path(dataset.name).is_dir():
        go_offline_if_unreachable()
    import datasets

    _leave_pickles_unread()
    if not streaming:
        datasets.disable_progress_bars()
    files = list(dataset.files) or None
    try:
        if is_saved_dataset(Path(dataset.name)):
            rows = _saved_rows(datasets.load_from_disk(dataset.name), dataset)
            return rows.to_iterable_dataset() if streaming else rows
        options = _csv_options(dataset.files) if dataset.name == "csv" and files else {}
        return datasets.load_dataset(
            dataset.name,
            dataset.subset,
            split=dataset.split,
            data_files=files,
            streaming=streaming,
            **options,
        )
    except NanotrainError:
        raise
    except Exception as error:  # a loader may raise anything; its first line is what the user needs
        name = dataset.files[0] if dataset.files else dataset.name
        raise DataError(
            f"the dataset {name} cannot be loaded",
            why=(
                "it is no local file or folder of text, "
                f"and Hugging Face datasets reports: {first_line(error)}"
            ),
            fix="check the spelling, --subset and --split-name; without a network give local files",
        ) from None


def _csv_options(files: Sequence[str]) -> dict[str, Any]:
    """Options that read every column of CSV files as the text it is: "NA" is no missing value."""
    from datasets import Features, Value

    with open_input(files[0]) as stream, io.TextIOWrapper(stream, "utf-8-sig") as text:
        names = next(csv.reader(text), [])
    if len(set(names)) < len(names):
        return {}
    return {
        "features": Features({name: Value("string") for name in names}),
        "keep_default_na": False,
    }


def _leave_pickles_unread() -> None:
    """Leave `.pth` files in tar files as bytes: no other file is unpickled by `datasets`."""
    from datasets.packaged_modules.webdataset.webdataset import WebDataset

    WebDataset.DECODERS.pop("pth", None)


def _saved_rows(saved: Any, dataset: HubDataset) -> Any:
    """The rows of a dataset that `save_to_disk` wrote, or of one of its splits."""
    what = f"{dataset.name} has no split {dataset.split}"
    if isinstance(saved, dict):
        if dataset.split not in saved:
            why = f"its splits are {', '.join(saved)}"
            raise DataError(what, why=why, fix="name one with --split-name")
        return saved[dataset.split]
    if dataset.split not in ("train", str(saved.split)):  # "train" is the default
        why = "it is one dataset without splits"
        raise DataError(what, why=why, fix="leave --split-name out")
    return saved
