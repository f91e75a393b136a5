"""Read pickles of other programs without importing or running anything that they name.

    load_archive    a file of torch.save, or its bytes, with torch's own restricted reader
    load_metadata   the `.metadata` of torch.distributed.checkpoint, which is a bare pickle
    Record          an object of any of the known classes: what it was given, and no behaviour

Only classes of the list below are read, and each becomes a class of its own below `Record`; any
other name ends the read.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch.serialization import (
    add_safe_globals,
    clear_safe_globals,
    get_safe_globals,
    get_unsafe_globals_in_checkpoint,
    safe_globals,
)

from nanotrain.errors import CheckpointError
from nanotrain.untrusted import MAX_DEPTH, open_file, plain_text, read_file, unreadable

MAX_ARCHIVE_BYTES = 1 << 32  # of a file that is read whole
MAX_METADATA_BYTES = 1 << 30
KNOWN_CLASSES = {
    "argparse.Namespace",
    "collections.OrderedDict",
    "io.BytesIO",
    "_io.BytesIO",
    "pathlib.Path",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "signal.Signals",
    "types.SimpleNamespace",
    "torch.device",
    "torch.serialization._get_layout",
    "numpy.dtype",
    "numpy.ndarray",
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.dtypes.UInt32DType",
    "numpy.dtypes.Float64DType",
    "numpy.dtypes.Int64DType",
}
KNOWN_PACKAGES = (
    "megatron.",
    "transformer_engine.",
    "torch.distributed.checkpoint.",
    "torch.distributed._shard.",
)


class Record:
    """An object of a class that is not imported."""

    arguments: tuple[Any, ...]  # it was made from
    attributes: dict[str, Any]
    values: tuple[Any, ...]  # its state, where that is no dict of attributes

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        record = super().__new__(cls)
        record.arguments = args
        record.attributes = {}
        record.values = ()
        return record

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is computed from the arguments."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.attributes = state
        elif isinstance(state, tuple):
            self.values = state


def is_known(name: str) -> bool:
    """Whether a class may be named in a pickle.

    >>> is_known("argparse.Namespace"), is_known("os.system"), is_known("builtins.eval")
    (True, False, False)
    """
    return name in KNOWN_CLASSES or name.startswith(KNOWN_PACKAGES)


def record_class(name: str) -> type[Record]:
    """A class below `Record` with the name of another one."""
    return type(name.rpartition(".")[2], (Record,), {"__module__": __name__, "full_name": name})


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of a `Record`; empty for anything else."""
    return value.attributes if isinstance(value, Record) else {}


def load_archive(source: Path | bytes, *, shown: str, is_mapped: bool = False) -> Any:
    """The content of a file of torch.save, on the CPU.

    Args:
        source: the file, or its bytes.
        shown: its name in errors.
        is_mapped: map the tensors of a file into memory, so that only what is used is read.

    Raises:
        CheckpointError: it cannot be read, or names a class that is not known.
    """
    try:
        if is_mapped and isinstance(source, Path):
            with open_file(source, follows_links=True):
                value = load_restricted(lambda: str(source), shown=shown, is_mapped=True)
        else:
            content = read_source(source)
            value = load_restricted(lambda: io.BytesIO(content), shown=shown)
        require_shallow(value)
        return value
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise unreadable_file(shown, unreadable(error)) from None
    except pickle.UnpicklingError:  # its text advises to run the file
        raise unreadable_file(shown, "it is no archive that a restricted reader takes") from None
    except Exception as error:  # what a damaged archive makes torch raise has no common class
        raise unreadable_file(shown, f"{type(error).__name__}: {error}") from None


def read_source(source: Path | bytes) -> bytes:
    """The bytes of a file; of bytes the bytes themselves."""
    if isinstance(source, Path):
        return read_file(source, most=MAX_ARCHIVE_BYTES)
    return source


def load_restricted(archive: Callable[[], Any], *, shown: str, is_mapped: bool = False) -> Any:
    """The content of an archive, in which every object of a known class becomes a `Record`.

    Args:
        archive: returns the archive, from its beginning: a file, or the name of one to map.
        shown: its name in errors.
        is_mapped: map the tensors into memory.
    """
    with without_safe_globals():
        names = get_unsafe_globals_in_checkpoint(archive())
        require_known(names, shown=shown)
        classes: list[Any] = [(record_class(name), name) for name in names]
        with safe_globals(classes):
            return torch.load(archive(), map_location="cpu", weights_only=True, mmap=is_mapped)


@contextmanager
def without_safe_globals() -> Iterator[None]:
    """Forget in the block which classes this process allows in archives.

    Imports of other programs allow theirs: megatron-core does for argparse.Namespace.
    """
    allowed = get_safe_globals()
    clear_safe_globals()
    try:
        yield
    finally:
        clear_safe_globals()
        add_safe_globals(allowed)


def require_shallow(value: Any) -> None:
    """Check that values are not nested deeper than MAX_DEPTH, nor within themselves.

    Raises:
        ValueError: they are.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        # a value that stands in several places is looked at once
        inner = {id(item): item for outer in level for item in _items_of(outer)}
        level = list(inner.values())
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _items_of(value: Any) -> Iterable[Any]:
    """The values in a dict, list, tuple or set, or among the attributes of a `Record`."""
    if isinstance(value, Record):
        return value.attributes.values()
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple | set) else ()


def require_known(names: Iterable[str], *, shown: str) -> None:
    """Check that a pickle names known classes only.

    Raises:
        CheckpointError: it names another one.
    """
    unknown = sorted(name for name in names if not is_known(name))
    if unknown:
        raise CheckpointError(
            f"{shown} is not read",
            why=f"it would call {plain_text(unknown[0])}, which no checkpoint needs",
            fix="use a checkpoint from a source that you trust",
        )


class _MetadataReader(pickle.Unpickler):
    """A reader of pickles in which names are known classes, shapes or data types."""

    def __init__(self, content: bytes, *, shown: str) -> None:
        super().__init__(io.BytesIO(content))
        self.shown = shown
        self.classes: dict[str, type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """A class without behaviour for every known name."""
        full_name = f"{module}.{name}"
        if full_name == "torch.Size":
            return torch.Size
        if full_name == "collections.OrderedDict":
            return OrderedDict
        if module == "torch":
            value = getattr(torch, name, None)
            if isinstance(value, torch.dtype | torch.layout):
                return value
        require_known([full_name], shown=self.shown)
        if full_name not in self.classes:
            self.classes[full_name] = record_class(full_name)
        return self.classes[full_name]


def load_metadata(path: Path) -> Any:
    """The object in a `.metadata` file.

    Raises:
        CheckpointError: it cannot be read, or names a class that is not known.
    """
    shown = str(path)
    try:
        with open_file(path, follows_links=True, most=MAX_METADATA_BYTES) as file:
            content = file.read()
        return _MetadataReader(content, shown=shown).load()
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise unreadable_file(shown, unreadable(error)) from None
    except Exception as error:  # what a damaged pickle makes the reader raise has no common class
        raise unreadable_file(shown, f"{type(error).__name__}: {error}") from None


def unreadable_file(shown: str, why: str) -> CheckpointError:
    """The error for a file of a foreign checkpoint that cannot be read."""
    return CheckpointError(
        f"{shown} cannot be read",
        why=plain_text(why.strip().partition("\n")[0]),
        fix="copy the checkpoint again, or use another step of the run",
    )
