"""The weights of a model in the tensors of Megatron-LM's `torch_dist` checkpoints.

    check_model    the error for a model that cannot be written
    plan_chunks    the chunks of all tensors (pure): our boxes in their boxes
    join_rows      the values of a chunk
    extra_states   the names of the empty states beside them

Megatron-LM stacks the layers of a model along a new first dim, and the experts of a layer along a
second one; where only some layers have experts, every layer has tensors of its own name. The rows
of `linear_qkv` are grouped by query group (its query heads, its key head, its value head);
`linear_fc1` has the rows of the gate, then the others. The norms before attention and MLP have the
names of transformer-engine's fused layers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from nanotrain.config.model import ModelConfig
from nanotrain.errors import CheckpointError
from nanotrain.interop.hf.names import checkpoint_shapes
from nanotrain.interop.megatron.limits import unsupported_settings
from nanotrain.interop.megatron.names import (
    EXPERT_BIAS,
    EXPERTS,
    TABLES,
    Block,
    block_modules,
    blocks,
    end_modules,
    leaves,
    middle_dims,
    num_row_groups,
    rotary_pairs,
)
from nanotrain.interop.megatron.rows import RotaryPairs
from nanotrain.spec.boxes import Box, TensorBox
from nanotrain.spec.shape import ModelShape

Shape = tuple[int, ...]


@dataclass(frozen=True)
class MegatronChunk:
    """One chunk of a tensor of Megatron-LM."""

    key: str  # name of the tensor
    shape: Shape  # shape of the whole tensor
    box: Box  # the chunk in it
    sources: tuple[TensorBox, ...]  # boxes of our tensors
    num_groups: int = 1  # number of row groups of a source; the groups of the sources alternate
    pairs: RotaryPairs | None = None  # the order of rotary channels in Megatron-LM


class StackIndex(NamedTuple):
    """Index of a layer or expert that a tensor stacks along a dim."""

    number: int  # which of them
    size: int  # how many there are


def check_model(model_config: ModelConfig) -> None:
    """Check that Megatron-LM has every weight and every computation of the model.

    Raises:
        CheckpointError: everything that it cannot represent, in one message.
    """
    unsupported = unsupported_settings(model_config)
    if unsupported:
        raise CheckpointError(
            f"this model cannot be written for Megatron-LM: {', '.join(unsupported)}",
            why="its checkpoints have no place, or no known one, for these weights or settings",
            fix="use `export-hf` or `export-dcp`",
        )


def is_uniform(shape: ModelShape) -> bool:
    """Whether all layers have the same tensors, so that Megatron-LM stacks them."""
    if shape.has_half_layers:
        return False
    return len({shape.has_experts(layer) for layer in range(shape.num_layers)}) == 1


def plan_chunks(model_config: ModelConfig) -> Iterator[MegatronChunk]:
    """The chunks of all tensors: one per layer, and one per expert of a layer.

    Args:
        model_config: a model that `check_model` accepts.
    """
    shape = ModelShape.of(model_config)
    sizes = checkpoint_shapes(model_config)
    for key, module in end_modules(shape).items():
        yield from _plan_module(key, module, sizes=sizes)
    for block in blocks(shape):
        yield from _plan_block(block, sizes, shape=shape)
    for depth in range(shape.num_mtp_layers):
        for key, (module,) in TABLES["mtp"].items():
            ours = f"mtp.{depth}.{module}"
            yield from _plan_module(f"mtp.layers.{depth}.{key}", ours, sizes=sizes)


def _plan_module(key: str, module: str, *, sizes: Mapping[str, Shape]) -> Iterator[MegatronChunk]:
    """The chunks of a module outside of the layers."""
    for leaf in leaves(key):
        sources = _find_sources([f"model/{module}{leaf}"], sizes)
        if sources:
            yield _join_chunk(key + leaf, sources)


def _find_sources(names: Sequence[str], sizes: Mapping[str, Shape]) -> list[TensorBox]:
    """The tensors that the model has."""
    return [TensorBox.full(name, sizes[name]) for name in names if name in sizes]


def _plan_block(
    block: Block, sizes: Mapping[str, Shape], *, shape: ModelShape
) -> Iterator[MegatronChunk]:
    """The chunks of a layer: in the tensors of all layers, or in its own where layers differ."""
    prefix = block.theirs
    stack: list[StackIndex] = []
    if block.stacked is not None and is_uniform(shape):
        prefix = block.stacked
        stack = [StackIndex(block.layer, shape.num_layers)]
    for key, parts in block_modules(shape, block.layer).items():
        # query, gate, key and value alternate by query group
        num_groups = num_row_groups(shape, key)
        pairs = rotary_pairs(shape, parts[0], layer=block.layer)
        for leaf in leaves(key):
            names = [f"model/{block.ours}{part}{leaf}" for part in parts]
            sources = _find_sources(names, sizes)
            if not sources:
                continue
            if key.startswith(EXPERTS):
                yield from _plan_experts(prefix + key + leaf, sources, stack=stack)
                continue
            chunk = _join_chunk(prefix + key + leaf, sources, stack=stack, middle=middle_dims(key))
            yield replace(chunk, num_groups=num_groups, pairs=pairs)
    sources = _find_sources([f"router/{block.ours}{EXPERT_BIAS}"], sizes)
    if sources:
        yield _join_chunk(prefix + EXPERT_BIAS, sources, stack=stack)


def _plan_experts(
    key: str, sources: Sequence[TensorBox], *, stack: Sequence[StackIndex]
) -> Iterator[MegatronChunk]:
    """One chunk per expert, the first dim of the sources."""
    num_experts = sources[0].shape[0]
    for expert in range(num_experts):
        boxes = []
        for full in sources:
            box = Box((expert, *full.box.start[1:]), (expert + 1, *full.box.stop[1:]))
            boxes.append(replace(full, box=box))
        yield _join_chunk(key, boxes, stack=[*stack, StackIndex(expert, num_experts)])


def _join_chunk(
    key: str,
    sources: Sequence[TensorBox],
    *,
    stack: Sequence[StackIndex] = (),
    middle: Shape = (),
) -> MegatronChunk:
    """The rows of all sources, in a tensor with a first dim for every index of `stack`.

    Args:
        key: name of the tensor.
        sources: boxes of our tensors.
        stack: the indices in front.
        middle: dims between rows and columns.
    """
    shapes = [source.box.shape[-2:] for source in sources]
    num_rows = sum(shape[0] for shape in shapes)
    size = (num_rows, *middle, *shapes[0][1:])
    numbers = [level.number for level in stack]
    start = (*numbers, *[0] * len(size))
    stop = (*(number + 1 for number in numbers), *size)
    shape = (*(level.size for level in stack), *size)
    return MegatronChunk(key, shape, Box(start, stop), tuple(sources))


def join_rows(sources: Sequence[torch.Tensor], chunk: MegatronChunk) -> torch.Tensor:
    """The values of a chunk from its sources, [..., rows] or [..., rows, columns].

    With several groups the rows alternate: group 0 of every source, group 1 of every source, and so
    on.
    """
    first = sources[0]
    if chunk.pairs is not None:
        return chunk.pairs.to_pairs(first).reshape(chunk.box.shape)
    if len(sources) == 1:
        return first.reshape(chunk.box.shape)
    columns = first.shape[1:] if first.dim() < 3 else first.shape[2:]
    groups = [source.reshape(chunk.num_groups, -1, *columns) for source in sources]
    return torch.cat(groups, dim=1).reshape(chunk.box.shape)


def extra_states(chunks: Iterable[MegatronChunk]) -> Iterator[str]:
    """Names of the empty states that Megatron-LM stores with its parallel linear layers."""
    for chunk in chunks:
        if chunk.key == "decoder.final_norm.weight":  # the head has one behind layers by letters
            yield "output_layer._extra_state/shard_0_1"
        if not chunk.key.endswith(tuple(TABLES["parallel_linear"])):
            continue
        num_stacked = len(chunk.shape) - 2
        offset = chunk.box.start[:num_stacked] or (0,)
        shape = chunk.shape[:num_stacked] or (1,)
        shard = f"shard_{_join_numbers(offset)}_{_join_numbers(shape)}"
        module, _, _ = chunk.key.rpartition("weight")
        yield f"{module}_extra_state/{shard}"


def _join_numbers(numbers: Shape) -> str:
    """Numbers with dots between them."""
    return ".".join(map(str, numbers))
