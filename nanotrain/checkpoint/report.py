"""What `nanotrain checkpoint inspect` and `nanotrain checkpoint verify` say.

describe    step, sizes, kinds and tensors of a checkpoint, from its manifest alone
verify      every byte of it against its checksums
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import StringIO
from itertools import groupby
from math import prod
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from nanotrain.checkpoint.fits import kind_of
from nanotrain.checkpoint.manifest import ELEMENT_BYTES, Manifest, PieceEntry, TensorEntry
from nanotrain.checkpoint.plan import tiling_fault
from nanotrain.checkpoint.read import ShardFile
from nanotrain.checkpoint.store import find_checkpoint, read_manifest
from nanotrain.checkpoint.write import DTYPES, THREADS
from nanotrain.errors import CheckpointError

PLAIN_WIDTH = 120


@dataclass(frozen=True)
class VerifyReport:
    """The outcome of `verify`.

    Args:
        path: the step folder.
        num_pieces: pieces looked at.
        nbytes: their bytes.
        faults: one line for each damaged piece, missing file or badly tiled tensor; empty when all is well.
    """

    path: Path
    num_pieces: int
    nbytes: int
    faults: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        """Whether every byte is as it was written."""
        return not self.faults

    def text(self) -> str:
        """The report for a terminal: one line, or the list of what is damaged."""
        size = f"{self.num_pieces} pieces, {_size(self.nbytes)}"
        if self.is_sound:
            return f"{self.path}: sound ({size}, every checksum fits)"
        return "\n".join(
            [f"{self.path}: DAMAGED, {len(self.faults)} faults in {size}", *(f"  {line}" for line in self.faults)]
        )


def describe(path: Path) -> str:
    """Step, sizes, layout and every tensor of a checkpoint; a coloured table on a terminal, plain text otherwise.

    Args:
        path: a step folder, or a run folder for its newest.

    Raises:
        CheckpointError: no complete checkpoint there.
    """
    found = find_checkpoint(Path(path))
    manifest = read_manifest(found)
    on_terminal = sys.stdout.isatty()
    console = Console(
        file=StringIO(), force_terminal=on_terminal, width=None if on_terminal else PLAIN_WIDTH, highlight=False
    )
    nbytes = sum(manifest.files.values())
    console.print(f"{found}", soft_wrap=True, markup=False)
    console.print(f"step {manifest.step}, shards {len(manifest.files)}, {_size(nbytes)}")
    for title, values in (("written by", manifest.topology), ("objects", manifest.objects)):
        if values:
            console.print(f"{title}: " + ", ".join(f"{key}={value}" for key, value in values.items()), markup=False)
    console.print()
    console.print(_table("kind", ["tensors", "elements", "dtype", "size"], rows=_kind_rows(manifest)))
    console.print()
    console.print(_table("tensor", ["shape", "dtype", "pieces", "size"], rows=_tensor_rows(manifest)))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().rstrip()


def verify(path: Path) -> VerifyReport:
    """Read every piece of a checkpoint and compare its checksum with the manifest's.

    Args:
        path: a step folder, complete or not, or a run folder for its newest.

    Raises:
        CheckpointError: there is no checkpoint or its manifest cannot be read, so that nothing can be compared.
    """
    path = Path(path)
    found = path if path.name.startswith("step-") else find_checkpoint(path)
    manifest = read_manifest(found)
    faults = [
        f"tensor {name} is not tiled exactly once: {fault}"
        for name, entry in manifest.tensors.items()
        if (fault := tiling_fault(entry.shape, [piece.box for piece in entry.pieces]))
    ]
    places = [_Place(entry, piece) for entry in manifest.tensors.values() for piece in entry.pieces]
    by_file = sorted(places, key=lambda place: place.piece.file)
    for file, held in groupby(by_file, key=lambda place: place.piece.file):
        faults += _faults_of_file(found / file, tuple(held), size=manifest.files.get(file))
    return VerifyReport(found, len(places), sum(place.piece.nbytes for place in places), tuple(faults))


@dataclass(frozen=True)
class _Place:
    tensor: TensorEntry
    piece: PieceEntry


def _faults_of_file(path: Path, places: tuple[_Place, ...], *, size: int | None) -> Iterator[str]:
    if path.is_file() and (present := os.path.getsize(path)) != size:
        yield f"{path.name} has {present} bytes, the manifest says {size}"
    try:
        with ShardFile(path) as shard, ThreadPoolExecutor(THREADS) as pool:
            yield from filter(None, pool.map(lambda place: _fault_of_piece(shard, place), places))
    except CheckpointError as error:
        yield f"{error.what} ({error.why}); {len(places)} pieces are lost"


def _fault_of_piece(shard: ShardFile, place: _Place) -> str | None:
    try:
        into = torch.empty(place.piece.box.shape, dtype=DTYPES[place.tensor.dtype])
        shard.read(place.piece, place.tensor.dtype, into=into)
    except CheckpointError as error:
        return f"{error.what}: {error.why}"
    return None


def _kind_rows(manifest: Manifest) -> Iterator[list[str]]:
    kinds: dict[str, list[TensorEntry]] = {}
    for name, entry in manifest.tensors.items():
        kind = name.rsplit("/", 1)[0] if "/" in name else kind_of(name)
        kinds.setdefault(kind, []).append(entry)
    for kind, entries in kinds.items():
        elements = sum(prod(entry.shape) for entry in entries)
        dtypes = sorted({entry.dtype for entry in entries}, key=list(ELEMENT_BYTES).index)
        nbytes = sum(entry.nbytes for entry in entries)
        yield [kind, str(len(entries)), f"{elements:,}", " ".join(dtypes), _size(nbytes)]


def _tensor_rows(manifest: Manifest) -> Iterator[list[str]]:
    for name, entry in manifest.tensors.items():
        shape = " x ".join(map(str, entry.shape)) or "scalar"
        yield [name, shape, entry.dtype, str(len(entry.pieces)), _size(entry.nbytes)]


def _table(first: str, columns: Iterable[str], *, rows: Iterable[list[str]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="left" if column == "dtype" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _size(nbytes: int) -> str:
    """Bytes for people.

    >>> _size(3 * 2**20 // 2)
    '1.5 MiB'
    """
    units: Mapping[str, int] = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    unit = next((name for name, size in units.items() if nbytes >= size), None)
    return f"{nbytes / units[unit]:.1f} {unit}" if unit else f"{nbytes} bytes"
