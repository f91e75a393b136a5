"""The manifest of a checkpoint: the chunks of every global tensor and their files, as frozen data and as JSON.

    Manifest       step, files, tensors; objects, config and topology of the run
    TensorEntry    shape and dtype of one global tensor, and its chunks
    ChunkEntry     one chunk: box, file, key in that file, checksum, size
    to_json        Manifest -> text, one line per tensor, with a checksum over the content
    from_json      text -> Manifest, or a CheckpointError with the reason

Pure: no tensor and no file is touched. docs/checkpoint.md describes the format, in which chunks are called "pieces".
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanotrain.config.schema import nest_flat_values
from nanotrain.errors import CheckpointError
from nanotrain.precision.dtypes import TORCH_DTYPES
from nanotrain.topology.boxes import Box

FORMAT = "nanotrain-checkpoint"
VERSION = 2  # 1: the model section of `config` was flat (moe_router_topk in place of moe.router_topk)


class NewerFormat(CheckpointError):
    """A sound checkpoint of a later format, which this version cannot read; never skipped for an older one."""


@dataclass(frozen=True)
class ChunkEntry:
    """One chunk of a global tensor and its location."""

    box: Box  # the chunk, in the coordinates of the global tensor
    file: str  # name of the safetensors file, in the folder of the manifest
    key: str  # name of the tensor in that file; its shape is that of the box
    crc32: str  # zlib.crc32 of the raw bytes (C order, little endian), eight hexadecimal digits
    nbytes: int  # number of those bytes


@dataclass(frozen=True)
class TensorEntry:
    """One global tensor: shape, dtype (a key of `TORCH_DTYPES`), and chunks that cover every element exactly once."""

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


def plain_json(value: Any) -> Any:
    """A value after a round trip through JSON (tuples become lists, keys text); TypeError where JSON has no form."""
    return json.loads(json.dumps(value))


def to_json(manifest: Manifest) -> str:
    """The manifest as JSON text: one line per tensor, the checksum last."""
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "files": dict(manifest.files),
        "objects": plain_json(manifest.objects),
        "config": plain_json(manifest.config),
        "topology": plain_json(manifest.topology),
        "tensors": {name: _tensor_to_dict(entry) for name, entry in manifest.tensors.items()},
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in body.items() if key != "tensors"]
    rows = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in body["tensors"].items()]
    return "{\n" + "".join(lines) + '"tensors": {\n' + ",\n".join(rows) + f'\n}},\n"sha256": "{_checksum(body)}"\n}}\n'


def from_json(text: str, *, source: str = "the manifest") -> Manifest:
    """Parse the output of `to_json`; `source` is its path, for errors.

    Raises:
        CheckpointError: not JSON, not a manifest, or its checksum does not match.
        NewerFormat: of a later version of the format.
    """
    try:
        body = json.loads(text)
    except ValueError as error:
        raise _unreadable(source, f"it is no JSON ({error})") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT or not isinstance(body.get("version"), int):
        raise _unreadable(source, f'it does not say "format": "{FORMAT}"')
    if body["version"] > VERSION:
        raise NewerFormat(
            f"{source} has format version {body['version']}",
            why=f"this nanotrain reads versions up to {VERSION}",
            fix="load it with the nanotrain that wrote it, or update this one",
        )
    written, present = body.pop("sha256", None), _checksum(body)
    if written != present:
        raise _unreadable(source, f"it says sha256 {written} and its content has {present}")
    try:
        return _manifest_of(body)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _unreadable(source, f"{type(error).__name__}: {error}") from None


def _manifest_of(body: dict[str, Any]) -> Manifest:
    return Manifest(
        step=int(body["step"]),
        files={_plain_name(name): int(size) for name, size in body["files"].items()},
        tensors={name: _tensor_from_dict(entry) for name, entry in body["tensors"].items()},
        objects=body["objects"],
        config=body["config"] if body["version"] > 1 else nest_flat_values(body["config"]),
        topology=body["topology"],
    )


def _tensor_to_dict(entry: TensorEntry) -> dict[str, Any]:
    chunks = [
        {"box": [c.box.start, c.box.stop], "file": c.file, "key": c.key, "crc32": c.crc32, "nbytes": c.nbytes}
        for c in entry.chunks
    ]
    return {"shape": entry.shape, "dtype": entry.dtype, "pieces": chunks}


def _tensor_from_dict(entry: dict[str, Any]) -> TensorEntry:
    if entry["dtype"] not in TORCH_DTYPES:
        raise ValueError(f"unknown dtype {entry['dtype']!r}")
    chunks = tuple(
        ChunkEntry(Box(tuple(c["box"][0]), tuple(c["box"][1])), c["file"], c["key"], c["crc32"], c["nbytes"])
        for c in entry["pieces"]
    )
    return TensorEntry(tuple(entry["shape"]), entry["dtype"], chunks)


def _plain_name(name: str) -> str:
    """A file name without a path, so that no manifest makes us read outside its folder."""
    if "/" in name or "\\" in name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is no plain file name")
    return name


def _checksum(body: Mapping[str, Any]) -> str:
    """SHA-256 of the content in canonical form, so that re-indenting the file does not change it."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _unreadable(source: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{source} cannot be read", why=reason, fix="load an older checkpoint of the run")
