"""Write a checkpoint for Megatron-LM, with the state of the optimizer.

    export_megatron   the folder, and the lines that say what it has

One chunk is in memory at a time.

FOLDER/latest_checkpointed_iteration.txt    the step, or "release" for step 0
FOLDER/iter_0000300/metadata.json           the names of the formats
FOLDER/iter_0000300/common.pt               step and version; of a run also the groups of the
                                            optimizer, its schedules and arguments
FOLDER/iter_0000300/.metadata, *.distcp     the tensors, as torch.distributed.checkpoint writes them
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from nanotrain.checkpoint.manifest import Manifest
from nanotrain.checkpoint.read import read_box
from nanotrain.checkpoint.store import find_manifest
from nanotrain.config.config import Config
from nanotrain.config.schema import config_from_dict
from nanotrain.interop.dcp.export import torch_export
from nanotrain.interop.megatron.export import (
    MegatronChunk,
    check_model,
    extra_states,
    is_uniform,
    join_rows,
    plan_chunks,
)
from nanotrain.interop.megatron.export_state import (
    CONTENT,
    StateOptions,
    aliases,
    has_state,
    left_out,
    notes,
    plan_state,
    read_counters,
    require_state,
    run_state,
)
from nanotrain.interop.megatron.folder import TRACKER
from nanotrain.interop.megatron.names import TABLES
from nanotrain.log import progress
from nanotrain.precision.dtypes import TORCH_DTYPES
from nanotrain.quantities import count_of
from nanotrain.spec.shape import ModelShape

FP32 = torch.float32


@dataclass(frozen=True)
class MegatronExport:
    """The parts of a checkpoint of nanotrain that are written for Megatron-LM."""

    source: Path  # step folder
    manifest: Manifest
    config: Config
    dtype: str  # of the weights
    weights: Sequence[MegatronChunk]
    state: Sequence[MegatronChunk] = ()  # of the optimizer, in fp32
    # further keys of the values of a key
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=dict)  # entries of common.pt of a run

    @property
    def chunks(self) -> list[MegatronChunk]:
        """All chunks."""
        return [*self.weights, *self.state]

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        total = 0
        for chunk in self.chunks:
            total += chunk.box.numel * self.dtype_of(chunk).itemsize
        return total

    def dtype_of(self, chunk: MegatronChunk) -> torch.dtype:
        """The data type of a chunk."""
        if chunk.key.startswith("optimizer.") or chunk.key.endswith("expert_bias"):
            return FP32
        return TORCH_DTYPES[self.dtype]


class _ChunkPlanner(DefaultSavePlanner):
    """Plans chunks instead of a state dict, and reads a chunk when it is written."""

    def __init__(self, export: MegatronExport) -> None:
        super().__init__(flatten_state_dict=False)
        self.export = export
        self.chunks = {(chunk.key, chunk.box.start): chunk for chunk in export.chunks}

    def create_local_plan(self) -> SavePlan:
        """One item per chunk, and one per linear layer for its empty state."""
        items = [self._item(chunk) for chunk in self.chunks.values()]
        for name in extra_states(self.export.weights):
            items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The values of one item of the plan."""
        index = write_item.index
        if index.offset is None:
            empty = io.BytesIO()
            torch.save([None], empty)  # a list with one entry per rank that loads it
            return empty
        chunk = self.chunks[index.fqn, tuple(index.offset)]
        sources = []
        for box in chunk.sources:
            sources.append(read_box(self.export.source, self.export.manifest, box=box))
        return join_rows(sources, chunk).to(self.export.dtype_of(chunk))

    def _item(self, chunk: MegatronChunk) -> WriteItem:
        """The entry of a chunk in torch's plan of a save."""
        start = torch.Size(chunk.box.start)
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=start, sizes=torch.Size(chunk.box.shape)),
            properties=TensorProperties(dtype=self.export.dtype_of(chunk)),
            size=torch.Size(chunk.shape),
        )
        return WriteItem(MetadataIndex(chunk.key, start), WriteItemType.SHARD, tensor_data=data)


class _AliasWriter(FileSystemWriter):
    """Adds further keys to the index, whose entries name the bytes of another key."""

    def __init__(self, folder: Path, *, aliases: Mapping[str, Sequence[str]]) -> None:
        super().__init__(folder, thread_count=1)
        self._aliases = aliases

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index of the checkpoint, in which aliases name the same values."""
        entries = dict(metadata.state_dict_metadata)
        named = []
        for result in chain.from_iterable(results):
            for key in self._aliases.get(result.index.fqn, ()):
                entries[key] = entries[result.index.fqn]
                named.append(replace(result, index=replace(result.index, fqn=key)))
        super().finish(replace(metadata, state_dict_metadata=entries), [*results, named])


@progress("exporting")
def export_megatron(
    path: Path,
    output: Path,
    *,
    dtype: str = "fp32",
    optim: bool = True,
    options: StateOptions | None = None,
) -> str:
    """Write a checkpoint for Megatron-LM; returns lines on its content.

    Args:
        path: step folder, or run folder for its newest.
        output: the folder for --load of Megatron-LM; must not exist or be empty.
        dtype: dtype of the weights: fp32, bf16 or fp16; expert biases and the state of the
            optimizer are fp32.
        optim: whether the state of the optimizer and the counters of the run are written too.
        options: for which optimizer.

    Raises:
        CheckpointError: no complete checkpoint, a damaged chunk, a model that Megatron-LM has no
            names for, state of an optimizer that it cannot take, or `output` has files.
        EnvironmentFault: `output` cannot be written; nothing is left there.
    """
    export = plan_export(path, dtype=dtype, optim=optim, options=options or StateOptions())
    step = export.manifest.step
    name = f"iter_{step:07d}" if step else "release"
    lines = describe(export)
    with torch_export(output, nbytes=export.nbytes) as parent:
        folder = parent / name
        writer = _AliasWriter(folder, aliases=export.aliases)
        save({}, storage_writer=writer, planner=_ChunkPlanner(export), no_dist=True)
        torch.save(common_state(export), folder / "common.pt")
        (folder / "metadata.json").write_text(json.dumps(TABLES["metadata"]))
        (parent / TRACKER).write_text(str(step) if step else name)
    num_tensors = len({chunk.key for chunk in export.weights})
    what = f"{num_tensors} tensors of step {step}, {dtype}, from {export.source}"
    return "\n".join([f"{output / name}: {what}", *lines])


def plan_export(path: Path, *, dtype: str, optim: bool, options: StateOptions) -> MegatronExport:
    """The parts of a checkpoint to write; arguments and errors as of `export_megatron`.

    A checkpoint of step 0 or without state is written as weights alone.
    """
    source, manifest = find_manifest(Path(path))
    config = config_from_dict(manifest.config)
    check_model(config.model)
    weights = list(plan_chunks(config.model))
    export = MegatronExport(source, manifest, config, dtype, weights)
    if not optim or not manifest.step or not has_state(manifest):
        return export
    require_state(config, manifest)
    has_main = dtype != "fp32"
    return replace(
        export,
        state=list(plan_state(weights, has_main=has_main)),
        aliases=aliases(weights, has_main=has_main),
        common=run_state(config, manifest, options=options),
    )


def common_state(export: MegatronExport) -> dict[str, Any]:
    """State that Megatron-LM reads before the tensors; without `args` it compares no settings."""
    content: dict[str, Any] = {"singleton_local_shards": False}
    if not is_uniform(ModelShape.of(export.config.model)):
        content["non_homogeneous_layers"] = True
    if export.common:
        content |= CONTENT
    return {
        "iteration": export.manifest.step,
        "checkpoint_version": 3.0,
        "content_metadata": content,
        **export.common,
    }


def describe(export: MegatronExport) -> list[str]:
    """Lines on the exported optimizer, on changed settings and on parts that are left out."""
    lines = []
    if export.common:
        counters = read_counters(export.manifest)
        updates = count_of(counters.num_updates, "update")
        samples = count_of(counters.consumed_samples, "sample")
        lines.append(f"optimizer: main parameters and moments after {updates}, {samples} consumed")
        lines += notes(export.config, vars(export.common["args"]))
    return lines + left_out(export.manifest, has_state=bool(export.common))
