"""Latent attention: what transformers' DeepSeek-V3 computes, and the same on any number of ranks."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3Config,
    DeepseekV3RotaryEmbedding,
)

from nanotrain.comm.collectives import all_reduce
from nanotrain.config.config import ModelConfig, Normalization
from nanotrain.config.load import load_config
from nanotrain.kernels.deferred_wgrad import WgradQueue, accumulate_wgrads
from nanotrain.model.attention import Context
from nanotrain.model.build import build_stage, collect_specs
from nanotrain.model.latent_attention import LatentAttention
from nanotrain.model.parallel import ModelParallel
from nanotrain.model.rope import RotaryTables
from nanotrain.parallel.cp.attention import build_core_attention
from nanotrain.parallel.cp.split import zigzag_chunks
from nanotrain.parallel.tp.tensor_parallel import TensorParallel
from nanotrain.topology.counts import num_parameters
from nanotrain.topology.params import LocalParam, ParamSpec, localize
from nanotrain.topology.shape import ModelShape
from nanotrain.topology.stages import split_layers
from tests.harness import run_ranks
from tests.model.building import LLAMA, give_storage

B, S, H, N = 2, 16, 32, 4

LATENT = replace(
    LLAMA,
    num_layers=1,
    num_query_groups=None,
    multi_latent_attention=True,
    mla=replace(LLAMA.mla, q_lora_rank=24, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6),
)
DIRECT = replace(LATENT, mla=replace(LATENT.mla, q_lora_rank=None))
SHAPES = {
    "latent": LATENT,
    "direct": DIRECT,
    "wide values": replace(LATENT, mla=replace(LATENT.mla, v_head_dim=14)),
    "biased norms": replace(LATENT, normalization=Normalization.LayerNorm),
}
THEIRS = {
    "query": "q_proj",
    "query_down": "q_a_proj",
    "query_latent_norm": "q_a_layernorm",
    "query_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_latent_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "output": "o_proj",
}


def draw(*shape: int, seed: int, std: float = 1.0) -> Tensor:
    return torch.empty(shape).normal_(0.0, std, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, expected: Tensor, *, what: str) -> None:
    assert found.shape == expected.shape, what
    difference, largest = (found - expected).abs().max().item(), expected.abs().max().item()
    assert difference <= 1e-5 * largest, f"{what}: differs by {difference:.1e} in numbers up to {largest:.1e}"


def layer_of(
    model: ModelConfig, parallel: ModelParallel, *, coords: dict[str, int], sizes: dict[str, int]
) -> tuple[LatentAttention, dict[str, LocalParam]]:
    """The attention of a model's layer with this rank's parts of random weights."""
    stage = build_stage(model, split_layers(1, 1)[0], dtype=torch.float32, parallel=parallel)
    prefix = "layers.0.attention."
    specs = [spec for spec in collect_specs(stage) if spec.name.startswith(prefix)]
    held = {spec.name.removeprefix(prefix): localize(spec, coords=coords, sizes=sizes) for spec in specs}
    attention = give_storage(stage).get_submodule("layers.0.attention")
    assert isinstance(attention, LatentAttention)
    for name, parameter in attention.named_parameters():
        parameter.data.copy_(whole_weight(name, held[name].spec)[held[name].box.slices()])
    return attention, held


def whole_weight(name: str, spec: ParamSpec) -> Tensor:
    return draw(*spec.shape, seed=sum(name.encode()), std=0.2) + ("norm" in name)


def whole_layer(model: ModelConfig) -> LatentAttention:
    return layer_of(model, ModelParallel.single_rank(), coords={"tp": 0}, sizes={"tp": 1})[0]


def apply(
    layer: LatentAttention, model: ModelConfig, hidden: Tensor, *, grad: Tensor, places: Tensor | None = None
) -> dict[str, Tensor]:
    """Output, and the gradients of input and parameters."""
    hidden = hidden.clone().requires_grad_()
    tokens = torch.empty(B, S if places is None else len(places))
    rotation = RotaryTables(model).at(S if places is None else places.expand(B, -1), like=hidden)
    mask = layer.core_attention.plan_mask(None, tokens=tokens)
    output = layer(hidden, Context(rotation=rotation, mask=mask))
    output.backward(grad)
    assert hidden.grad is not None
    found = {"output of the layer": output.detach(), "input": hidden.grad}
    return found | {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}


# --- transformers


def neighbours_apart(model: ModelConfig, name: str, weight: Tensor) -> Tensor:
    """From rows that pair neighbouring rotary channels to rows that pair i with i + R/2."""
    if name not in ("query", "query_up", "kv_down"):
        return weight
    rotary = model.mla.qk_pos_emb_head_dim
    order = torch.cat((torch.arange(0, rotary, 2), torch.arange(1, rotary, 2)))
    heads = weight.unflatten(0, (1 if name == "kv_down" else N, -1))
    plain, turned = heads[:, :-rotary], heads[:, -rotary:]
    return torch.cat((plain, turned[:, order]), dim=1).flatten(0, 1)


@pytest.mark.parametrize("pairs_neighbours", [False, True])
@pytest.mark.parametrize("model", [LATENT, DIRECT], ids=["latent", "direct"])
def test_it_is_the_attention_of_deepseek_v3(model: ModelConfig, pairs_neighbours: bool) -> None:
    # Given transformers' layer with random weights, and ours with the same ones in our order,
    config = DeepseekV3Config(
        hidden_size=H,
        num_attention_heads=N,
        num_key_value_heads=N,
        q_lora_rank=model.mla.q_lora_rank,
        kv_lora_rank=model.mla.kv_lora_rank,
        qk_nope_head_dim=model.mla.qk_head_dim,
        qk_rope_head_dim=model.mla.qk_pos_emb_head_dim,
        v_head_dim=model.mla.v_head_dim,
        rope_interleave=pairs_neighbours,
        attn_implementation="eager",
    )
    theirs, ours = DeepseekV3Attention(config, layer_idx=0), whole_layer(model)
    for name, parameter in ours.named_parameters():
        layer = name.removesuffix(".weight")
        source = theirs.get_submodule(THEIRS[layer]).weight
        source.data.copy_(draw(*source.shape, seed=sum(name.encode()), std=0.5) + ("norm" in name))
        parameter.data.copy_(neighbours_apart(model, layer, source.data) if pairs_neighbours else source.data)
    # when both attend causally,
    hidden, grad = draw(B, S, H, seed=1), draw(B, S, H, seed=2)
    found = apply(ours, model, hidden, grad=grad)
    asked = hidden.clone().requires_grad_()
    turns = DeepseekV3RotaryEmbedding(config)(hidden, torch.arange(S)[None])
    mask = torch.full((S, S), float("-inf")).triu(1)[None, None]
    output, _ = theirs(asked, position_embeddings=turns, attention_mask=mask)
    output.backward(grad)
    # then outputs and all gradients are equal.
    assert asked.grad is not None
    close(found["output of the layer"], output.detach(), what="output")
    close(found["input"], asked.grad, what="input")
    for name in (name for name in found if name.endswith("weight")):
        layer = name.removesuffix(".weight")
        expected = theirs.get_submodule(THEIRS[layer]).weight.grad
        assert isinstance(expected, Tensor)
        expected = neighbours_apart(model, layer, expected) if pairs_neighbours else expected
        close(found[name], expected, what=name)


# --- many ranks


def a_part_of_every_shape(ctx, sequence_parallel, comm_type):
    """This rank's part of output and gradients is that of the layer on one rank."""
    tp, cp = ctx.group("tp"), ctx.group("cp")
    tensor_parallel = TensorParallel(tp, sequence_parallel=sequence_parallel)
    parallel = replace(
        ModelParallel.single_rank(), tp=tensor_parallel, core_attention=build_core_attention(comm_type, cp)
    )
    hidden, grad = draw(B, S, H, seed=1), draw(B, S, H, seed=2)
    chunks, held_chunks = torch.arange(S).chunk(2 * cp.size), zigzag_chunks(cp.index, cp.size)
    places = torch.cat([chunks[held_chunks.first], chunks[held_chunks.second]])

    def own(whole: Tensor) -> Tensor:
        return tensor_parallel.local_slice(whole[:, places])

    for shape, model in SHAPES.items():
        whole = apply(whole_layer(model), model, hidden, grad=grad)
        layer, held = layer_of(model, parallel, coords=ctx.coords, sizes={"tp": tp.size})
        found = apply(layer, model, own(hidden), grad=own(grad), places=None if cp.size == 1 else places)
        for name in ("output of the layer", "input"):
            close(found.pop(name), own(whole.pop(name)), what=f"{shape}: {name}")
        assert found.keys() == whole.keys()
        for name, local in held.items():
            total = found[name].clone()
            for axis in ("cp", *local.spec.grad_sum_axes):
                all_reduce(total, ctx.group(axis))
            close(total, whole[name][local.box.slices()], what=f"{shape}: {name}")


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_hold_parts_of_one_layer(tp: int, sequence_parallel: bool) -> None:
    run_ranks(tp, a_part_of_every_shape, sequence_parallel, "p2p", tp=tp)


@pytest.mark.parametrize("comm_type", ["allgather", "p2p", "a2a"])
def test_every_core_attends_with_heads_that_are_wider_than_their_values(comm_type: str) -> None:
    run_ranks(4, a_part_of_every_shape, True, comm_type, tp=2, cp=2)


# --- one rank


@pytest.mark.parametrize("model", SHAPES.values(), ids=SHAPES)
def test_deferred_weight_gradients_are_the_same(model: ModelConfig) -> None:
    hidden, grad = draw(B, S, H, seed=1), draw(B, S, H, seed=2)
    expected = apply(whole_layer(model), model, hidden, grad=grad)
    queue = WgradQueue()
    parallel = replace(ModelParallel.single_rank(), tp=replace(TensorParallel.single_rank(), wgrad_queue=queue))
    layer, held = layer_of(model, parallel, coords={"tp": 0}, sizes={"tp": 1})
    with queue.defer():
        found = apply(layer, model, hidden, grad=grad)
    norms = {name for name in held if "norm" in name}
    assert found.keys() == {"output of the layer", "input"} | norms, "linear layers defer, norms do not"
    accumulate_wgrads(queue.take())
    found |= {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}
    assert found.keys() == {"output of the layer", "input", *held}
    for name, value in found.items():
        close(value, expected[name], what=name)


@pytest.mark.parametrize("model", SHAPES.values(), ids=SHAPES)
def test_two_tp_ranks_cut_the_heads_and_hold_the_latents_whole(model: ModelConfig) -> None:
    specs = collect_specs(build_stage(model, split_layers(1, 1)[0], dtype=torch.float32))
    cut = {spec.name.split(".")[-2] for spec in specs if ".attention." in spec.name and spec.shards}
    assert cut == {"query" if model.mla.q_lora_rank is None else "query_up", "kv_up", "output"}


def test_deepseek_v3_is_built_with_as_many_parameters_as_are_counted() -> None:
    model = load_config(["+config=deepseek_v3"]).model
    stage = build_stage(model, split_layers(model.num_layers, 1)[0], dtype=torch.bfloat16)
    # Its vocabulary needs no padding.
    assert sum(spec.numel for spec in collect_specs(stage)) == num_parameters(ModelShape.of(model)) == 671_026_404_352
