"""Write the weights of a checkpoint as a `torch_dist` checkpoint of Megatron-LM, one chunk in
memory at a time.

    export_megatron   the folder
    check_model       the error for a model that cannot be written
    plan_chunks       the chunks of all tensors (pure): boxes of ours in boxes of theirs

FOLDER/latest_checkpointed_iteration.txt    the step, or "release" for step 0
FOLDER/iter_0000300/metadata.json           the names of the formats
FOLDER/iter_0000300/common.pt               step and version; only built-in types
FOLDER/iter_0000300/.metadata, *.distcp     the tensors, as torch.distributed.checkpoint writes them

Megatron-LM stacks the layers of a model along a new first dim, and the experts of a layer along a
second one; where only some layers have experts, every layer has tensors of its own name. The rows
of `linear_qkv` are grouped by query group (its query heads, its key head, its value head); those of
`linear_fc1` are the gate's, then the others. The norms before attention and MLP have the names of
transformer-engine's fused layers.
"""

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from nanotrain.checkpoint.manifest import Manifest
from nanotrain.checkpoint.read import read_box
from nanotrain.checkpoint.store import find_manifest
from nanotrain.config.config import Config
from nanotrain.config.model import ModelConfig
from nanotrain.config.rules.rule import holds
from nanotrain.config.rules.sizes import Values
from nanotrain.config.schema import config_from_dict
from nanotrain.errors import CheckpointError
from nanotrain.interop.dcp import torch_export
from nanotrain.interop.hf.names import expert_bias_shapes
from nanotrain.log import progress
from nanotrain.precision.dtypes import TORCH_DTYPES
from nanotrain.spec.boxes import Box, TensorBox
from nanotrain.spec.parameters import declare_model
from nanotrain.spec.shape import ModelShape

Shape = tuple[int, ...]


@dataclass(frozen=True)
class MegatronChunk:
    """One chunk of a tensor of Megatron-LM."""

    key: str  # name of the tensor
    shape: Shape  # of the whole tensor
    box: Box  # the chunk
    sources: tuple[TensorBox, ...]  # boxes of our tensors
    num_groups: int = 1  # number of row groups of each source; the groups of the sources alternate


TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def check_model(model_config: ModelConfig) -> None:
    """Check that Megatron-LM has a place for every weight and a setting for what the model
    computes.

    Raises:
        CheckpointError: all that it has not, in one message.
    """
    values = Values(Config(model=model_config))
    if unsupported := [
        name for name, where in TABLES["unsupported"].items() if holds(values, where)
    ]:
        raise CheckpointError(
            f"this model cannot be written for Megatron-LM: {', '.join(unsupported)}",
            why="its checkpoints have no place, or no known one, for these weights or settings",
            fix="use `export-hf` or `export-dcp`",
        )


def is_uniform(shape: ModelShape) -> bool:
    """Whether all layers have the same tensors, so that Megatron-LM stacks them."""
    return len({shape.has_experts(layer) for layer in range(shape.num_layers)}) == 1


def plan_chunks(model_config: ModelConfig) -> Iterator[MegatronChunk]:
    """The chunks of all tensors: one per layer, and one per expert of a layer.

    Args:
        model_config: a model that `check_model` accepts.
    """
    shape = ModelShape.of(model_config)
    sizes = {f"model/{spec.name}": spec.shape for spec in declare_model(shape)}
    sizes |= {f"router/{name}": size for name, size in expert_bias_shapes(model_config).items()}
    for key, (module,) in TABLES["ends"].items():
        for leaf in ("weight", "bias"):
            if (size := sizes.get(f"model/{module}{leaf}")) is not None:
                yield _chunk(key + leaf, [TensorBox.full(f"model/{module}{leaf}", size)])
    for layer in range(shape.num_layers):
        yield from _layer(layer, sizes, shape=shape)


def _layer(layer: int, sizes: Mapping[str, Shape], *, shape: ModelShape) -> Iterator[MegatronChunk]:
    """The chunks of a layer, in the tensors of all layers, or in tensors of its own where layers
    differ.
    """
    prefix, stack = f"decoder.layers.{layer}.", []
    if is_uniform(shape):
        prefix, stack = "decoder.layers.", [(layer, shape.num_layers)]
    modules = TABLES["attention"] | TABLES["moe" if shape.has_experts(layer) else "mlp"]
    for key, parts in modules.items():
        for leaf in ("weight", "bias"):
            names = [
                name for part in parts if (name := f"model/layers.{layer}.{part}{leaf}") in sizes
            ]
            sources = [TensorBox.full(name, sizes[name]) for name in names]
            if sources and key.startswith("mlp.experts."):
                num_experts = sources[0].shape[0]
                for expert in range(num_experts):
                    boxes = [replace(full, box=_of_expert(full.box, expert)) for full in sources]
                    yield _chunk(prefix + key + leaf, boxes, stack=[*stack, (expert, num_experts)])
            elif sources:
                num_groups = shape.query_groups if len(parts) == 3 else 1
                yield _chunk(prefix + key + leaf, sources, stack=stack, num_groups=num_groups)
    bias = "mlp.router.expert_bias"
    if (size := sizes.get(f"router/layers.{layer}.{bias}")) is not None:
        yield _chunk(
            prefix + bias, [TensorBox.full(f"router/layers.{layer}.{bias}", size)], stack=stack
        )


def _of_expert(box: Box, expert: int) -> Box:
    return Box((expert, *box.start[1:]), (expert + 1, *box.stop[1:]))


def _chunk(
    key: str,
    sources: Sequence[TensorBox],
    *,
    stack: Sequence[tuple[int, int]] = (),
    num_groups: int = 1,
) -> MegatronChunk:
    """The rows of all sources, in a tensor with further first dims: (index, size) of each in
    `stack`.
    """
    shapes = [source.box.shape[-2:] for source in sources]
    size = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    start = (*(index for index, _ in stack), *[0] * len(size))
    stop = (*(index + 1 for index, _ in stack), *size)
    return MegatronChunk(
        key, (*(count for _, count in stack), *size), Box(start, stop), tuple(sources), num_groups
    )


class _ChunkPlanner(DefaultSavePlanner):
    """Plans the given chunks instead of a state dict, and reads a chunk when it is written."""

    def __init__(
        self, path: Path, manifest: Manifest, *, chunks: Sequence[MegatronChunk], dtype: str
    ) -> None:
        super().__init__(flatten_state_dict=False)
        self.path, self.manifest, self.dtype = path, manifest, dtype
        self.chunks = {(chunk.key, chunk.box.start): chunk for chunk in chunks}

    def create_local_plan(self) -> SavePlan:
        """One item per chunk, and one per linear layer for its empty state."""
        items = [self._item(chunk) for chunk in self.chunks.values()]
        states = [
            WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
            for name in _extra_states(self.chunks.values())
        ]
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
        sources = [read_box(self.path, self.manifest, box=box) for box in chunk.sources]
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

    With several groups the rows alternate: group 0 of every source, group 1 of every source, and so
    on.
    """
    if len(sources) == 1:
        return sources[0].reshape(chunk.box.shape)
    columns = sources[0].shape[1:] if sources[0].dim() < 3 else sources[0].shape[2:]
    groups = [source.reshape(chunk.num_groups, -1, *columns) for source in sources]
    return torch.cat(groups, dim=1).reshape(chunk.box.shape)


@progress("exporting")
def export_megatron(path: Path, output: Path, *, dtype: str = "fp32") -> str:
    """Write the weights of a checkpoint for Megatron-LM; returns a summary line.

    Args:
        path: step folder, or run folder for its newest.
        output: the folder for --load of Megatron-LM; must not exist or be empty.
        dtype: dtype of the weights: fp32, bf16 or fp16; expert biases are fp32.

    Raises:
        CheckpointError: no complete checkpoint, a damaged chunk, a model that Megatron-LM has no
            names for, or `output` has files.
        EnvironmentFault: `output` cannot be written; nothing is left there.
    """
    source, manifest = find_manifest(Path(path))
    model_config = config_from_dict(manifest.config).model
    check_model(model_config)
    chunks = list(plan_chunks(model_config))
    name = f"iter_{manifest.step:07d}" if manifest.step else "release"
    planner = _ChunkPlanner(source, manifest, chunks=chunks, dtype=dtype)
    nbytes = sum(chunk.box.numel for chunk in chunks) * TORCH_DTYPES[dtype].itemsize
    with torch_export(output, nbytes=nbytes) as parent:
        folder = parent / name
        save(
            {},
            storage_writer=FileSystemWriter(folder, thread_count=1),
            planner=planner,
            no_dist=True,
        )
        content = {"singleton_local_shards": False}
        if not is_uniform(ModelShape.of(model_config)):
            content["non_homogeneous_layers"] = True
        # what Megatron-LM reads before the tensors; without `args`, it compares no settings
        common = {
            "iteration": manifest.step,
            "checkpoint_version": 3.0,
            "content_metadata": content,
        }
        torch.save(common, folder / "common.pt")
        (folder / "metadata.json").write_text(json.dumps(TABLES["metadata"]))
        tracker = str(manifest.step) if manifest.step else "release"
        (parent / "latest_checkpointed_iteration.txt").write_text(tracker)
    num_tensors = len({chunk.key for chunk in chunks})
    return f"{output / name}: {num_tensors} tensors of step {manifest.step}, {dtype}, from {source}"


def _extra_states(chunks: Iterable[MegatronChunk]) -> Iterator[str]:
    """Names of the empty states that Megatron-LM stores beside each of its parallel linear layers."""
    for chunk in chunks:
        if chunk.key.endswith(tuple(TABLES["parallel_linear"])):
            num_stacked = len(chunk.shape) - 2
            offset, shape = chunk.box.start[:num_stacked] or (0,), chunk.shape[:num_stacked] or (1,)
            place = f"shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, shape))}"
            yield f"{chunk.key.removesuffix('weight')}_extra_state/{place}"
