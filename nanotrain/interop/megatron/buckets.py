"""State of Megatron-LM's distributed optimizer in the buckets of the run that saved it.

    BucketState   where every parameter lies in the buckets (`dp_reshardable`), and boxes of them

A rank has one flat buffer per model chunk, and one for its experts. Its parameters lie there from
the last to the first, each at a multiple of 64 elements, in buckets that are tensors of the
checkpoint:

    optimizer.distributed.dp_group_idx_{model-parallel rank}.gbuf_idx_{chunk}.dtype_(...)
        .bucket_idx_0.exp_avg

The tensors of the model say how each weight is sharded over tensor parallelism, the arguments which
layers a stage has. That every parameter begins where a chunk of its bucket begins, and that the
parameters fill the buckets, is checked.

Source: Megatron-LM, `param_and_grad_buffer.py` and `distrib_optimizer.py`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanotrain.interop.dcp.tensors import TensorFolder
from nanotrain.interop.imported import StateError
from nanotrain.interop.megatron.names import (
    BUCKET_ORDERS,
    EXPERTS,
    MAMBA_CONVOLUTIONS,
    TABLES,
    Block,
    ModuleNames,
    blocks,
    leaves,
)
from nanotrain.interop.megatron.placement import Location, Placement, is_expert
from nanotrain.quantities import round_up
from nanotrain.spec.boxes import Box
from nanotrain.untrusted import whole_number

ALIGNMENT = 64  # elements; a parameter begins at a multiple
DENSE_CHAIN, EXPERT_CHAIN = 0, 1  # optimizers of a chain
LAST_OF_MTP = "final_layernorm."  # of the layers of multi-token prediction, behind their block
MAIN = "param"  # kind of the main parameters
MOMENT_KINDS = ("exp_avg", "exp_avg_sq")
BUCKET = re.compile(
    r"(?:chained_(?P<chain>\d{1,2})\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d{1,6})"
    r"\.gbuf_idx_(?P<buffer>\d{1,4})\.dtype_[^/]{1,80}\.bucket_idx_(?P<bucket>\d{1,6})\.param"
)
UNEVEN = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


class Weight(NamedTuple):
    """A weight of Megatron-LM: its key, and its indices in dims of layers and experts."""

    key: str
    lead: tuple[int, ...]


# the weights that a parameter of Megatron-LM joins, one after another: nearly always one
Parameter = tuple[Weight, ...]


class BufferId(NamedTuple):
    """A buffer: of which optimizer of a chain, model-parallel rank and model chunk."""

    chain: int
    group: int
    buffer: int


@dataclass(frozen=True)
class Segment:
    """The part of a weight that one model-parallel rank has, in a bucket."""

    bucket: str  # key of the bucket, without the kind of state
    start: int  # first element
    pieces: tuple[Box, ...]  # boxes of the weight in the bucket, one after another


@dataclass(frozen=True)
class Layout:
    """The layout of the run that saved the checkpoint."""

    tp: int
    pp: int
    ep: int
    etp: int
    num_chunks: int  # model chunks of a rank
    layers_per_chunk: int
    has_local_layers: bool  # parameters are in the order of the local modules
    has_grouped_experts: bool  # the experts of a rank are one module

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any], num_layers: int) -> "Layout":
        """The layout that the stored arguments describe.

        Raises:
            ValueError: an uneven one, no numbers, or transposed experts.
        """
        uneven = [name for name in UNEVEN if arguments.get(name)]
        if uneven:
            raise ValueError(f"{uneven[0]} is set, and stages of equal length are read")
        tp = size_of(arguments, "tensor_model_parallel_size")
        pp = size_of(arguments, "pipeline_model_parallel_size")
        num_chunks = size_of(arguments, "virtual_pipeline_model_parallel_size")
        if num_layers % (pp * num_chunks):
            raise ValueError(f"{num_layers} layers are not {pp} x {num_chunks} equal stages")
        ep = size_of(arguments, "expert_model_parallel_size")
        etp = arguments.get("expert_tensor_parallel_size") or tp
        has_local_layers = arguments.get("transformer_impl") == "local"
        has_grouped_experts = bool(arguments.get("moe_grouped_gemm"))
        is_legacy = bool(arguments.get("moe_use_legacy_grouped_gemm"))
        if has_grouped_experts and (has_local_layers or is_legacy):
            raise ValueError("the experts of GroupedMLP are transposed in them")
        return cls(
            tp=tp,
            pp=pp,
            ep=ep,
            etp=whole_number(etp, "expert_tensor_parallel_size", low=1),
            num_chunks=num_chunks,
            layers_per_chunk=num_layers // (pp * num_chunks),
            has_local_layers=has_local_layers,
            has_grouped_experts=has_grouped_experts,
        )

    def layers(self, stage: int, chunk: int) -> range:
        """The layers of a model chunk of a pipeline rank."""
        first = (chunk * self.pp + stage) * self.layers_per_chunk
        return range(first, first + self.layers_per_chunk)


def size_of(arguments: Mapping[str, Any], name: str) -> int:
    """The size of an axis; 1 where it is not set."""
    return whole_number(arguments.get(name) or 1, name, low=1, high=1 << 20)


def has_buckets(folder: TensorFolder) -> bool:
    """Whether a checkpoint has state in buckets."""
    return any(BUCKET.fullmatch(key) for key in folder.tensors)


class BucketState:
    """Where every weight lies in the buckets.

    Args:
        folder: the checkpoint.
        placement: the tensors of its model.
        arguments: its arguments.

    Raises:
        StateError: the parameters do not lie in the buckets as they would in this layout.
    """

    def __init__(
        self, folder: TensorFolder, placement: Placement, *, arguments: Mapping[str, Any]
    ) -> None:
        self.folder = folder
        self._placement = placement
        self._segments: dict[Weight, list[Segment]] = {}
        self._locations: dict[str, Location] = {}
        for locations in placement.locations.values():
            for location in locations:
                self._locations[location.key] = location
        experts = [loc for name, loc in placement.locations.items() if is_expert(name)]
        self._num_experts = max(map(len, experts), default=0)
        self._blocks = list(blocks(placement.shape))
        self._num_mtp_layers = placement.shape.num_mtp_layers
        try:
            self._buffers = find_buffers(folder)
            self._layout = Layout.from_arguments(arguments, placement.num_layers)
            self._fill_in_known_order()
        except ValueError as error:
            raise StateError(
                f"the buckets of the optimizer in {folder.folder} cannot be read",
                why=str(error),
                fix="save it with --dist-ckpt-optim-fully-reshardable",
            ) from None

    def read(self, key: str, box: Box, *, kind: str) -> Tensor:
        """One box of the state of a weight.

        Args:
            key: key of the weight.
            box: the box, within one layer and expert.
            kind: param, exp_avg or exp_avg_sq.
        """
        num_lead = len(self._locations[key].lead)
        lead = box.start[:num_lead]
        target = torch.empty(box.shape)
        for segment in self._segments[Weight(key, lead)]:
            start = segment.start
            for piece in segment.pieces:
                shared = piece.intersect(box)
                if shared is not None:
                    bucket = f"{segment.bucket}.{kind}"
                    values = self._read_piece(bucket, start, piece=piece, box=shared)
                    target[shared.within(box).slices()] = values
                start += piece.numel
        return target

    def _read_piece(self, key: str, start: int, *, piece: Box, box: Box) -> Tensor:
        """A box of a piece that begins at element `start` of a bucket; reads full rows of it."""
        dims = [dim for dim, size in enumerate(piece.shape) if size != 1]
        inner = box.within(piece)
        row_dim = dims[0] if dims else 0
        row_numel = piece.numel // piece.shape[row_dim]
        first = start + inner.start[row_dim] * row_numel
        last = start + inner.stop[row_dim] * row_numel
        flat = self.folder.read(key, Box((first,), (last,))).float()
        shape = list(piece.shape)
        shape[row_dim] = box.shape[row_dim]
        index = list(inner.slices())
        index[row_dim] = slice(None)
        return flat.view(shape)[tuple(index)]

    def _fill_in_known_order(self) -> None:
        """The segments of all buffers, in the order of modules of the version that saved them.

        Raises:
            ValueError: they lie in no known order.
        """
        has_mamba = "mamba2" in self._placement.shape.mixers
        reasons = []
        for order in module_orders(self._layout, has_mamba=has_mamba):
            self._order = order.modules
            self._segments = {}
            try:
                self._fill()
                self._check()
            except ValueError as error:
                reasons.append(f"{order.versions}: {error}" if order.versions else str(error))
            else:
                return
        raise ValueError("; ".join(reasons))

    def _fill(self) -> None:
        """The segments of all buffers."""
        layout = self._layout
        for stage in range(layout.pp):
            for chunk in range(layout.num_chunks):
                params = list(self._dense_params(stage, chunk))
                for rank in range(layout.tp):
                    buffer = BufferId(DENSE_CHAIN, stage * layout.tp + rank, chunk)
                    self._fill_buffer(buffer, params, rank=rank, size=layout.tp)
                if layout.ep > 1:
                    self._fill_experts(stage, chunk)

    def _fill_experts(self, stage: int, chunk: int) -> None:
        """The segments of the experts of a stage, which have buffers of their own."""
        layout = self._layout
        per_rank = self._num_experts // layout.ep
        for expert_rank in range(layout.ep):
            experts = range(expert_rank * per_rank, (expert_rank + 1) * per_rank)
            params: list[Parameter] = []
            for block in self._blocks_of(stage, chunk):
                params += self._expert_params(block, experts)
            for rank in range(layout.etp if params else 0):
                group = (stage * layout.ep + expert_rank) * layout.etp + rank
                buffer = BufferId(EXPERT_CHAIN, group, chunk)
                self._fill_buffer(buffer, params, rank=rank, size=layout.etp)

    def _fill_buffer(
        self, buffer: BufferId, params: Sequence[Parameter], *, rank: int, size: int
    ) -> None:
        """The segments of a buffer, whose parameters are in the order of the modules."""
        buckets = self._buffers.get(buffer, [])
        number = 0
        cursor = 0
        for param in reversed(params):
            pieces = {weight: self._pieces(weight, rank=rank, size=size) for weight in param}
            numel = sum(map(numel_of, pieces.values()))
            start = round_up(cursor, ALIGNMENT)
            if number < len(buckets) and start + numel > buckets[number].numel:
                number += 1
                start = 0
            first = param[0].key
            if number == len(buckets):
                raise ValueError(f"{first} lies behind the buckets of rank {buffer.group}")
            bucket = buckets[number]
            if start not in bucket.edges:
                raise ValueError(f"{first} does not begin at element {start} of {bucket.key}")
            cursor = start
            for weight, boxes in pieces.items():
                segment = Segment(bucket.key, cursor, tuple(boxes))
                self._segments.setdefault(weight, []).append(segment)
                cursor += numel_of(boxes)
            if cursor == bucket.numel:
                number += 1
                cursor = 0
        if number < len(buckets):
            raise ValueError(f"{buckets[number].key} has elements of no known parameter")

    def _pieces(self, weight: Weight, *, rank: int, size: int) -> list[Box]:
        """The boxes of a weight that one of `size` ranks has."""
        num_lead = len(weight.lead)
        boxes = []
        for box, _ in self.folder.tensors[weight.key].chunks:
            if box.start[:num_lead] == weight.lead:
                boxes.append(box)
        boxes.sort(key=lambda box: box.start)
        if len(boxes) == 1:  # replicated, or the only rank
            return boxes
        if len(boxes) % size or len(boxes) // size > 2:
            raise ValueError(f"{weight.key} has {len(boxes)} chunks for {size} ranks")
        return boxes[rank::size]  # gate and up have chunks of their own

    def _dense_params(self, stage: int, chunk: int) -> Iterator[Parameter]:
        """The parameters of a stage that are not experts, in the order of its modules."""
        layout = self._layout
        is_first = stage == 0 and chunk == 0
        is_last = self._is_last(stage, chunk)
        has_mtp = is_last and self._num_mtp_layers > 0
        if is_first or has_mtp:
            yield from self._params("embedding.word_embeddings.")
            yield from self._params("embedding.position_embeddings.")
        for block in self._blocks_of(stage, chunk):
            if block.layer < self._placement.num_layers:
                yield from self._params_of(block)
        if not is_last:
            return
        yield from self._params("decoder.final_layernorm.")
        yield from self._params("decoder.final_norm.")  # of layers by the letters of a pattern
        yield from self._mtp_params()
        yield from self._params("output_layer.")
        is_tied = not list(self._params("output_layer."))
        if is_tied and layout.pp > 1 and not has_mtp:
            yield from self._params("embedding.word_embeddings.")  # its copy

    def _params_of(self, block: Block) -> Iterator[Parameter]:
        """The parameters of a layer in a buffer; with expert parallelism experts have their own."""
        layout = self._layout
        if self._num_experts and layout.ep == 1 and layout.etp != layout.tp:
            raise ValueError(
                f"experts on {layout.etp} tensor-parallel ranks lie among weights on {layout.tp}"
            )
        for names in self._order:
            if names == (EXPERTS,):
                if layout.ep == 1:
                    yield from self._expert_params(block, range(self._num_experts))
                continue
            weights: list[Weight] = []
            for name in names:
                weights += self._block_weights(name, block)
            if len(names) > 1 and weights:
                yield tuple(weights)
            elif len(names) == 1:
                yield from ((weight,) for weight in weights)

    def _mtp_params(self) -> Iterator[Parameter]:
        """The parameters of multi-token prediction that are not experts."""
        first = self._placement.num_layers
        for depth in range(self._num_mtp_layers):
            prefix = f"mtp.layers.{depth}."
            for module in TABLES["mtp"]:
                if module == LAST_OF_MTP:
                    yield from self._params_of(self._blocks[first + depth])
                yield from self._params(prefix + module)

    def _is_last(self, stage: int, chunk: int) -> bool:
        """Whether a model chunk is the last one of the model."""
        return stage == self._layout.pp - 1 and chunk == self._layout.num_chunks - 1

    def _blocks_of(self, stage: int, chunk: int) -> Sequence[Block]:
        """The layers of a model chunk, multi-token prediction included."""
        layers = self._layout.layers(stage, chunk)
        found = self._blocks[layers.start : layers.stop]
        if self._is_last(stage, chunk):
            found = [*found, *self._blocks[self._placement.num_layers :]]
        return found

    def _params(self, module: str) -> Iterator[Parameter]:
        """The parameters of a module outside of the layers."""
        for leaf in leaves(module):
            key = f"{self._placement.prefix}{module}{leaf}"
            if key in self._locations:
                yield (Weight(key, ()),)

    def _block_weights(self, module: str, block: Block) -> Iterator[Weight]:
        """The weights of a module of a layer."""
        prefix = self._placement.prefix
        for leaf in leaves(module):
            stacked = f"{prefix}{block.stacked}{module}{leaf}"
            own = f"{prefix}{block.theirs}{module}{leaf}"
            if stacked in self._locations:
                yield Weight(stacked, (block.layer,))
            elif own in self._locations:
                yield Weight(own, ())

    def _expert_params(self, block: Block, experts: range) -> Iterator[Parameter]:
        """The parameters of experts of a layer: one expert after another, or for grouped GEMM the
        first products of all, then the second ones.
        """
        products = [f"{EXPERTS}linear_fc1.", f"{EXPERTS}linear_fc2."]
        if self._layout.has_grouped_experts:
            order = [(product, expert) for product in products for expert in experts]
        else:
            order = [(product, expert) for expert in experts for product in products]
        for product, expert in order:
            for weight in self._block_weights(product, block):
                yield (Weight(weight.key, (*weight.lead, expert)),)

    def _check(self) -> None:
        """Check that every weight has a segment."""
        for name, locations in self._placement.locations.items():
            for location in locations:
                weight = Weight(location.key, location.lead)
                if weight not in self._segments and name.startswith("model/"):
                    raise ValueError(f"{location.key} is in no bucket")


class ModuleOrder(NamedTuple):
    """An order of the modules of a layer."""

    versions: str  # of Megatron-LM; empty if all have this one
    modules: list[ModuleNames]


def module_orders(layout: Layout, *, has_mamba: bool) -> list[ModuleOrder]:
    """The orders of the modules of a layout in versions of Megatron-LM, the earlier one first.

    Since core 0.19 the convolutions of Mamba-2 are parameters of its mixer, before the others.
    """
    name = "local" if layout.has_local_layers else "transformer_engine"
    modules = BUCKET_ORDERS[name]
    if not has_mamba:
        return [ModuleOrder("", modules)]
    others = [names for names in modules if names not in MAMBA_CONVOLUTIONS]
    return [
        ModuleOrder("before core 0.19", modules),
        ModuleOrder("since core 0.19", [*MAMBA_CONVOLUTIONS, *others]),
    ]


def numel_of(boxes: Sequence[Box]) -> int:
    """The elements of boxes."""
    return sum(box.numel for box in boxes)


@dataclass(frozen=True)
class Bucket:
    """A bucket of a buffer."""

    key: str  # without the kind of state
    numel: int
    edges: frozenset[int]  # first elements of its chunks


def find_buffers(folder: TensorFolder) -> dict[BufferId, list[Bucket]]:
    """The buckets of all buffers of a checkpoint, in order.

    Raises:
        ValueError: a bucket without moments.
    """
    found: dict[BufferId, dict[int, Bucket]] = {}
    for key, stored in folder.tensors.items():
        match = BUCKET.fullmatch(key)
        if match is None or len(stored.shape) != 1:
            continue
        beginning = key.removesuffix(MAIN)
        for kind in MOMENT_KINDS:
            moment = folder.tensors.get(f"{beginning}{kind}")
            if moment is None or moment.shape != stored.shape:
                raise ValueError(f"{beginning}{kind} is missing, or of another shape than {MAIN}")
        buffer = BufferId(int(match["chain"] or 0), int(match["group"]), int(match["buffer"]))
        edges = frozenset(box.start[0] for box, _ in stored.chunks)
        bucket = Bucket(key.removesuffix(f".{MAIN}"), stored.shape[0], edges)
        found.setdefault(buffer, {})[int(match["bucket"])] = bucket
    buffers = {}
    for buffer, buckets in found.items():
        buffers[buffer] = [bucket for _, bucket in sorted(buckets.items())]
    return buffers
