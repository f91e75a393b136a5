"""Every weight is found in buckets that are laid out by hand, with padding that is no number."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nanotrain.errors import CheckpointError
from nanotrain.interop.dcp.tensors import Extent, StoredTensor
from nanotrain.interop.megatron import buckets
from nanotrain.interop.megatron.buckets import (
    BucketState,
    Layout,
    ModuleOrder,
    find_buffers,
    has_buckets,
    module_orders,
)
from nanotrain.interop.megatron.names import BUCKET_ORDERS
from nanotrain.interop.megatron.placement import Placement
from nanotrain.spec.boxes import Box
from tests.interop.megatron.models import LLAMA

TP = 2
ARGUMENTS = {"tensor_model_parallel_size": TP, "transformer_impl": "local"}
# rows of a shard, its columns, or all of it
SHARDS = {"linear_qkv.weight": 0, "linear_fc1.weight": 0, "embeddings.weight": 0}
SHARDS |= {"output_layer.weight": 0, "linear_proj.weight": 1, "linear_fc2.weight": 1}
SIZES = {
    "embedding.word_embeddings.weight": (40, 16),
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (2, 16),
    "decoder.layers.self_attention.linear_qkv.weight": (2, 32, 16),
    "decoder.layers.self_attention.q_layernorm.weight": (2, 4),
    "decoder.layers.self_attention.k_layernorm.weight": (2, 4),
    "decoder.layers.self_attention.linear_proj.weight": (2, 16, 16),
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": (2, 16),
    "decoder.layers.mlp.linear_fc1.weight": (2, 64, 16),
    "decoder.layers.mlp.linear_fc2.weight": (2, 16, 32),
    "decoder.final_layernorm.weight": (16,),
    "output_layer.weight": (40, 16),
}
# as the local modules are made
LAYER = [
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_proj.weight",
    "self_attention.linear_qkv.weight",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
]


class Folder:
    """A checkpoint in memory."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.folder = Path("iter_0000009")
        self.objects: dict[str, Extent] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self.values: dict[str, torch.Tensor] = {}
        for key, size in SIZES.items():
            self.add(key, torch.randn(size, generator=generator), self.model_chunks(key, size))

    def add(self, key: str, values: torch.Tensor, boxes: list[Box]) -> None:
        chunks = tuple((box, Extent("file", 0, 0)) for box in boxes)
        self.tensors[key] = StoredTensor(tuple(values.shape), values.dtype, chunks)
        self.values[key] = values

    def read(self, key: str, box: Box) -> torch.Tensor:
        return self.values[key][box.slices()].clone()

    def model_chunks(self, key: str, size: tuple[int, ...]) -> list[Box]:
        """The shards of a weight, one layer after another."""
        layers = [(layer,) for layer in range(2)] if "layers" in key else [()]
        boxes = []
        for layer in layers:
            own = size[len(layer) :]
            for start, stop in shards(key, own):
                begin = (*layer, *start)
                end = (*(index + 1 for index in layer), *stop)
                boxes.append(Box(begin, end))
        return boxes

    def add_buckets(self, kinds: list[str]) -> None:
        """The buffers of both ranks: the output layer in a bucket of its own."""
        for rank in range(TP):
            order = ["embedding.word_embeddings.weight"]
            for layer in range(2):
                order += [f"{layer}.{name}" for name in LAYER]
            order += ["decoder.final_layernorm.weight", "output_layer.weight"]
            backwards = order[::-1]
            for number, names in enumerate((backwards[:1], backwards[1:])):
                self.add_bucket(names, rank=rank, number=number, kinds=kinds)

    def add_bucket(self, names: list[str], *, rank: int, number: int, kinds: list[str]) -> None:
        flat: list[torch.Tensor] = []
        edges = [0]
        for name in names:
            size = sum(map(len, flat))
            flat.append(torch.full((-size % 64,), torch.nan))
            edges += [size, size + len(flat[-1])]
            flat.append(self.local(name, rank))
        values = torch.cat(flat)
        edges = sorted({*edges, len(values)})
        boxes = [Box((a,), (b,)) for a, b in zip(edges, edges[1:], strict=False)]
        prefix = f"optimizer.distributed.dp_group_idx_{rank}.gbuf_idx_0.dtype_(a, b)"
        for factor, kind in enumerate(kinds, start=1):
            self.add(f"{prefix}.bucket_idx_{number}.{kind}", values * factor, boxes)

    def local(self, name: str, rank: int) -> torch.Tensor:
        """The shard of a rank, flat."""
        key, values = name, self.values.get(name)
        if values is None:
            layer, _, leaf = name.partition(".")
            key = f"decoder.layers.{leaf}"
            values = self.values[key][int(layer)]
        boxes = shards(key, tuple(values.shape))
        own = boxes[rank::TP] if len(boxes) > 1 else boxes
        return torch.cat([values[Box(*box).slices()].flatten() for box in own])


def shards(key: str, size: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Starts and stops of the shards; of gate and up those of the gate first."""
    dim = next((dim for name, dim in SHARDS.items() if key.endswith(name)), None)
    if dim is None:
        return [((0,) * len(size), size)]
    count = 2 * TP if key.endswith("fc1.weight") else TP
    length = size[dim] // count
    boxes = []
    for number in range(count):
        start, stop = [0] * len(size), list(size)
        start[dim], stop[dim] = number * length, (number + 1) * length
        boxes.append((tuple(start), tuple(stop)))
    return boxes


@pytest.fixture
def folder() -> Any:
    folder = Folder()
    folder.add_buckets(["param", "exp_avg", "exp_avg_sq"])
    return folder


def test_every_box_of_every_weight(folder: Any) -> None:
    placement = Placement(LLAMA, folder)
    state = BucketState(folder, placement, arguments=ARGUMENTS)
    for name, size in placement.sizes.items():
        weight = placement.read(name, Box.full(size))
        for factor, kind in enumerate(("param", "exp_avg", "exp_avg_sq"), start=1):
            read = partial(state.read, kind=kind)
            assert torch.equal(placement.read(name, Box.full(size), read=read), weight * factor)
            start = tuple(length // 3 for length in size)
            box = Box(start, tuple(length - length // 4 for length in size))
            part = placement.read(name, box, read=read)
            assert torch.equal(part, weight[box.slices()] * factor), name


def test_buffers_are_found_by_their_names(folder: Any) -> None:
    assert has_buckets(folder) and not has_buckets(Folder())  # type: ignore[arg-type]
    buffers = find_buffers(folder)
    assert [tuple(buffer) for buffer in sorted(buffers)] == [(0, 0, 0), (0, 1, 0)]
    assert [bucket.numel for bucket in buffers[min(buffers)]][0] == 320


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"transformer_impl": "transformer_engine"}, "does not begin at element"),
        ({"tensor_model_parallel_size": 1}, "chunks for 1 ranks|does not begin"),
        ({"pipeline_model_parallel_size": 2}, "does not begin at element|behind the buckets"),
        ({"pipeline_model_parallel_size": 3}, "2 layers are not 3 x 1 equal stages"),
        ({"pipeline_model_parallel_layout": "Et|tL"}, "pipeline_model_parallel_layout is set"),
        ({"tensor_model_parallel_size": "2"}, "tensor_model_parallel_size is '2'"),
    ],
)
def test_another_layout_is_one_error(folder: Any, changes: dict[str, Any], why: str) -> None:
    placement = Placement(LLAMA, folder)
    with pytest.raises(CheckpointError, match=why):
        BucketState(folder, placement, arguments=ARGUMENTS | changes)


def test_layers_of_virtual_stages() -> None:
    arguments = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    layout = Layout.from_arguments(arguments, 8)
    stages = [layout.layers(stage, chunk) for stage in range(2) for chunk in range(2)]
    assert [list(layers) for layers in stages] == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_convolutions_of_mamba_are_before_the_others_since_0_19() -> None:
    layout = Layout.from_arguments(ARGUMENTS, num_layers=2)
    earlier, later = module_orders(layout, has_mamba=True)
    (only,) = module_orders(layout, has_mamba=False)
    assert only.modules == earlier.modules
    firsts = [names[0] for names in later.modules[:3]]
    assert firsts == ["mixer.conv1d.weight.x", "mixer.conv1d.bias.x", "mixer.dt_bias"]
    assert earlier.modules[0] == ("mixer.dt_bias",)
    assert sorted(later.modules) == sorted(earlier.modules)


def test_every_order_has_its_reason(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = BUCKET_ORDERS["local"]
    orders = [
        ModuleOrder("before core 0.19", modules[::-1]),
        ModuleOrder("since core 0.19", [("self_attention.",)]),
    ]
    monkeypatch.setattr(buckets, "module_orders", lambda *_, **__: orders)
    match = "before core 0.19: .* does not begin at .*; since core 0.19: .*"
    with pytest.raises(CheckpointError, match=match):
        BucketState(folder, Placement(LLAMA, folder), arguments=ARGUMENTS)
