"""Parse JSON that may be damaged or hostile, and check its values one by one.

    read_file, unreadable                 bytes of a regular file of bounded size, or the reason
    open_file, read_rows                  the same for a file read in parts, as rows of JSON
    parse_yaml, plain_text                YAML without aliases; text without control characters
    require_few_values                    YAML with aliases that stand for few values
    own_file                              a file of a downloaded folder, and no link out of it
    parse_json                            text -> value; ValueError unless JSON of bounded depth
    whole_number, finite_number,          a value of the expected type and range, else ValueError
    text_of, object_of, list_of,
    plain_file_name

The callers know the file and the cure; they turn the ValueError into their own error.
"""

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import yaml

MAX_DEPTH = 64  # nested lists and objects; real files have 2 to 8
LARGEST = 2**62  # largest size, offset or counter: sums of two still fit into 64 bits
MAX_FILE_BYTES = (
    1 << 30
)  # size of a JSON file; the manifest of 70B parameters on 1,024 ranks has 36 MB
MAX_TOKENIZER_BYTES = 1 << 28  # Gemma 3's tokenizer, 262,144 tokens, has 33 MB
BLOCK_BYTES = 1 << 16  # part of a file that is read in parts
# files and lines of JSON rows; a row of 61 routers with 256 experts has 0.1 MB
MAX_ROWS_BYTES, MAX_LINE = 1 << 28, 1 << 20
MAX_BAD_LINES = 1000  # in a row
MAX_TEXT = 100_000  # characters that are shown
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
MAX_NAME = 255  # bytes of a file name on every common file system


def read_file(
    path: Path,
    *,
    follows_links: bool = True,
    most: int = MAX_FILE_BYTES,
    until: re.Pattern[bytes] | None = None,
) -> bytes:
    """The bytes of a file that is parsed: a pipe would block, and a huge file fill the memory.

    `until` is a pattern of at most BLOCK_BYTES; no more blocks are read than up to the end of its
    first match.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no regular file, or larger than `most` bytes.
    """
    with open_file(path, follows_links=follows_links, most=most) as file:
        if until is None:
            return file.read()
        content = bytearray()
        while block := file.read(BLOCK_BYTES):
            content += block
            if until.search(content, max(0, len(content) - 2 * BLOCK_BYTES)):
                break
        return bytes(content)


def open_file(path: Path, *, follows_links: bool = False, most: int = LARGEST) -> BinaryIO:
    """Open a file to read; errors as of `read_file`."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follows_links else os.O_NOFOLLOW)
    file = open(os.open(path, flags), "rb")  # noqa: SIM115
    try:
        _require_size(os.fstat(file.fileno()), most)
    except ValueError:
        file.close()
        raise
    return file


def read_rows(path: Path, *, most: int = MAX_ROWS_BYTES) -> Iterator[dict[str, Any]]:
    """The objects of a file with one object per line; of a large file the last `most` bytes.

    Other lines, those of MAX_LINE bytes or more, and a file that cannot be read are left out.
    """
    try:
        file = open_file(path)
    except (OSError, ValueError):
        return
    with file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        bad = 0
        while most > 0 and bad < MAX_BAD_LINES and (line := file.readline(MAX_LINE)):
            most, bad = most - len(line), bad + 1
            if len(line) == MAX_LINE:  # part of a longer one
                continue
            with suppress(ValueError):  # truncated by a crash
                row = parse_json(line, allow_nan=True)
                if isinstance(row, dict):
                    bad = 0
                    yield row


def own_file(path: Path) -> Path:
    """The path of a file of a downloaded folder.

    It is a regular file, or a link in the folder or into the blobs of the hub's cache.

    Raises:
        OSError: there is none.
        ValueError: it is something else.
    """
    folder = path.parent.resolve()
    if path.is_symlink() and path.resolve().parent not in (folder, folder.parent.parent / "blobs"):
        raise ValueError("it is a symbolic link to another folder")
    _require_size(os.stat(path), LARGEST)
    return path


def _require_size(status: os.stat_result, most: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is no regular file")
    if status.st_size > most:
        raise ValueError(f"it has {status.st_size:,} bytes, and at most {most:,} are read")


def unreadable(error: OSError | ValueError) -> str:
    """Why `read_file` or a decoder failed."""
    if not isinstance(error, OSError):
        return str(error)
    known = {
        errno.ENOENT: "it does not exist",
        errno.ENOTDIR: "no folder",
        errno.ELOOP: "it is a symbolic link",
    }
    return known.get(error.errno or 0) or error.strerror or str(error)


def parse_json(text: str | bytes, *, allow_nan: bool = False) -> Any:
    """Parse JSON.

    `allow_nan` also takes NaN and Infinity, which Python writes and JSON does not have.

    Raises:
        ValueError: not UTF-8, not JSON, or nested deeper than MAX_DEPTH.

    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
    ...
    ValueError: it is nested too deeply
    """
    try:
        value = json.loads(text, parse_constant=None if allow_nan else _refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if depth_of(value) > MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    return value


class _Loader(yaml.SafeLoader):
    """A loader that reads no aliases: a few lines of them can stand for billions of values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise ValueError("it has an alias")
        return super().compose_node(parent, index)


def parse_yaml(text: str | bytes) -> Any:
    """Parse YAML of plain values.

    Raises:
        ValueError: not YAML, with aliases, or nested deeper than MAX_DEPTH.
    """
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError, AttributeError, TypeError, LookupError) as error:
        # the last three: a value that its tag cannot have, as `!!bool maybe`
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None
    if depth_of(value) > MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    return value


def require_few_values(text: str | bytes, *, most: int) -> None:
    """Check that YAML has at most `most` values, each counted as often as aliases repeat it.

    >>> require_few_values("a: &a [1, 2]\\nb: [*a, *a, *a]", most=9)
    Traceback (most recent call last):
    ...
    ValueError: it has more than 9 values; a few aliases stand for many

    Raises:
        ValueError: it has more, or an alias of a value that contains it.
    """
    if "*" not in str(text):  # no aliases: the size of the file bounds the values
        return
    sizes: dict[int, int] = {}

    def size_of(node: yaml.Node) -> int:
        """The number of values in a node with its aliases expanded, at most `most` + 1."""
        if id(node) in sizes:
            return sizes[id(node)]
        sizes[id(node)] = most + 1  # for a value inside itself
        items = node.value if isinstance(node, yaml.CollectionNode) else []
        flat = [child for item in items for child in (item if isinstance(item, tuple) else [item])]
        sizes[id(node)] = min(1 + sum(map(size_of, flat)), most + 1)
        return sizes[id(node)]

    root = yaml.compose(text, yaml.SafeLoader)
    if root is not None and size_of(root) > most:
        raise ValueError(f"it has more than {most:,} values; a few aliases stand for many")


def plain_text(value: Any) -> str:
    """Text of bounded length without control characters or lone surrogates.

    >>> plain_text("a\x1b[2J"), plain_text(1)
    ('a\ufffd[2J', '1')
    """
    return _CONTROL.sub("\ufffd", (value if isinstance(value, str) else shown(value))[:MAX_TEXT])


def depth_of(value: Any) -> int:
    """The depth of nested lists and objects, without recursion; plain values have depth 0.

    >>> depth_of({"a": [1, {"b": []}]})
    4
    """
    depth, level = 0, [value]
    while level := [node for node in level if isinstance(node, dict | list)]:
        depth += 1
        level = [
            child for node in level for child in (node.values() if isinstance(node, dict) else node)
        ]
    return depth


def whole_number(value: Any, field: str, *, low: int = 0, high: int = LARGEST) -> int:
    """A whole number in [low, high].

    >>> whole_number(-1, "step")
    Traceback (most recent call last):
    ...
    ValueError: step is -1, it must be a whole number of at least 0
    """
    if type(value) is not int or not low <= value <= high:
        expected = (
            f"of at least {low}" if type(value) is not int or value < low else f"of at most {high}"
        )
        raise ValueError(f"{field} is {shown(value)}, it must be a whole number {expected}")
    return value


def finite_number(value: Any, field: str, *, low: float = 0.0) -> float:
    """A finite number of at least `low`."""
    if type(value) not in (int, float) or not low <= value <= LARGEST:
        raise ValueError(
            f"{field} is {shown(value)}, it must be a finite number of at least {low:g}"
        )
    return float(value)


def text_of(value: Any, field: str) -> str:
    """Text without lone surrogates, which no message and no file name can hold."""
    if not isinstance(value, str):
        raise ValueError(f"{field} is {shown(value)}, it must be text")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{field} is {shown(value)}, which is no valid text") from None
    return value


def object_of(value: Any, field: str) -> dict[str, Any]:
    """A JSON object."""
    if not isinstance(value, dict):
        raise ValueError(f"{field} is {shown(value)}, it must be an object")
    return value


def list_of(value: Any, field: str, *, length: int | None = None) -> list[Any]:
    """Check that a value is a JSON list, of `length` items if given."""
    if not isinstance(value, list) or length not in (None, len(value)):
        expected = "a list" if length is None else f"a list of {length} items"
        raise ValueError(f"{field} is {shown(value)}, it must be {expected}")
    return value


def plain_file_name(value: Any, field: str) -> str:
    """A file name without a folder, so that no file makes us read outside its own folder.

    >>> plain_file_name("../model.safetensors", "weight_map")
    Traceback (most recent call last):
    ...
    ValueError: weight_map is '../model.safetensors', it must be a plain file name
    """
    name = text_of(value, field)
    if (
        name in ("", ".", "..")
        or any(mark in name for mark in "/\\\0")
        or len(name.encode()) > MAX_NAME
    ):
        raise ValueError(f"{field} is {shown(name)}, it must be a plain file name")
    return name


def shown(value: Any) -> str:
    """A value in a message: short, printable, whatever a damaged file holds.

    >>> shown({"a": 1}), shown("x" * 100)
    ('an object', "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...")
    """
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else f"a list of {len(value)} items"
    if type(value) is int and abs(value) > LARGEST:
        return "a huge number"
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 48 else f"{text[:48]}..."


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it holds {name}")
