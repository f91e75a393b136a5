"""The manifest of a checkpoint: which boxes of which global tensors lie in which file, as frozen data and as JSON.

    Manifest       step, files, tensors, and what the trainer wants back (objects, config, topology)
    TensorEntry    shape and dtype of one global tensor, and the pieces that tile it
    PieceEntry     one box of it: file, key in that file, checksum, size
    to_json        Manifest -> text, one tensor a line, with a checksum over itself
    from_json      text -> Manifest, or a CheckpointError that says what is wrong with it

Pure: no tensor and no file is touched here, and torch is not imported. docs/checkpoint.md is the same in prose.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanotrain.config.schema import nest_flat_values
from nanotrain.errors import CheckpointError
from nanotrain.topology.boxes import Box

FORMAT = "nanotrain-checkpoint"
VERSION = 2  # 1: the model section of `config` was flat (moe_router_topk in place of moe.router_topk)
ELEMENT_BYTES = {
    "fp64": 8, "fp32": 4, "fp16": 2, "bf16": 2, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class NewerFormat(CheckpointError):
    """A checkpoint of a later nanotrain: sound, but not for this one, so it is never skipped for an older one."""


@dataclass(frozen=True)
class PieceEntry:
    """Where one box of a tensor lies.

    Args:
        box: in the coordinates of the global tensor.
        file: name of the safetensors file, in the folder of the manifest.
        key: name of the safetensors tensor in that file; its shape is the box's.
        crc32: zlib.crc32 of its raw bytes (C order, little endian), eight hexadecimal digits.
        nbytes: length of those bytes.
    """

    box: Box
    file: str
    key: str
    crc32: str
    nbytes: int


@dataclass(frozen=True)
class TensorEntry:
    """One global tensor: its shape, its dtype (a key of `ELEMENT_BYTES`) and the pieces that tile it exactly once."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[PieceEntry, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Args:
        step: optimizer steps done.
        files: size in bytes of every file the pieces lie in.
        tensors: global name -> entry.
        objects: JSON the trainer wants back as it was (counters).
        config: the resolved configuration of the run that wrote it.
        topology: the layout of that run, for information only: nothing is read by it.
    """

    step: int
    files: Mapping[str, int]
    tensors: Mapping[str, TensorEntry]
    objects: Mapping[str, Any]
    config: Mapping[str, Any]
    topology: Mapping[str, Any]


def plain_json(value: Any) -> Any:
    """The value as JSON gives it back (tuples become lists, keys become text); TypeError when JSON cannot hold it."""
    return json.loads(json.dumps(value))


def to_json(manifest: Manifest) -> str:
    """The manifest as text: valid JSON, one tensor a line, its checksum last."""
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
    """Read a manifest back.

    Args:
        text: what `to_json` wrote.
        source: how errors call it, the file's path.

    Raises:
        CheckpointError: not JSON, not a manifest, or its own checksum does not fit.
        NewerFormat: written in a later version of the format.
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
    pieces = [
        {"box": [p.box.start, p.box.stop], "file": p.file, "key": p.key, "crc32": p.crc32, "nbytes": p.nbytes}
        for p in entry.pieces
    ]
    return {"shape": entry.shape, "dtype": entry.dtype, "pieces": pieces}


def _tensor_from_dict(entry: dict[str, Any]) -> TensorEntry:
    if entry["dtype"] not in ELEMENT_BYTES:
        raise ValueError(f"unknown dtype {entry['dtype']!r}")
    pieces = tuple(
        PieceEntry(Box(tuple(p["box"][0]), tuple(p["box"][1])), p["file"], p["key"], p["crc32"], p["nbytes"])
        for p in entry["pieces"]
    )
    return TensorEntry(tuple(entry["shape"]), entry["dtype"], pieces)


def _plain_name(name: str) -> str:
    """A checkpoint never reads outside its own folder, whoever wrote its manifest."""
    if "/" in name or "\\" in name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is no plain file name")
    return name


def _checksum(body: Mapping[str, Any]) -> str:
    """SHA-256 of the content in one canonical spelling, so that re-indenting the file does not damage it."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _unreadable(source: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{source} cannot be read", why=reason, fix="load an older checkpoint of the run")
