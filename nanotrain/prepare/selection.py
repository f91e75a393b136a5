"""The files of an input, and what is left out.

A folder gives its files of documents, sorted by path. Hidden files, compressed copies and files of
other types are left out and counted: copying and version control leave many hidden files, and
`zstd` and `gzip -k` keep the file that they compress. What `datasets` loads has no files here.
"""

import glob
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from nanotrain.errors import DataError
from nanotrain.paths import expanded, local_path
from nanotrain.prepare.inputs import is_compressed, is_saved_dataset
from nanotrain.quantities import count_of

_NUM_TYPES = 4  # types of files that are named
_HTML = (".html", ".htm", ".xhtml")
ROW_TYPES = {
    ".csv": "csv",
    ".arrow": "arrow",
    ".json": "json",
    ".parquet": "parquet",
    ".jsonl": "json",
    ".ndjson": "json",
}
IsDocument = Callable[[Path], bool]


@dataclass(frozen=True)
class Selection:
    """The files of an input.

    Attributes:
        name: the input as it was named.
        files: its files, in order; None for what `datasets` loads.
        skipped: numbers of files that were left out, by the reason.
        other_types: numbers of files that were left out for their type, by its suffix.
    """

    name: str
    files: tuple[Path, ...] | None
    skipped: Counter[str] = field(default_factory=Counter)
    other_types: Counter[str] = field(default_factory=Counter)

    def text(self) -> str:
        """One line on the files that are read and left out."""
        if self.files is None:
            return f"input {self.name}: read by Hugging Face datasets"
        types = Counter(type_of(file) for file in self.files)
        line = f"input {self.name}: {count_of(len(self.files), 'file')} ({list_types(types)})"
        reasons = [f"{number} {reason}" for reason, number in self.skipped.items()]
        if self.other_types:
            number = sum(self.other_types.values())
            reasons.append(f"{number} of other types ({list_types(self.other_types)})")
        return f"{line}; left out: {', '.join(reasons)}" if reasons else line


def type_of(file: Path) -> str:
    """The suffix of a file, with the suffix of its compression.

    >>> type_of(Path("a.JSONL.gz")), type_of(Path("Makefile"))
    ('.jsonl.gz', 'no suffix')
    """
    suffix = file.suffix.lower()
    if is_compressed(file):
        suffix = Path(file.stem).suffix.lower() + suffix
    return suffix or "no suffix"


def list_types(types: Counter[str]) -> str:
    """The most frequent types with their numbers."""
    named = [f"{number} {suffix}" for suffix, number in types.most_common(_NUM_TYPES)]
    return ", ".join(named) + (", ..." if len(types) > _NUM_TYPES else "")


def select_files(name: str, *, is_document: IsDocument) -> Selection:
    """Find the files of an input.

    Args:
        name: file, folder, pattern, or what `datasets` loads.
        is_document: whether a file of a folder is read as documents.

    Raises:
        DataError: there is no such file, or a folder without documents.
    """
    path = local_path(name)
    if path.is_file():
        return Selection(name, (path,), skipped=_empty_among([path]))
    if path.is_dir():
        return _select_below(name, path, is_document=is_document)
    if path.exists():  # such as <(zcat FILE) of a shell
        raise DataError(
            f"{name} is no file",
            why="it is a pipe or device, and files are read in parts and more than once",
            fix="write what it gives to a file, which may be compressed",
        )
    if glob.has_magic(name):
        return _select_matches(name, is_document=is_document)
    has_file_suffix = is_compressed(path) or is_document(path) or path.suffix.lower() in ROW_TYPES
    if has_file_suffix or name.startswith((".", "/", "~")):
        raise DataError(
            f"{name} does not exist", why="no such file or folder", fix="check the path of --input"
        )
    return Selection(name, None)


def _select_below(name: str, folder: Path, *, is_document: IsDocument) -> Selection:
    """The files of documents below a folder; none where all are rows that `datasets` loads."""
    if is_saved_dataset(folder):
        return Selection(name, None)
    selection = _walk(name, folder, is_document=is_document)
    if selection.files:
        return selection
    others = selection.other_types
    if others and all(Path(f"x{suffix}").suffix in ROW_TYPES for suffix in others):
        return Selection(name, None)
    raise _no_documents(selection)


def _no_documents(selection: Selection) -> DataError:
    """The error for a folder without files of documents."""
    others = selection.other_types
    why = "it is empty"
    if others or selection.skipped:
        reasons = [f"{number} {reason}" for reason, number in selection.skipped.items()]
        why = f"it has {', '.join([list_types(others)] if others else reasons)}"
    fix = "give files with text"
    if others:
        suffix = next((name for name in others if name not in ROW_TYPES), ".txt")
        fix = f"--text-suffix {suffix} reads these files as text, one document per file"
        if suffix in _HTML:
            fix = "extract the text of the pages first, for example with trafilatura"
    return DataError(
        f"{selection.name} holds no file of documents",
        why=f"{why}; text is read from .txt and .md, rows from .jsonl, .ndjson and .parquet",
        fix=fix,
    )


def _walk(name: str, folder: Path, *, is_document: IsDocument) -> Selection:
    """Find the documents below a folder, and count the files that are left out."""
    files = set()
    skipped: Counter[str] = Counter()
    other_types: Counter[str] = Counter()
    for file in folder.rglob("*"):
        if file.is_symlink() and not file.is_file():
            skipped["linked to no file"] += 1
        if not file.is_file():
            continue
        if any(part.startswith(".") for part in file.relative_to(folder).parts):
            skipped["hidden"] += 1
        elif is_document(file):
            files.add(file)
        else:
            other_types[type_of(file)] += 1
    copies = {file for file in files if is_compressed(file) and file.with_suffix("") in files}
    if copies:
        skipped["compressed beside the file itself"] += len(copies)
    selected = sorted(files - copies)
    return Selection(name, tuple(selected), skipped + _empty_among(selected), other_types)


def _empty_among(files: Iterable[Path]) -> Counter[str]:
    """The number of empty files, which have no documents."""
    empty = sum(file.stat().st_size == 0 for file in files)
    return Counter({"empty": empty} if empty else {})


def _select_matches(pattern: str, *, is_document: IsDocument) -> Selection:
    """The files that match a pattern, and the files of documents below folders that match."""
    files: dict[Path, None] = {}  # in order, without repetition
    skipped: Counter[str] = Counter()
    other_types: Counter[str] = Counter()
    for name in sorted(glob.glob(expanded(pattern), recursive=True)):
        path = Path(name)
        if path.is_dir():
            below = _walk(name, path, is_document=is_document)
            files |= dict.fromkeys(below.files or ())
            skipped += below.skipped
            other_types += below.other_types
        elif path.exists():
            files[path] = None
            skipped += _empty_among([path])
    if not files:
        raise DataError(
            f"no file matches {pattern}", why="it is a pattern", fix="check the path of --input"
        )
    return Selection(pattern, tuple(files), skipped, other_types)
