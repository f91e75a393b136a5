"""Boxes of the tensors of a checkpoint of torch.distributed.checkpoint, each read from its chunks.

    TorchDistFolder   the tensors and objects of a folder, by key
    read              one box of a tensor

A chunk is a file of torch.save inside of a `.distcp` file. Its bytes are mapped into memory, and
only the rows of the box are copied.
"""

import io
import mmap
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor

from nanotrain.errors import CheckpointError
from nanotrain.interop.dcp.pickles import (
    attributes_of,
    load_archive,
    load_metadata,
    unreadable_file,
)
from nanotrain.spec.boxes import Box
from nanotrain.untrusted import (
    LARGEST,
    open_file,
    plain_file_name,
    shown,
    text_of,
    unreadable,
    whole_number,
)

METADATA = ".metadata"
MAX_DIMS = 8
LOCAL_HEADER_BYTES = 30  # of a file in a zip archive, before its name


@dataclass(frozen=True)
class Extent:
    """The bytes of a chunk or object in a file."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[tuple[Box, Extent], ...]


class TensorFolder(Protocol):
    """The tensors and objects of a checkpoint, in whatever format."""

    folder: Path
    tensors: dict[str, StoredTensor]
    objects: dict[str, Extent]

    def read(self, key: str, box: Box) -> Tensor:
        """One box of a tensor, in its data type."""
        ...

    def read_object(self, key: str) -> Any:
        """The object of a key that is no tensor."""
        ...


class TorchDistFolder:
    """The tensors of a folder.

    Args:
        folder: folder of a step.

    Raises:
        CheckpointError: its index is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, StoredTensor] = {}
        self.objects: dict[str, Extent] = {}
        self._maps: dict[str, mmap.mmap] = {}
        self._lock = Lock()
        index = load_metadata(folder / METADATA)
        try:
            self._read_index(attributes_of(index))
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise self._damaged(METADATA, str(error)) from None

    def _read_index(self, index: Mapping[str, Any]) -> None:
        """Fill the tables of tensors and objects; ValueError names what is wrong."""
        extents = _extents(index["storage_data"])
        for name, entry in index["state_dict_metadata"].items():
            key = text_of(name, "a key")
            fields = attributes_of(entry)
            if "chunks" not in fields:
                extent = extents.get((key, None))
                if extent is not None:
                    self.objects[key] = extent
                continue
            shape = _sizes(fields["size"], f"size of {shown(key)}")
            dtype = fields["properties"].values[0]
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{shown(key)} has no data type")
            chunks = []
            for chunk in fields["chunks"]:
                box = _chunk_box(chunk, key, shape=shape)
                if (key, box.start) not in extents:
                    raise ValueError(f"{shown(key)} has a chunk at {box.start} in no file")
                chunks.append((box, extents[key, box.start]))
            self.tensors[key] = StoredTensor(shape, dtype, tuple(chunks))

    def read(self, key: str, box: Box) -> Tensor:
        """One box of a tensor, in its data type.

        Raises:
            CheckpointError: a chunk is missing or damaged.
        """
        stored = self.tensors[key]
        target = torch.empty(box.shape, dtype=stored.dtype)
        copied = 0
        for chunk, extent in stored.chunks:
            shared = chunk.intersect(box)
            if shared is None:
                continue
            values = self._read_chunk(extent, chunk, inner=shared.within(chunk), key=key)
            if values.dtype != stored.dtype:
                raise self._damaged(extent.file, f"{shown(key)} is {values.dtype}")
            target[shared.within(box).slices()] = values
            copied += shared.numel
        if copied != box.numel:
            raise self._damaged(METADATA, f"the chunks do not cover {shown(key)} exactly once")
        return target

    def read_object(self, key: str) -> Any:
        """One object, which torch.save wrote.

        Raises:
            CheckpointError: it is damaged.
        """
        extent = self.objects[key]
        content = self._map_file(extent)[extent.offset : extent.offset + extent.nbytes]
        return load_archive(content, shown=f"{self.folder / extent.file}, {key}")

    def _read_chunk(self, extent: Extent, chunk: Box, *, inner: Box, key: str) -> Tensor:
        """Part of a chunk, of which only the rows between its first and last element are copied."""
        try:
            mapped = self._map_file(extent)
            view = memoryview(mapped)[extent.offset : extent.offset + extent.nbytes]
            layout = _load_layout(view)
            if tuple(layout.shape) != chunk.shape:
                raise ValueError(f"{shown(key)} has the shape {tuple(layout.shape)}")
            data = _find_data(view, nbytes=layout.untyped_storage().nbytes())
            return _copy_box(data, layout, box=inner)
        except CheckpointError:
            raise
        except (OSError, ValueError) as error:
            raise self._damaged(extent.file, unreadable(error)) from None
        except Exception as error:  # what damaged archives raise has no common class
            raise self._damaged(extent.file, f"{type(error).__name__}: {error}") from None

    def _map_file(self, extent: Extent) -> mmap.mmap:
        """The file of a chunk, mapped into memory."""
        with self._lock:
            if extent.file not in self._maps:
                try:
                    with open_file(self.folder / extent.file, follows_links=True) as file:
                        # private: torch takes no buffer that cannot be written
                        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                except (OSError, ValueError) as error:
                    raise self._damaged(extent.file, unreadable(error)) from None
                self._maps[extent.file] = mapped
            mapped = self._maps[extent.file]
        if extent.offset + extent.nbytes > len(mapped):
            why = f"it has {len(mapped):,} bytes, its index needs {extent.offset + extent.nbytes:,}"
            raise self._damaged(extent.file, why)
        return mapped

    def _damaged(self, file: str, why: str) -> CheckpointError:
        return unreadable_file(str(self.folder / file), why)


class _ViewFile(io.RawIOBase):
    """A memory view as a file, without a copy."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._position = 0

    def readable(self) -> bool:
        """True: the file can be read."""
        return True

    def seekable(self) -> bool:
        """True: the file can be read from any position."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset from the start, the position or the end."""
        begins = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._view)}
        self._position = max(0, begins[whence] + offset)
        return self._position

    def tell(self) -> int:
        """The position."""
        return self._position

    def readinto(self, into: Any) -> int:
        """Copy bytes at the position; their number, which is 0 at the end."""
        data = self._view[self._position : self._position + len(into)]
        into[: len(data)] = data
        self._position += len(data)
        return len(data)


def _extents(storage: Mapping[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], Extent]:
    """The bytes of chunks, by key and first element, and of objects, by key and None."""
    extents = {}
    for index, info in storage.items():
        place = attributes_of(index)
        fields = attributes_of(info)
        key = place["fqn"]
        offset = place.get("offset")
        first = None if offset is None else _sizes(offset, f"offset of {shown(key)}")
        if fields.get("transform_descriptors"):
            raise ValueError(f"{shown(key)} is compressed, which is not read")
        extents[key, first] = Extent(
            plain_file_name(fields["relative_path"], f"file of {shown(key)}"),
            whole_number(fields["offset"], f"offset of {shown(key)}"),
            whole_number(fields["length"], f"length of {shown(key)}"),
        )
    return extents


def _chunk_box(chunk: Any, key: str, *, shape: tuple[int, ...]) -> Box:
    """The box of a stored chunk; ValueError if it is not inside the tensor."""
    fields = attributes_of(chunk)
    start = _sizes(fields["offsets"], f"offsets of {shown(key)}")
    sizes = _sizes(fields["sizes"], f"sizes of {shown(key)}")
    box = Box(start, tuple(map(sum, zip(start, sizes, strict=True))))
    if box.intersect(Box.full(shape)) != box and box.numel:
        raise ValueError(f"{shown(key)} of shape {shape} has a chunk at {box.text}")
    return box


def _sizes(value: Any, field: str) -> tuple[int, ...]:
    """Sizes along all dims."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) > MAX_DIMS:
        raise ValueError(f"{field} is {shown(value)}, it must be at most {MAX_DIMS} numbers")
    sizes = tuple(whole_number(size, field) for size in value)
    if prod(sizes) > LARGEST:
        raise ValueError(f"{field} is {sizes}, which is too large")
    return sizes


def _load_layout(view: memoryview) -> Tensor:
    """The tensor of an archive without its values: shape, strides and data type."""
    file: Any = _ViewFile(view)
    layout = torch.load(file, map_location="meta", weights_only=True)
    if not isinstance(layout, Tensor) or layout.layout != torch.strided:
        raise ValueError("a chunk is no tensor")
    return layout


def _find_data(view: memoryview, *, nbytes: int) -> memoryview:
    """The bytes of the only storage in an archive.

    Raises:
        ValueError: it has another number of storages, or they are compressed or too short.
    """
    with zipfile.ZipFile(_ViewFile(view)) as archive:
        entries = [entry for entry in archive.infolist() if "/data/" in entry.filename]
    if len(entries) != 1 or entries[0].compress_type != zipfile.ZIP_STORED:
        raise ValueError("a chunk is not one plain tensor")
    start = entries[0].header_offset
    # a local header of ZIP ends with the lengths of the name and of extra fields, 2 bytes each
    header = bytes(view[start : start + LOCAL_HEADER_BYTES])
    name_bytes = int.from_bytes(header[26:28], "little")
    extra_bytes = int.from_bytes(header[28:30], "little")
    first = start + LOCAL_HEADER_BYTES + name_bytes + extra_bytes
    if entries[0].file_size < nbytes or first + nbytes > len(view):
        raise ValueError("a chunk is shorter than its tensor")
    return view[first : first + nbytes]


def _copy_box(data: memoryview, layout: Tensor, *, box: Box) -> Tensor:
    """A copy of one box of a tensor whose storage is `data`."""
    if not box.numel:
        return torch.empty(box.shape, dtype=layout.dtype)
    strides = layout.stride()
    first = layout.storage_offset()
    last = first
    for start, stop, stride in zip(box.start, box.stop, strides, strict=True):
        first += start * stride
        last += (stop - 1) * stride
    itemsize = layout.element_size()
    span = data[first * itemsize : (last + 1) * itemsize]
    values = torch.frombuffer(bytearray(span), dtype=layout.dtype)
    return values.as_strided(box.shape, strides)
