"""Write the weights of a checkpoint as a `torch_dist` checkpoint of Megatron-LM, one chunk in memory at a time.

    export_megatron   the folder
    check_model       the error for a model that cannot be written
    plan_chunks       the chunks of all tensors (pure): boxes of ours in boxes of theirs

FOLDER/latest_checkpointed_iteration.txt    the step, or "release" for step 0
FOLDER/iter_0000300/metadata.json           the names of the formats
FOLDER/iter_0000300/common.pt               step and version; only built-in types
FOLDER/iter_0000300/.metadata, *.distcp     the tensors, as torch.distributed.checkpoint writes them

Megatron-LM stacks the layers of a model along a new first dim, and the experts of a layer along a second one; where
only some layers have experts, every layer has tensors of its own name. The rows of `linear_qkv` are grouped by query
group (its query heads, its key head, its value head); those of `linear_fc1` are the gate's, then the others. The
norms before attention and MLP have the names of transformer-engine's fused layers.
"""

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from nanotrain.checkpoint.manifest import Manifest
from nanotrain.checkpoint.read import read_box
from nanotrain.checkpoint.store import find_manifest
from nanotrain.config.model import ModelConfig
from nanotrain.config.schema import config_from_dict
from nanotrain.errors import CheckpointError
from nanotrain.interop.dcp import torch_export
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


NAMES: dict[str, dict[str, list[str]]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def check_model(model_config: ModelConfig) -> None:
    """Check that Megatron-LM has a place for every weight and a setting for what the model computes.

    Raises:
        CheckpointError: all that it has not, in one message.
    """
    shape = ModelShape.of(model_config)
    reasons = {
        "multi_latent_attention": shape.mla is not None,
        "mtp_num_layers": shape.num_mtp_layers > 0,
        "norm_placement other than pre": shape.has_post_norm or not shape.has_pre_norm,
        "qk_layernorm_across_heads": shape.has_wide_qk_norm,
        "softmax_type learnable": shape.has_sink,
        "add_bias_linear with experts": shape.has_linear_bias and shape.moe is not None,
        "scale_embeddings": model_config.scale_embeddings,
        "attn_logit_softcapping": model_config.attn_logit_softcapping is not None,
        "final_logit_softcapping": model_config.final_logit_softcapping is not None,
        "rotary_base_local": model_config.rotary_base_local is not None,
    }
    if found := [name for name, is_set in reasons.items() if is_set]:
        raise CheckpointError(
            f"this model cannot be written for Megatron-LM: {', '.join(found)}",
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
    for key, (module,) in NAMES["ends"].items():
        for leaf in ("weight", "bias"):
            if (size := sizes.get(f"model/{module}{leaf}")) is not None:
                sources = (TensorBox.full(f"model/{module}{leaf}", size),)
                yield MegatronChunk(key + leaf, size, Box.full(size), sources)
    for layer in range(shape.num_layers):
        yield from _layer(layer, sizes, shape=shape)
        if (moe := model_config.moe) is not None and moe.router_enable_expert_bias and shape.has_experts(layer):
            name, size = f"layers.{layer}.mlp.router.expert_bias", (moe.num_experts,)
            source = (TensorBox.full(f"router/{name}", size),)
            yield _chunk("mlp.router.expert_bias", size, sources=source, layer=layer, shape=shape)


def _layer(layer: int, sizes: Mapping[str, Shape], *, shape: ModelShape) -> Iterator[MegatronChunk]:
    modules = NAMES["attention"] | NAMES["moe" if shape.has_experts(layer) else "mlp"]
    for key, parts in modules.items():
        for leaf in ("weight", "bias"):
            names = [name for part in parts if (name := f"model/layers.{layer}.{part}{leaf}") in sizes]
            if not names:
                continue
            if key.startswith("mlp.experts."):
                yield from _experts(key + leaf, {name: sizes[name] for name in names}, layer=layer, shape=shape)
                continue
            size = (sum(sizes[name][0] for name in names), *sizes[names[0]][1:])
            sources = tuple(TensorBox.full(name, sizes[name]) for name in names)
            num_groups = shape.query_groups if len(parts) == 3 else 1
            yield _chunk(key + leaf, size, sources=sources, layer=layer, shape=shape, num_groups=num_groups)


def _experts(key: str, sizes: Mapping[str, Shape], *, layer: int, shape: ModelShape) -> Iterator[MegatronChunk]:
    """One chunk per expert, [1, 1, rows, columns] of [layers, experts, rows, columns]."""
    (num_experts, _, columns), rows = next(iter(sizes.values())), sum(size[1] for size in sizes.values())
    for expert in range(num_experts):
        sources = tuple(
            TensorBox(name, size, Box((expert, 0, 0), (expert + 1, *size[1:]))) for name, size in sizes.items()
        )
        stacked = _chunk(key, (num_experts, rows, columns), sources=sources, layer=layer, shape=shape)
        start, stop = list(stacked.box.start), list(stacked.box.stop)
        start[-3], stop[-3] = expert, expert + 1
        yield MegatronChunk(stacked.key, stacked.shape, Box(tuple(start), tuple(stop)), sources)


def _chunk(
    key: str, size: Shape, *, sources: tuple[TensorBox, ...], layer: int, shape: ModelShape, num_groups: int = 1
) -> MegatronChunk:
    """The part of a layer in the tensor of all layers, or a tensor of its own where layers differ."""
    if not is_uniform(shape):
        return MegatronChunk(f"decoder.layers.{layer}.{key}", size, Box.full(size), sources, num_groups)
    box = Box((layer, *[0] * len(size)), (layer + 1, *size))
    return MegatronChunk(f"decoder.layers.{key}", (shape.num_layers, *size), box, sources, num_groups)


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
    found, manifest = find_manifest(Path(path))
    model_config = config_from_dict(manifest.config).model
    check_model(model_config)
    chunks = list(plan_chunks(model_config))
    name = f"iter_{manifest.step:07d}" if manifest.step else "release"
    planner = _ChunkPlanner(found, manifest, chunks=chunks, dtype=dtype)
    nbytes = sum(chunk.box.numel for chunk in chunks) * TORCH_DTYPES[dtype].itemsize
    with torch_export(output, nbytes=nbytes) as parent:
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


def _extra_states(chunks: Iterable[MegatronChunk]) -> Iterator[str]:
    """Names of the empty states that Megatron-LM stores beside each of its parallel linear layers."""
    for chunk in chunks:
        if chunk.key.endswith(PARALLEL_LINEAR):
            num_stacked = len(chunk.shape) - 2
            offset, shape = chunk.box.start[:num_stacked] or (0,), chunk.shape[:num_stacked] or (1,)
            place = f"shard_{'.'.join(map(str, offset))}_{'.'.join(map(str, shape))}"
            yield f"{chunk.key.removesuffix('weight')}_extra_state/{place}"
