"""Write the weights of a checkpoint as a `torch_dist` checkpoint of Megatron-LM, one chunk in memory at a time.

FOLDER/latest_checkpointed_iteration.txt    the step, or "release" for step 0
FOLDER/iter_0000300/metadata.json           the names of the formats
FOLDER/iter_0000300/common.pt               step and version; only built-in types
FOLDER/iter_0000300/.metadata, *.distcp     the tensors, as torch.distributed.checkpoint writes them
"""

import io
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from nanotrain.checkpoint.manifest import Manifest
from nanotrain.checkpoint.read import read_box
from nanotrain.checkpoint.store import find_checkpoint, require_complete
from nanotrain.config.schema import config_from_dict
from nanotrain.interop.export_folder import export_folder
from nanotrain.interop.megatron_layout import MegatronChunk, check_model, is_uniform, plan_chunks
from nanotrain.precision.dtypes import TORCH_DTYPES
from nanotrain.spec.boxes import TensorBox
from nanotrain.spec.shape import ModelShape

PARALLEL_LINEAR = (".linear_qkv.weight", ".linear_proj.weight", ".linear_fc1.weight", ".linear_fc2.weight")
METADATA = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class _ChunkPlanner(DefaultSavePlanner):
    """Plans the given chunks instead of a state dict, and reads a chunk when it is written."""

    def __init__(self, path: Path, manifest: Manifest, *, chunks: Sequence[MegatronChunk], dtype: str) -> None:
        super().__init__(flatten_state_dict=False)
        self.path, self.manifest, self.dtype = path, manifest, dtype
        self.chunks = {(chunk.key, chunk.box.start): chunk for chunk in chunks}

    def create_local_plan(self) -> SavePlan:
        """One item per chunk, and one per linear layer for its empty state."""
        items = [self._item(chunk) for chunk in self.chunks.values()]
        states = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in _extra_states(self.chunks.values())]
        self.plan = SavePlan(items + states)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The values of one item of the plan."""
        index = write_item.index
        if index.offset is None:
            empty = io.BytesIO()
            torch.save([None], empty)  # a list with one entry per rank that loads it
            return empty
        chunk = self.chunks[index.fqn, tuple(index.offset)]
        sources = [read_box(self.path, self.manifest, box=box) for box in _stored(chunk)]
        return join_rows(sources, chunk).to(self._dtype(chunk))

    def _item(self, chunk: MegatronChunk) -> WriteItem:
        start = torch.Size(chunk.box.start)
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=start, sizes=torch.Size(chunk.box.shape)),
            properties=TensorProperties(dtype=self._dtype(chunk)),
            size=torch.Size(chunk.shape),
        )
        return WriteItem(MetadataIndex(chunk.key, start), WriteItemType.SHARD, tensor_data=data)

    def _dtype(self, chunk: MegatronChunk) -> torch.dtype:
        return torch.float32 if chunk.key.endswith("expert_bias") else TORCH_DTYPES[self.dtype]


def join_rows(sources: Sequence[torch.Tensor], chunk: MegatronChunk) -> torch.Tensor:
    """The values of a chunk from those of its sources, each [..., rows] or [..., rows, columns].

    With several groups the rows alternate: group 0 of every source, group 1 of every source, and so on.
    """
    if len(sources) == 1:
        return sources[0].reshape(chunk.box.shape)
    columns = sources[0].shape[1:] if sources[0].dim() < 3 else sources[0].shape[2:]
    groups = [source.reshape(chunk.num_groups, -1, *columns) for source in sources]
    return torch.cat(groups, dim=1).reshape(chunk.box.shape)


def export_megatron(path: Path, output: Path, *, dtype: str = "fp32") -> str:
    """Write the weights of a checkpoint for Megatron-LM; returns a summary line.

    Args:
        path: step folder, or run folder for its newest.
        output: the folder for --load of Megatron-LM; must not exist or be empty.
        dtype: dtype of the weights: fp32, bf16 or fp16; expert biases are fp32.

    Raises:
        CheckpointError: no complete checkpoint, a damaged chunk, a model that Megatron-LM has no names for, or `output`
            has files.
        EnvironmentFault: `output` cannot be written; nothing is left there.
    """
    found = find_checkpoint(Path(path))
    manifest = require_complete(found)
    model_config = config_from_dict(manifest.config).model
    check_model(model_config)
    chunks = list(plan_chunks(model_config))
    name = f"iter_{manifest.step:07d}" if manifest.step else "release"
    planner = _ChunkPlanner(found, manifest, chunks=chunks, dtype=dtype)
    nbytes = sum(chunk.box.numel for chunk in chunks) * TORCH_DTYPES[dtype].itemsize
    with export_folder(output, nbytes=nbytes) as parent, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there are no process groups, which no_dist asks for
        folder = parent / name
        save({}, storage_writer=FileSystemWriter(folder, thread_count=1), planner=planner, no_dist=True)
        is_stacked = is_uniform(ModelShape.of(model_config))
        torch.save(_common(manifest.step, is_stacked=is_stacked), folder / "common.pt")
        (folder / "metadata.json").write_text(json.dumps(METADATA))
        tracker = str(manifest.step) if manifest.step else "release"
        (parent / "latest_checkpointed_iteration.txt").write_text(tracker)
    num_tensors = len({chunk.key for chunk in chunks})
    return f"{output / name}: {num_tensors} tensors of step {manifest.step}, {dtype}, from {found}"


def _common(step: int, *, is_stacked: bool) -> dict[str, Any]:
    """What Megatron-LM reads before the tensors; without `args`, it compares no settings."""
    content: dict[str, Any] = {"singleton_local_shards": False}
    if not is_stacked:
        content["non_homogeneous_layers"] = True
    return {"iteration": step, "checkpoint_version": 3.0, "content_metadata": content}


def _stored(chunk: MegatronChunk) -> Iterator[TensorBox]:
    """The sources of a chunk by their names in the checkpoint."""
    for box in chunk.sources:
        yield box if box.name.startswith("router/") else replace(box, name=f"model/{box.name}")


def _extra_states(chunks: Iterable[MegatronChunk]) -> Iterator[str]:
    """Names of the empty states that Megatron-LM stores beside each of its parallel linear layers."""
    for chunk in chunks:
        if chunk.key.endswith(PARALLEL_LINEAR):
            num_stacked = len(chunk.shape) - 2
            offset, shape = chunk.box.start[:num_stacked] or (0,), chunk.shape[:num_stacked] or (1,)
            place = f"shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, shape))}"
            yield f"{chunk.key.removesuffix('weight')}_extra_state/{place}"
