"""The manifest of a checkpoint: the chunks of every global tensor, as frozen data and as JSON.

    Manifest       step, files, tensors; objects, config and topology of the run
    TensorEntry    shape and dtype of one global tensor, and its chunks
    ChunkEntry     one chunk: box, file, key in that file, checksum, size
    to_json        Manifest -> text, one line per tensor, with a checksum over the content
    from_json      text -> Manifest, every field checked, or a DamagedCheckpoint with the field and
                   the reason
    damaged        the error for any damage of a step folder

Pure: no tensor and no file is touched. docs/checkpoint.md describes the format, in which chunks are
called "pieces".
"""

import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanotrain.config.schema import with_current_keys
from nanotrain.errors import CheckpointError
from nanotrain.precision.dtypes import TORCH_DTYPES
from nanotrain.spec.boxes import Box
from nanotrain.system import without_collection
from nanotrain.untrusted import (
    list_of,
    object_of,
    parse_json,
    plain_file_name,
    shown,
    text_of,
    whole_number,
)

FORMAT = "nanotrain-checkpoint"
MAX_DIMS = 16  # dims of a tensor; the models here have at most 4
_CRC32 = re.compile("[0-9a-f]{8}")
# 1: the model section of `config` was flat (moe_router_topk in place of moe.router_topk)
VERSION = 2


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that cannot be trusted: a resume takes an older one, `--load` does not."""


class NewerFormat(CheckpointError):
    """A sound checkpoint of a later format; never skipped for an older one."""


@dataclass(frozen=True)
class ChunkEntry:
    """One chunk of a global tensor and its location."""

    box: Box  # the chunk, in the coordinates of the global tensor
    file: str  # name of the safetensors file, in the folder of the manifest
    key: str  # name of the tensor in that file; it has the shape of the box
    crc32: str  # zlib.crc32 of the raw bytes (C order, little endian), eight hexadecimal digits
    nbytes: int  # number of bytes of the values


@dataclass(frozen=True)
class TensorEntry:
    """One global tensor: shape, dtype (a key of `TORCH_DTYPES`), and chunks that cover every
    element exactly once.
    """

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[ChunkEntry, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor."""
        return math.prod(self.shape) * TORCH_DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint."""

    step: int  # optimizer steps done
    files: Mapping[str, int]  # file name -> size in bytes
    tensors: Mapping[str, TensorEntry]  # global name -> entry
    objects: Mapping[str, Any]  # JSON that `restore` returns unchanged (counters)
    config: Mapping[str, Any]  # the resolved configuration of the run
    topology: Mapping[str, Any]  # the layout of the run, for information only
    # names of the tensors with a value that is not finite, found while they were written; None
    # where nobody looked
    not_finite: tuple[str, ...] | None = None


def plain_json(value: Any) -> Any:
    """A value after a round trip through JSON (tuples become lists, keys text); TypeError where
    JSON has no form.
    """
    return json.loads(json.dumps(value))


def to_json(manifest: Manifest) -> str:
    """The manifest as JSON text: one line per tensor, the checksum last."""
    body: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "files": dict(manifest.files),
    }
    if manifest.not_finite is not None:
        body["not_finite"] = list(manifest.not_finite)
    for field in ("objects", "config", "topology"):
        body[field] = plain_json(getattr(manifest, field))
    lines = [f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in body.items()]
    tensors = {name: tensor_to_dict(entry) for name, entry in manifest.tensors.items()}
    rows = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in tensors.items()]
    checksum = _checksum(body | {"tensors": tensors})
    text = "".join(["{\n", *lines, '"tensors": {\n', ",\n".join(rows)])
    return f'{text}\n}},\n"sha256": "{checksum}"\n}}\n'


@without_collection()
def from_json(text: str, *, source: str = "the manifest", is_shard: bool = False) -> Manifest:
    """Parse and check the output of `to_json`.

    Args:
        text: the file.
        source: its path, for errors.
        is_shard: whether it is of the shard of one rank, which holds parts of tensors.

    Raises:
        DamagedCheckpoint: not JSON, not a manifest, its checksum does not match, or a field is not
            what it must be.
        NewerFormat: it is of a later version of the format.
    """
    try:
        body = object_of(parse_json(text, allow_nan=True), "it")
    except ValueError as error:
        raise _unreadable(source, f"it is no JSON ({error})") from None
    if body.get("format") != FORMAT or type(body.get("version")) is not int or body["version"] < 1:
        raise _unreadable(source, f'it has no "format": "{FORMAT}"')
    # Before the version: every version has this checksum, so that a flipped bit is no later format.
    written = body.pop("sha256", None)
    present = _checksum(body)
    if written != present:
        raise _unreadable(
            source, f"its field sha256 is {shown(written)} and its content has {present}"
        )
    if body["version"] > VERSION:
        raise NewerFormat(
            f"{source} has format version {body['version']}",
            why=f"this nanotrain reads versions up to {VERSION}",
            fix="load it with the nanotrain that wrote it, or update this one",
        )
    try:
        return _parse_manifest(body, is_shard=is_shard)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"it has no field {error}" if isinstance(error, KeyError) else str(error)
        raise _unreadable(source, reason) from None


def damaged(what: str, *, why: str, path: Path | None = None) -> DamagedCheckpoint:
    """The error for damage; `path` is the step folder, where it is known."""
    fix = "load an older checkpoint of the run, with --load and its step folder"
    if path is not None:
        fix = (
            "load an older checkpoint of the run, "
            f"with --load and a step folder of {path.parent}; "
            f"`nanotrain checkpoint verify {path}` lists the damage"
        )
    return DamagedCheckpoint(what, why=why, fix=fix)


def _parse_manifest(body: dict[str, Any], *, is_shard: bool) -> Manifest:
    """Check each field of a manifest and build it; ValueError names the field."""
    files = {}
    for name, size in object_of(body["files"], "files").items():
        file = plain_file_name(name, "a name in files")
        files[file] = whole_number(size, f"files[{shown(name)}]")
    tensors = {}
    for name, entry in object_of(body["tensors"], "tensors").items():
        tensor = text_of(name, "a name in tensors")
        tensors[tensor] = tensor_from_dict(entry, f"tensors[{shown(name)}]")
    _check_sizes(tensors, files, is_shard=is_shard)
    not_finite = None
    if "not_finite" in body:
        names = list_of(body["not_finite"], "not_finite")
        not_finite = tuple(text_of(name, "not_finite") for name in names)
    config = object_of(body["config"], "config")
    return Manifest(
        step=whole_number(body["step"], "step"),
        files=files,
        tensors=tensors,
        objects=object_of(body["objects"], "objects"),
        config=with_current_keys(config),
        topology=object_of(body["topology"], "topology"),
        not_finite=not_finite,
    )


def _check_sizes(
    tensors: Mapping[str, TensorEntry], files: Mapping[str, int], *, is_shard: bool
) -> None:
    """Check that chunks fill their tensors and fit into their files.

    A reader then never allocates more than is on the disk.
    """
    used = dict.fromkeys(files, 0)
    for name, entry in tensors.items():
        numel = math.prod(entry.shape)
        held = sum(chunk.box.numel for chunk in entry.chunks)
        if numel != held and not is_shard:
            raise ValueError(
                f"tensors[{shown(name)}] has {shown(numel)} elements, its pieces hold {held}"
            )
        for chunk in entry.chunks:
            if chunk.file not in files:
                raise ValueError(
                    f"tensors[{shown(name)}] lies in file {shown(chunk.file)}, "
                    "which files does not list"
                )
            used[chunk.file] += chunk.nbytes
    for file, nbytes in used.items():
        if nbytes > files[file]:
            raise ValueError(
                f"files[{shown(file)}] is {files[file]} bytes, its chunks need {nbytes}"
            )


def tensor_to_dict(entry: TensorEntry) -> dict[str, Any]:
    """The entry of a tensor as JSON."""
    pieces = [_chunk_to_dict(chunk) for chunk in entry.chunks]
    return {"shape": entry.shape, "dtype": entry.dtype, "pieces": pieces}


def _chunk_to_dict(chunk: ChunkEntry) -> dict[str, Any]:
    return {
        "box": [chunk.box.start, chunk.box.stop],
        "file": chunk.file,
        "key": chunk.key,
        "crc32": chunk.crc32,
        "nbytes": chunk.nbytes,
    }


def tensor_from_dict(entry: Any, field: str) -> TensorEntry:
    """The entry of a tensor from JSON.

    Args:
        entry: the JSON value.
        field: its place in the manifest, for errors.

    Raises:
        ValueError: a wrong value.
    """
    entry = object_of(entry, field)
    shape = _indices(entry["shape"], f"{field}.shape")
    dtype = text_of(entry["dtype"], f"{field}.dtype")
    if dtype not in TORCH_DTYPES:
        raise ValueError(f"{field}.dtype is {shown(dtype)}, known are {', '.join(TORCH_DTYPES)}")
    itemsize = TORCH_DTYPES[dtype].itemsize
    chunks = []
    for index, piece in enumerate(list_of(entry["pieces"], f"{field}.pieces")):
        piece_field = f"{field}.pieces[{index}]"
        chunk = _chunk_from_dict(piece, piece_field, shape=shape, itemsize=itemsize)
        chunks.append(chunk)
    return TensorEntry(shape, dtype, tuple(chunks))


def _chunk_from_dict(
    chunk: Any, field: str, *, shape: tuple[int, ...], itemsize: int
) -> ChunkEntry:
    """Check one chunk of a tensor; `field` is the path in the manifest, for errors."""
    chunk = object_of(chunk, field)
    corners = list_of(chunk["box"], f"{field}.box", length=2)
    start = _indices(corners[0], f"{field}.box", length=len(shape))
    stop = _indices(corners[1], f"{field}.box", length=len(shape))
    if not all(low <= high <= size for low, high, size in zip(start, stop, shape, strict=True)):
        raise ValueError(
            f"{field}.box is {corners}, which is no box of a tensor of shape {list(shape)}"
        )
    box = Box(start, stop)
    nbytes = whole_number(chunk["nbytes"], f"{field}.nbytes")
    if nbytes != box.numel * itemsize:
        raise ValueError(
            f"{field}.nbytes is {nbytes}, its box has {box.numel} elements of {itemsize} bytes"
        )
    crc32 = text_of(chunk["crc32"], f"{field}.crc32")
    if not _CRC32.fullmatch(crc32):
        raise ValueError(f"{field}.crc32 is {shown(crc32)}, it must be eight hexadecimal digits")
    # sent once per file, not once per chunk
    file = sys.intern(plain_file_name(chunk["file"], f"{field}.file"))
    key = text_of(chunk["key"], f"{field}.key")
    return ChunkEntry(box, file, key, crc32, nbytes)


def _indices(value: Any, field: str, *, length: int | None = None) -> tuple[int, ...]:
    items = list_of(value, field, length=length)
    if len(items) > MAX_DIMS:
        raise ValueError(f"{field} has {len(items)} dims, at most {MAX_DIMS} are possible")
    return tuple(whole_number(item, field) for item in items)


def _checksum(body: Mapping[str, Any]) -> str:
    """SHA-256 of the content in canonical form, the same for any indentation of the file."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _unreadable(source: str, reason: str) -> DamagedCheckpoint:
    return damaged(f"{source} cannot be read", why=reason, path=Path(source).parent)
