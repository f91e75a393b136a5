"""The difference of two checkpoints: values, settings and counters. The output of `nanotrain checkpoint diff`.

Values are compared chunk by chunk, so that a few chunks are in memory.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanotrain.checkpoint.manifest import Manifest
from nanotrain.checkpoint.plan import split_box
from nanotrain.checkpoint.progress import progress
from nanotrain.checkpoint.read import read_box
from nanotrain.checkpoint.store import find_checkpoint, require_complete
from nanotrain.precision.dtypes import TORCH_DTYPES
from nanotrain.topology.boxes import Box, TensorBox

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

    @property
    def is_equal(self) -> bool:
        """Whether tensors, settings and counters are all equal."""
        return not self.tensors and not self.lines

    def text(self) -> str:
        """The report for a terminal."""
        head = [
            f"a: {self.paths[0]}",
            f"b: {self.paths[1]}",
            f"{self.num_equal} tensors are equal to the bit, {len(self.tensors)} have other values",
        ]
        rows = [
            f"  {one.name}: largest difference {one.largest:.3g}, relative {one.relative:.3g}"
            for one in self.tensors[:MAX_LISTED]
        ]
        more = len(self.tensors) - MAX_LISTED
        return "\n".join([*head, *rows, *([f"  and {more} more"] if more > 0 else []), *self.lines])


def diff(first: Path, second: Path) -> CheckpointDifference:
    """Compare two checkpoints: step folders, or run folders for their newest.

    Raises:
        CheckpointError: there is no complete checkpoint, or a chunk is damaged.
    """
    paths = find_checkpoint(Path(first)), find_checkpoint(Path(second))
    a, b = (require_complete(path) for path in paths)
    lines = [*_shape_lines(a, b), *_value_lines("config", a=a.config, b=b.config)]
    lines += _value_lines("step", a=a.step, b=b.step) + _value_lines("objects", a=a.objects, b=b.objects)
    shared = [name for name in a.tensors if name in b.tensors and a.tensors[name].shape == b.tensors[name].shape]
    found = [_compare(paths, (a, b), name=name) for name in progress(shared, "comparing")]
    tensors = sorted((one for one in found if one is not None), key=lambda one: -one.relative)
    return CheckpointDifference(paths, len(shared) - len(tensors), tuple(tensors), tuple(lines))


def _compare(paths: tuple[Path, Path], manifests: tuple[Manifest, Manifest], *, name: str) -> TensorDifference | None:
    entry = manifests[0].tensors[name]
    largest, total, norm, is_equal = 0.0, 0.0, 0.0, True
    for box in split_box(Box.full(entry.shape), TORCH_DTYPES[entry.dtype].itemsize):
        target = TensorBox(name, entry.shape, box)
        a, b = (read_box(path, manifest, box=target) for path, manifest in zip(paths, manifests, strict=True))
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


def _shape_lines(a: Manifest, b: Manifest) -> Iterator[str]:
    for name in sorted(a.tensors.keys() | b.tensors.keys()):
        forms = [
            f"{entry.dtype} {list(entry.shape)}" if (entry := manifest.tensors.get(name)) else "missing"
            for manifest in (a, b)
        ]
        if forms[0] != forms[1]:
            yield f"{name}: {forms[0]} in a, {forms[1]} in b"


def _value_lines(name: str, *, a: Any, b: Any) -> list[str]:
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = sorted(a.keys() | b.keys())
        return [line for key in keys for line in _value_lines(f"{name}.{key}", a=a.get(key), b=b.get(key))]
    return [] if a == b else [f"{name}: {json.dumps(a)} in a, {json.dumps(b)} in b"]
