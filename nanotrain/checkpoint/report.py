"""The output of `nanotrain checkpoint inspect`, `verify` and `diff`.

describe    model, counters, layout and sizes of a checkpoint, from its manifest alone
verify      every byte against its checksum
diff        values, settings and counters of two checkpoints

Values are compared chunk by chunk, so that a few chunks are in memory. Of the embedding and the
head only the rows of tokens are compared: the number of padding rows depends on the layout, and
their values have no effect.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from nanotrain.checkpoint.compatibility import has_weights_alone, kind_of, vocabulary_rows
from nanotrain.checkpoint.manifest import ChunkEntry, DamagedCheckpoint, Manifest, TensorEntry
from nanotrain.checkpoint.plan import coverage_fault, split_box
from nanotrain.checkpoint.read import ShardFile, read_box
from nanotrain.checkpoint.store import (
    describe_not_finite,
    find_checkpoint,
    find_manifest,
    read_manifest,
)
from nanotrain.checkpoint.write import file_threads, is_finite
from nanotrain.config.schema import config_from_dict, unnest
from nanotrain.errors import CheckpointError, ConfigError
from nanotrain.log import progress
from nanotrain.precision.dtypes import TORCH_DTYPES
from nanotrain.quantities import count_of, describe_bytes, table_lines
from nanotrain.spec.boxes import Box, TensorBox
from nanotrain.spec.shape import ModelShape

COUNTERS = {"consumed_tokens": "tokens", "consumed_samples": "samples"}


@dataclass(frozen=True)
class VerifyReport:
    """The outcome of `verify`."""

    path: Path  # the step folder
    num_chunks: int  # chunks read
    nbytes: int  # their bytes
    # one line per chunk that is damaged or not finite, missing file, or tensor not covered exactly
    # once
    faults: tuple[str, ...]

    @property
    def is_sound(self) -> bool:
        """Whether there is no fault."""
        return not self.faults

    def text(self) -> str:
        """The report for a terminal: one line, or one line per fault."""
        size = f"{self.num_chunks} chunks, {describe_bytes(self.nbytes)}"
        if self.is_sound:
            return f"{self.path}: sound ({size}, all checksums match, all values are finite)"
        return "\n  ".join(
            [f"{self.path}: UNSOUND, {count_of(len(self.faults), 'fault')} in {size}", *self.faults]
        )


def describe(path: Path, *, tensors: bool = False) -> str:
    """Model, counters, layout and sizes of a checkpoint on one screen; `tensors` adds a row per
    tensor.

    `path` is a step folder, or a run folder for its newest.

    Raises:
        CheckpointError: no complete checkpoint there.
    """
    folder, manifest = find_manifest(Path(path))
    lines = [str(folder), *(f"{title:<11} {text}" for title, text in _summary(manifest)), ""]
    lines += table_lines(
        [["kind", "tensors", "elements", "dtype", "size"], *_kind_rows(manifest)], right=(1, 2, 4)
    )
    if tensors:
        lines += [
            "",
            *table_lines(
                [["tensor", "shape", "dtype", "chunks", "size"], *_tensor_rows(manifest)],
                right=(1, 3, 4),
            ),
        ]
    return "\n".join(lines)


def _summary(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Title and text of every line above the tables; a checkpoint of other programs may lack some."""
    nbytes = sum(manifest.files.values())
    numel = sum(
        prod(entry.shape) for name, entry in manifest.tensors.items() if kind_of(name) == "model"
    )
    yield "model", _model_line(manifest)
    yield "parameters", f"{numel:,} elements of the model, padding included"
    counters, last = manifest.objects.get("train"), manifest.objects.get("last_step")
    trained = [f"step {manifest.step:,}"]
    if isinstance(counters, Mapping):
        trained += [
            f"{counters[key]:,} {unit}"
            for key, unit in COUNTERS.items()
            if isinstance(counters.get(key), int)
        ]
    if isinstance(last, Mapping) and isinstance(last.get("loss"), float):
        trained.append(f"loss {last['loss']:.4f}")
    yield "trained", ", ".join(trained)
    if has_weights_alone(manifest):
        yield (
            "optimizer",
            "no state: of --no-save-optim, an average, an import, or a rule that has none",
        )
    yield "written by", _layout(manifest.topology)
    yield "files", f"{count_of(len(manifest.files), 'shard')}, {describe_bytes(nbytes)}"
    if manifest.not_finite is not None:
        yield (
            "values",
            describe_not_finite(manifest.not_finite) if manifest.not_finite else "all finite",
        )


def _layout(topology: Mapping[str, Any]) -> str:
    """The ranks that wrote the checkpoint and the axes with more than one, as in the header of a
    run.
    """
    match topology:
        case {"world_size": int(world_size), "axes": [*axes], "sizes": [*sizes]} if len(
            axes
        ) == len(sizes):
            shown = [f"{axis} {size}" for axis, size in zip(axes, sizes, strict=True) if size != 1]
            return ", ".join([count_of(world_size, "rank"), *shown])
    return ", ".join(f"{key} {value}" for key, value in topology.items()) or "unknown layout"


def _model_line(manifest: Manifest) -> str:
    try:
        model = config_from_dict({"model": manifest.config.get("model")}).model
        parts = [
            f"{count_of(model.num_layers, 'layer')}, hidden {model.hidden_size}",
            count_of(model.num_attention_heads, "head"),
            f"vocabulary {model.vocab_size:,}" if model.vocab_size else "vocabulary unknown",
        ]
        if model.moe is not None:
            parts.append(f"{model.moe.num_experts} experts, top {model.moe.router_topk}")
    except ConfigError as error:
        return f"unreadable configuration ({error.what})"
    return ", ".join(parts)


def verify(path: Path) -> VerifyReport:
    """Read every chunk of a checkpoint, compare its checksum with the manifest's and check that it
    is finite.

    `path` is a step folder, complete or not, or a run folder for its newest.

    Raises:
        CheckpointError: there is no checkpoint, or its manifest cannot be read.
    """
    path = Path(path)
    try:
        folder = path if path.name.startswith("step-") else find_checkpoint(path)
        manifest = read_manifest(folder)
    except DamagedCheckpoint as error:  # its cure is this command
        fix = error.fix.partition("; `nanotrain checkpoint verify")[0]
        raise DamagedCheckpoint(error.what, why=error.why, fix=fix) from None
    faults = [
        f"tensor {name} is not covered exactly once: {fault}"
        for name, entry in manifest.tensors.items()
        if (fault := coverage_fault(entry.shape, [chunk.box for chunk in entry.chunks]))
    ]
    chunks_of: dict[str, list[tuple[ChunkEntry, str]]] = {}
    for entry in manifest.tensors.values():
        for chunk in entry.chunks:
            chunks_of.setdefault(chunk.file, []).append((chunk, entry.dtype))
    with progress("verifying", total=len(chunks_of)) as advance:
        for file, chunks in sorted(chunks_of.items()):
            faults += _faults_of_file(folder / file, chunks, size=manifest.files[file])
            advance(1)
    num_chunks = sum(map(len, chunks_of.values()))
    return VerifyReport(
        folder, num_chunks, sum(entry.nbytes for entry in manifest.tensors.values()), tuple(faults)
    )


def _faults_of_file(
    path: Path, chunks: Sequence[tuple[ChunkEntry, str]], *, size: int
) -> Iterator[str]:
    def fault_of(chunk: ChunkEntry, dtype: str) -> str | None:
        data = memoryview(bytearray(chunk.nbytes))
        try:
            shard.read(chunk, shard.offset(chunk, dtype), into=data)
        except CheckpointError as error:
            return f"{error.what}: {error.why}"
        return (
            None
            if is_finite(data, dtype)
            else f"chunk {chunk.key} in {path.name} has values that are not finite"
        )

    if path.is_file() and (present := os.path.getsize(path)) != size:
        yield f"{path.name} has {present} bytes, the manifest has {size}"
    try:
        with ShardFile(path) as shard, file_threads() as start:
            yield from filter(None, start(fault_of, *zip(*chunks, strict=True)))
    except CheckpointError as error:
        yield f"{error.what} ({error.why}); {len(chunks)} chunks are lost"


def _kind_rows(manifest: Manifest) -> Iterator[list[str]]:
    kinds: dict[str, list[TensorEntry]] = {}
    for name, entry in manifest.tensors.items():
        kinds.setdefault(name.rpartition("/")[0] or name, []).append(entry)
    for kind, entries in kinds.items():
        elements = sum(prod(entry.shape) for entry in entries)
        dtypes = sorted({entry.dtype for entry in entries}, key=list(TORCH_DTYPES).index)
        nbytes = sum(entry.nbytes for entry in entries)
        yield [kind, str(len(entries)), f"{elements:,}", " ".join(dtypes), describe_bytes(nbytes)]


def _tensor_rows(manifest: Manifest) -> Iterator[list[str]]:
    for name, entry in manifest.tensors.items():
        shape = " x ".join(map(str, entry.shape)) or "scalar"
        yield [name, shape, entry.dtype, str(len(entry.chunks)), describe_bytes(entry.nbytes)]


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
    # those with other values, the largest relative difference first
    tensors: tuple[TensorDifference, ...]
    lines: tuple[str, ...]  # shapes, settings and counters
    padding: str = ""  # what was not compared; "" if all was

    @property
    def is_equal(self) -> bool:
        """Whether tensors, settings and counters are all equal."""
        return not self.tensors and not self.lines

    def text(self) -> str:
        """The report for a terminal."""
        equal = count_of(self.num_equal, "tensor", verb="is")
        lines = [f"{name}: {path}" for name, path in zip("ab", self.paths, strict=True)]
        lines.append(f"{equal} equal to the bit, {len(self.tensors)} have other values")
        for each in self.tensors[:MAX_LISTED]:
            lines.append(
                f"  {each.name}: largest difference {each.largest:.3g}, relative {each.relative:.3g}"
            )
        if len(self.tensors) > MAX_LISTED:
            lines.append(f"  and {len(self.tensors) - MAX_LISTED} more")
        return "\n".join(filter(None, [*lines, self.padding, *self.lines]))


def diff(first: Path, second: Path) -> CheckpointDifference:
    """Compare two checkpoints: step folders, or run folders for their newest.

    Raises:
        CheckpointError: there is no complete checkpoint, or a chunk is damaged.
    """
    sides = _Side.read(Path(first)), _Side.read(Path(second))
    # other vocabularies: no row of one is padding for the other
    if sides[0].tokens != sides[1].tokens:
        sides = replace(sides[0], tokens={}), replace(sides[1], tokens={})
    a, b = (side.manifest for side in sides)
    shared = [
        name
        for name in a.tensors
        if name in b.tensors and sides[0].shape(name) == sides[1].shape(name)
    ]
    differences = []
    with progress("comparing", total=len(shared)) as advance:
        for name in shared:
            differences.append(_compare(sides, name=name))
            advance(1)
    tensors = sorted(filter(None, differences), key=lambda difference: -difference.relative)
    return CheckpointDifference(
        paths=(sides[0].path, sides[1].path),
        num_equal=len(shared) - len(tensors),
        tensors=tuple(tensors),
        lines=(*_shape_lines(sides), *_value_lines(a, b)),
        padding=_padding_line(sides, shared),
    )


@dataclass(frozen=True)
class _Side:
    """One of the two checkpoints."""

    path: Path
    manifest: Manifest
    tokens: Mapping[str, int]  # of the tables with padding, by the name of the parameter

    @classmethod
    def read(cls, path: Path) -> "_Side":
        folder, manifest = find_manifest(path)
        try:
            return cls(
                folder,
                manifest,
                vocabulary_rows(ModelShape.of(config_from_dict(manifest.config).model)),
            )
        except ConfigError:  # of another version, or without a model: all rows are compared
            return cls(folder, manifest, {})

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor without its padding."""
        shape, tokens = self.manifest.tensors[name].shape, self.tokens.get(name.rpartition("/")[2])
        return shape if tokens is None or not shape else (min(tokens, shape[0]), *shape[1:])

    def read_box(self, name: str, box: Box) -> torch.Tensor:
        """A box of a tensor, on the CPU."""
        return read_box(
            self.path, self.manifest, box=TensorBox(name, self.manifest.tensors[name].shape, box)
        )


def _compare(sides: Sequence[_Side], *, name: str) -> TensorDifference | None:
    itemsize = TORCH_DTYPES[sides[0].manifest.tensors[name].dtype].itemsize
    largest, total, norm, is_equal = 0.0, 0.0, 0.0, True
    for box in split_box(Box.full(sides[0].shape(name)), itemsize):
        a, b = (side.read_box(name, box) for side in sides)
        if a.dtype == b.dtype and torch.equal(
            a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
        ):
            norm += float(a.double().square().sum())
            continue
        is_equal = False
        a, b = a.double(), b.double()
        change = (a - b).abs()
        worst = float(change.max())
        largest = worst if worst != worst or worst > largest else largest
        total, norm = total + float(change.square().sum()), norm + float(a.square().sum())
    return (
        None
        if is_equal
        else TensorDifference(name, largest, (total / norm) ** 0.5 if norm else float("inf"))
    )


def _padding_line(sides: Sequence[_Side], names: Sequence[str]) -> str:
    """Describe the rows that are not compared, of the first table with padding."""
    for name in names:
        shape, (a, b) = sides[0].shape(name), (side.manifest.tensors[name].shape for side in sides)
        if (shape, shape) != (a, b):
            padding = f"not their padding ({a[0]} rows in a, {b[0]} in b)"
            return f"of the vocabulary {shape[0]} tokens are compared, {padding}"
    return ""


def _shape_lines(sides: Sequence[_Side]) -> Iterator[str]:
    a, b = (side.manifest.tensors for side in sides)
    for name in sorted(a.keys() | b.keys()):
        if (
            name in a
            and name in b
            and a[name].dtype == b[name].dtype
            and sides[0].shape(name) == sides[1].shape(name)
        ):
            continue
        forms = [
            f"{entry.dtype} {list(entry.shape)}" if (entry := side.get(name)) else "missing"
            for side in (a, b)
        ]
        if forms[0] != forms[1]:
            yield f"{name}: {forms[0]} in a, {forms[1]} in b"


def _value_lines(a: Manifest, b: Manifest) -> Iterator[str]:
    values = [
        unnest({"config": side.config, "step": side.step, "objects": side.objects})
        for side in (a, b)
    ]
    for key in dict.fromkeys([*values[0], *values[1]]):
        shown = [json.dumps(side.get(key)) for side in values]
        if shown[0] != shown[1]:
            yield f"{key}: {shown[0]} in a, {shown[1]} in b"
