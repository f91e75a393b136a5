"""The output of `nanotrain checkpoint inspect`, `verify` and `diff`.

describe    model, counters, layout and sizes of a checkpoint, from its manifest alone
verify      every byte against its checksum
diff        values, settings and counters of two checkpoints

Values are compared chunk by chunk, so that a few chunks are in memory. Of the embedding and the
head only the rows of tokens are compared: the number of padding rows depends on the layout, and
their values have no effect.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
        """Whether the checkpoint has no fault."""
        return not self.faults

    def text(self) -> str:
        """The report for a terminal: one line, or one line per fault."""
        size = f"{self.num_chunks} chunks, {describe_bytes(self.nbytes)}"
        if self.is_sound:
            return f"{self.path}: sound ({size}, all checksums match, all values are finite)"
        num_faults = count_of(len(self.faults), "fault")
        summary = f"{self.path}: UNSOUND, {num_faults} in {size}"
        return "\n  ".join([summary, *self.faults])


def describe(path: Path, *, tensors: bool = False) -> str:
    """Model, counters, layout and sizes of a checkpoint on one screen; `tensors` adds a row per
    tensor.

    `path` is a step folder, or a run folder for its newest.

    Raises:
        CheckpointError: no complete checkpoint there.
    """
    folder, manifest = find_manifest(Path(path))
    lines = [str(folder)]
    for title, text in _summary(manifest):
        lines.append(f"{title:<11} {text}")
    kind_titles = ["kind", "tensors", "elements", "dtype", "size"]
    lines.append("")
    lines += table_lines([kind_titles, *_kind_rows(manifest)], right=(1, 2, 4))
    if tensors:
        tensor_titles = ["tensor", "shape", "dtype", "chunks", "size"]
        lines.append("")
        lines += table_lines([tensor_titles, *_tensor_rows(manifest)], right=(1, 3, 4))
    return "\n".join(lines)


def _summary(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Title and text of the lines above the tables; other programs' checkpoints may lack some."""
    nbytes = sum(manifest.files.values())
    numel = 0
    for name, entry in manifest.tensors.items():
        if kind_of(name) == "model":
            numel += math.prod(entry.shape)
    yield "model", _model_line(manifest)
    yield "parameters", f"{numel:,} elements of the model, padding included"
    yield "trained", ", ".join(_progress_texts(manifest))
    if has_weights_alone(manifest):
        yield (
            "optimizer",
            "no state: of --no-save-optim, an average, an import, or a rule that has none",
        )
    yield "written by", _layout(manifest.topology)
    yield "files", f"{count_of(len(manifest.files), 'shard')}, {describe_bytes(nbytes)}"
    if manifest.not_finite:
        yield "values", describe_not_finite(manifest.not_finite)
    elif manifest.not_finite is not None:
        yield "values", "all finite"


def _progress_texts(manifest: Manifest) -> list[str]:
    """Step, counters and last loss of the run, as far as the checkpoint has them."""
    texts = [f"step {manifest.step:,}"]
    counters = manifest.objects.get("train")
    if isinstance(counters, Mapping):
        for key, unit in COUNTERS.items():
            number = counters.get(key)
            if isinstance(number, int):
                texts.append(f"{number:,} {unit}")
    last_step = manifest.objects.get("last_step")
    if isinstance(last_step, Mapping):
        loss = last_step.get("loss")
        if isinstance(loss, float):
            texts.append(f"loss {loss:.4f}")
    return texts


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
    """Layers, hidden size, heads, vocabulary and experts, in one line."""
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
    """Read every chunk of a checkpoint, compare checksums and check that all values are finite.

    Args:
        path: step folder, complete or not, or run folder for its newest.

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
    faults = []
    nbytes = 0
    chunks_by_file: dict[str, list[tuple[ChunkEntry, str]]] = {}
    for name, entry in manifest.tensors.items():
        fault = coverage_fault(entry.shape, [chunk.box for chunk in entry.chunks])
        if fault:
            faults.append(f"tensor {name} is not covered exactly once: {fault}")
        nbytes += entry.nbytes
        for chunk in entry.chunks:
            chunks_by_file.setdefault(chunk.file, []).append((chunk, entry.dtype))
    num_chunks = 0
    with progress("verifying", total=len(chunks_by_file)) as advance:
        for file, chunks in sorted(chunks_by_file.items()):
            faults += _faults_of_file(folder / file, chunks, size=manifest.files[file])
            num_chunks += len(chunks)
            advance(1)
    return VerifyReport(folder, num_chunks, nbytes, tuple(faults))


def _faults_of_file(
    path: Path, chunks: Sequence[tuple[ChunkEntry, str]], *, size: int
) -> Iterator[str]:
    """Wrong size, damaged chunks and values that are not finite in one shard file."""

    def fault_of(chunk: ChunkEntry, dtype: str) -> str | None:
        """The fault of a chunk as text; None if it is sound."""
        data = memoryview(bytearray(chunk.nbytes))
        try:
            shard.read(chunk, shard.offset(chunk, dtype), into=data)
        except CheckpointError as error:
            return f"{error.what}: {error.why}"
        if is_finite(data, dtype):
            return None
        return f"chunk {chunk.key} in {path.name} has values that are not finite"

    if path.is_file():
        present = os.path.getsize(path)
        if present != size:
            yield f"{path.name} has {present} bytes, the manifest has {size}"
    try:
        with ShardFile(path) as shard, file_threads(len(chunks)) as start:
            yield from filter(None, start(fault_of, *zip(*chunks, strict=True)))
    except CheckpointError as error:
        yield f"{error.what} ({error.why}); {len(chunks)} chunks are lost"


def _kind_rows(manifest: Manifest) -> Iterator[list[str]]:
    """Rows of a table: tensors grouped by the part of their name before the last slash."""
    kinds: dict[str, list[TensorEntry]] = {}
    for name, entry in manifest.tensors.items():
        kind = name.rpartition("/")[0] or name
        kinds.setdefault(kind, []).append(entry)
    for kind, entries in kinds.items():
        elements = sum(math.prod(entry.shape) for entry in entries)
        present = {entry.dtype for entry in entries}
        dtypes = " ".join(dtype for dtype in TORCH_DTYPES if dtype in present)
        nbytes = sum(entry.nbytes for entry in entries)
        yield [kind, str(len(entries)), f"{elements:,}", dtypes, describe_bytes(nbytes)]


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
    relative: float  # 2-norm of the difference, relative to the first one's


@dataclass(frozen=True)
class CheckpointDifference:
    """The difference of two checkpoints."""

    paths: tuple[Path, Path]
    num_equal: int  # tensors with equal bits
    tensors: tuple[TensorDifference, ...]  # with other values, largest relative difference first
    lines: tuple[str, ...]  # shapes, settings and counters
    padding: str = ""  # rows that were not compared; "" if all were

    @property
    def is_equal(self) -> bool:
        """Whether tensors, settings and counters are all equal."""
        return not self.tensors and not self.lines

    def text(self) -> str:
        """The report for a terminal."""
        equal = count_of(self.num_equal, "tensor", verb="is")
        first, second = self.paths
        lines = [f"a: {first}", f"b: {second}"]
        lines.append(f"{equal} equal to the bit, {len(self.tensors)} have other values")
        for tensor in self.tensors[:MAX_LISTED]:
            values = f"largest difference {tensor.largest:.3g}, relative {tensor.relative:.3g}"
            lines.append(f"  {tensor.name}: {values}")
        num_more = len(self.tensors) - MAX_LISTED
        if num_more > 0:
            lines.append(f"  and {num_more} more")
        if self.padding:
            lines.append(self.padding)
        lines += self.lines
        return "\n".join(lines)


def diff(first: Path, second: Path) -> CheckpointDifference:
    """Compare two checkpoints: step folders, or run folders for their newest.

    Raises:
        CheckpointError: there is no complete checkpoint, or a chunk is damaged.
    """
    a = _Side.read(Path(first))
    b = _Side.read(Path(second))
    # other vocabularies: no row of one is padding for the other
    if a.tokens != b.tokens:
        a = replace(a, tokens={})
        b = replace(b, tokens={})
    shared = []
    for name in a.manifest.tensors:
        if name in b.manifest.tensors and a.shape(name) == b.shape(name):
            shared.append(name)
    differences = []
    with progress("comparing", total=len(shared)) as advance:
        for name in shared:
            differences.append(_compare(a, b, name=name))
            advance(1)
    tensors = sorted(filter(None, differences), key=lambda difference: -difference.relative)
    shape_lines = _shape_lines(a, b)
    value_lines = _value_lines(a.manifest, b.manifest)
    return CheckpointDifference(
        paths=(a.path, b.path),
        num_equal=len(shared) - len(tensors),
        tensors=tuple(tensors),
        lines=(*shape_lines, *value_lines),
        padding=_padding_line(a, b, names=shared),
    )


@dataclass(frozen=True)
class _Side:
    """One of the two checkpoints."""

    path: Path
    manifest: Manifest
    tokens: Mapping[str, int]  # numbers of tokens of the tables with padding, by parameter

    @classmethod
    def read(cls, path: Path) -> "_Side":
        """Open the checkpoint that a path names."""
        folder, manifest = find_manifest(path)
        try:
            model = config_from_dict(manifest.config).model
            return cls(folder, manifest, vocabulary_rows(ModelShape.of(model)))
        except ConfigError:  # of another version, or without a model: all rows are compared
            return cls(folder, manifest, {})

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor without its padding."""
        shape = self.manifest.tensors[name].shape
        tokens = self.tokens.get(name.rpartition("/")[2])
        if tokens is None or not shape:
            return shape
        rows = min(tokens, shape[0])
        return (rows, *shape[1:])

    def form(self, name: str) -> str:
        """Dtype and padded shape of a tensor as text."""
        entry = self.manifest.tensors.get(name)
        return f"{entry.dtype} {list(entry.shape)}" if entry else "missing"

    def read_box(self, name: str, box: Box) -> torch.Tensor:
        """A box of a tensor, on the CPU."""
        shape = self.manifest.tensors[name].shape
        return read_box(self.path, self.manifest, box=TensorBox(name, shape, box))


def _compare(a: _Side, b: _Side, *, name: str) -> TensorDifference | None:
    """The difference of a tensor; None if all bits are equal."""
    itemsize = TORCH_DTYPES[a.manifest.tensors[name].dtype].itemsize
    largest = 0.0
    change_squares = 0.0
    squares = 0.0
    is_equal = True
    for box in split_box(Box.full(a.shape(name)), itemsize):
        first = a.read_box(name, box)
        second = b.read_box(name, box)
        squares += float(first.double().square().sum())
        if first.dtype == second.dtype and torch.equal(_as_bytes(first), _as_bytes(second)):
            continue
        is_equal = False
        change = (first.double() - second.double()).abs()
        change_squares += float(change.square().sum())
        worst = float(change.max())
        if math.isnan(worst) or worst > largest:
            largest = worst
    if is_equal:
        return None
    relative = (change_squares / squares) ** 0.5 if squares else float("inf")
    return TensorDifference(name, largest, relative)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _padding_line(a: _Side, b: _Side, *, names: Sequence[str]) -> str:
    """Describe the rows that are not compared, of the first table with padding."""
    for name in names:
        shape = a.shape(name)
        padded_a = a.manifest.tensors[name].shape
        padded_b = b.manifest.tensors[name].shape
        if shape != padded_a or shape != padded_b:
            padding = f"not their padding ({padded_a[0]} rows in a, {padded_b[0]} in b)"
            return f"of the vocabulary {shape[0]} tokens are compared, {padding}"
    return ""


def _shape_lines(a: _Side, b: _Side) -> Iterator[str]:
    """One line per tensor that has another shape or dtype in b, or is in one only."""
    first = a.manifest.tensors
    second = b.manifest.tensors
    for name in sorted(first.keys() | second.keys()):
        if name in first and name in second:
            has_one_dtype = first[name].dtype == second[name].dtype
            if has_one_dtype and a.shape(name) == b.shape(name):
                continue
        if a.form(name) != b.form(name):
            yield f"{name}: {a.form(name)} in a, {b.form(name)} in b"


def _value_lines(a: Manifest, b: Manifest) -> Iterator[str]:
    """One line per setting, counter or object whose value differs."""
    first = unnest({"config": a.config, "step": a.step, "objects": a.objects})
    second = unnest({"config": b.config, "step": b.step, "objects": b.objects})
    for key in dict.fromkeys([*first, *second]):
        shown_a = json.dumps(first.get(key))
        shown_b = json.dumps(second.get(key))
        if shown_a != shown_b:
            yield f"{key}: {shown_a} in a, {shown_b} in b"
