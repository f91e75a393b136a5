"""The difference of two checkpoints: values, settings and counters. The output of `nanotrain checkpoint diff`.

Values are compared chunk by chunk, so that a few chunks are in memory. Of the embedding and the head only the rows of
tokens are compared: the number of padding rows depends on the layout, and their values have no effect (padding.py).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from nanotrain.checkpoint.manifest import Manifest
from nanotrain.checkpoint.padding import vocabulary_rows
from nanotrain.checkpoint.plan import split_box
from nanotrain.checkpoint.progress import progress
from nanotrain.checkpoint.read import read_box
from nanotrain.checkpoint.store import find_checkpoint, require_complete
from nanotrain.config.schema import config_from_dict
from nanotrain.errors import ConfigError
from nanotrain.precision.dtypes import TORCH_DTYPES
from nanotrain.quantities import count_of
from nanotrain.spec.boxes import Box, TensorBox

MAX_LISTED = 20


@dataclass(frozen=True)
class TensorDifference:
    """The difference of one tensor."""

    name: str
    largest: float  # largest absolute difference of an element; NaN where one side has NaN
    relative: float  # 2-norm of the difference relative to that of the first


@dataclass(frozen=True)
class CheckpointDifference:
    """The difference of two checkpoints."""

    paths: tuple[Path, Path]
    num_equal: int  # tensors with equal bits
    tensors: tuple[TensorDifference, ...]  # those with other values, the largest relative difference first
    lines: tuple[str, ...]  # shapes, settings and counters
    padding: str = ""  # what was not compared; "" if all was

    @property
    def is_equal(self) -> bool:
        """Whether tensors, settings and counters are all equal."""
        return not self.tensors and not self.lines

    def text(self) -> str:
        """The report for a terminal."""
        head = [
            f"a: {self.paths[0]}",
            f"b: {self.paths[1]}",
            f"{count_of(self.num_equal, 'tensor', verb='is')} equal to the bit, {len(self.tensors)} have other values",
        ]
        rows = [
            f"  {one.name}: largest difference {one.largest:.3g}, relative {one.relative:.3g}"
            for one in self.tensors[:MAX_LISTED]
        ]
        more = len(self.tensors) - MAX_LISTED
        rows += [f"  and {more} more"] if more > 0 else []
        return "\n".join([*head, *rows, *([self.padding] if self.padding else []), *self.lines])


def diff(first: Path, second: Path) -> CheckpointDifference:
    """Compare two checkpoints: step folders, or run folders for their newest.

    Raises:
        CheckpointError: there is no complete checkpoint, or a chunk is damaged.
    """
    paths = find_checkpoint(Path(first)), find_checkpoint(Path(second))
    sides = tuple(_Side.read(path) for path in paths)
    if sides[0].tokens != sides[1].tokens:  # other vocabularies: no row of one is padding for the other
        sides = tuple(replace(side, tokens={}) for side in sides)
    a, b = (side.manifest for side in sides)
    lines = [*_shape_lines(sides), *_value_lines("config", a=a.config, b=b.config)]
    lines += _value_lines("step", a=a.step, b=b.step) + _value_lines("objects", a=a.objects, b=b.objects)
    shared = [name for name in a.tensors if name in b.tensors and sides[0].shape(name) == sides[1].shape(name)]
    found = [_compare(sides, name=name) for name in progress(shared, "comparing")]
    tensors = sorted((one for one in found if one is not None), key=lambda one: -one.relative)
    return CheckpointDifference(
        paths, len(shared) - len(tensors), tuple(tensors), tuple(lines), padding=_padding_line(sides, shared)
    )


@dataclass(frozen=True)
class _Side:
    """One of the two checkpoints."""

    path: Path
    manifest: Manifest
    tokens: Mapping[str, int]  # of the tables with padding, by the name of the parameter

    @classmethod
    def read(cls, path: Path) -> "_Side":
        manifest = require_complete(path)
        try:
            return cls(path, manifest, vocabulary_rows(config_from_dict(manifest.config).model))
        except ConfigError:  # of another version, or without a model: all rows are compared
            return cls(path, manifest, {})

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor without its padding."""
        shape, tokens = self.manifest.tensors[name].shape, self.tokens.get(name.rpartition("/")[2])
        return shape if tokens is None or not shape else (min(tokens, shape[0]), *shape[1:])

    def read_box(self, name: str, box: Box) -> torch.Tensor:
        """A box of a tensor, on the CPU."""
        return read_box(self.path, self.manifest, box=TensorBox(name, self.manifest.tensors[name].shape, box))


def _compare(sides: Sequence[_Side], *, name: str) -> TensorDifference | None:
    itemsize = TORCH_DTYPES[sides[0].manifest.tensors[name].dtype].itemsize
    largest, total, norm, is_equal = 0.0, 0.0, 0.0, True
    for box in split_box(Box.full(sides[0].shape(name)), itemsize):
        a, b = (side.read_box(name, box) for side in sides)
        if a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
            norm += float(a.double().square().sum())
            continue
        is_equal = False
        a, b = a.double(), b.double()
        change = (a - b).abs()
        worst = float(change.max())
        largest = worst if worst != worst or worst > largest else largest
        total, norm = total + float(change.square().sum()), norm + float(a.square().sum())
    return None if is_equal else TensorDifference(name, largest, (total / norm) ** 0.5 if norm else float("inf"))


def _padding_line(sides: Sequence[_Side], names: Sequence[str]) -> str:
    """Describe the rows that are not compared, of the first table with padding."""
    for name in names:
        shape, (a, b) = sides[0].shape(name), (side.manifest.tensors[name].shape for side in sides)
        if (shape, shape) != (a, b):
            return (
                f"of the vocabulary {shape[0]} tokens are compared, not their padding ({a[0]} rows in a, {b[0]} in b)"
            )
    return ""


def _shape_lines(sides: Sequence[_Side]) -> Iterator[str]:
    a, b = (side.manifest.tensors for side in sides)
    for name in sorted(a.keys() | b.keys()):
        if name in a and name in b and a[name].dtype == b[name].dtype and sides[0].shape(name) == sides[1].shape(name):
            continue
        forms = [f"{entry.dtype} {list(entry.shape)}" if (entry := side.get(name)) else "missing" for side in (a, b)]
        if forms[0] != forms[1]:
            yield f"{name}: {forms[0]} in a, {forms[1]} in b"


def _value_lines(name: str, *, a: Any, b: Any) -> list[str]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = sorted(a.keys() | b.keys())
        return [line for key in keys for line in _value_lines(f"{name}.{key}", a=a.get(key), b=b.get(key))]
    return [] if a == b else [f"{name}: {json.dumps(a)} in a, {json.dumps(b)} in b"]
