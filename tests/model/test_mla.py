"""Multi-head latent attention equals that of transformers' DeepSeek-V3, and itself on any number of
ranks.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3Config,
    DeepseekV3RotaryEmbedding,
)
from transformers.models.longcat_flash.configuration_longcat_flash import LongcatFlashConfig
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashMLA

from nanotrain.comm.collectives import all_reduce
from nanotrain.config.load import load_config
from nanotrain.config.model import MLAConfig, ModelConfig
from nanotrain.kernels.deferred_wgrad import WgradQueue, accumulate_wgrads
from nanotrain.model.context import AttentionInputs, LayerContext, ModelParallel
from nanotrain.model.mla import MultiLatentAttention
from nanotrain.model.parameters import Parameters
from nanotrain.model.rope import RotaryTables
from nanotrain.parallel.cp import build_core_attention
from nanotrain.parallel.cp.split import zigzag_chunks
from nanotrain.parallel.tp.layers import TensorParallel
from nanotrain.spec.counts import num_parameters
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.kinds.attention import mla
from nanotrain.spec.parameters import declare_model
from nanotrain.spec.params import LocalParam, ParamSpec, localize
from nanotrain.spec.shape import ModelShape
from tests.harness import run_ranks
from tests.model.building import LLAMA, build, random_batch, randomize

B, S, H, N = 2, 16, 32, 4

LATENT = replace(
    LLAMA,
    num_layers=1,
    num_query_groups=None,
    multi_latent_attention=True,
    mla=MLAConfig(
        q_lora_rank=24, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6
    ),
)
SCALED = replace(LATENT, mla=replace(LATENT.mla, scale_lora=True))
DIRECT = replace(LATENT, mla=replace(LATENT.mla, q_lora_rank=None))
SHAPES = {
    "latent": LATENT,
    "direct": DIRECT,
    "scaled": SCALED,
    "wide values": replace(LATENT, mla=replace(LATENT.mla, v_head_dim=14)),
    "biased norms": replace(LATENT, normalization="LayerNorm"),
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


def close(actual: Tensor, expected: Tensor, *, what: str) -> None:
    assert actual.shape == expected.shape, what
    difference, largest = (actual - expected).abs().max().item(), expected.abs().max().item()
    assert difference <= 1e-5 * largest, (
        f"{what}: differs by {difference:.1e} in numbers up to {largest:.1e}"
    )


def layer_of(
    model: ModelConfig, parallel: ModelParallel, *, coords: dict[str, int]
) -> tuple[MultiLatentAttention, dict[str, LocalParam]]:
    """The attention of a model with this rank's shards of random weights."""
    tp, sequence_parallel = parallel.tp.group.size, parallel.tp.sequence_parallel
    specs = mla(Declaration(ModelShape.of(model), "fp32", tp, sequence_parallel))
    local = {spec.name: localize(spec, coords=coords, sizes={"tp": tp}) for spec in specs}
    weights = {
        name: full_weight(param.spec)[param.box.slices()].clone() for name, param in local.items()
    }
    params = Parameters({name: nn.Parameter(weight) for name, weight in weights.items()})
    return MultiLatentAttention(model, params, parallel=parallel, layer=0), local


def full_weight(spec: ParamSpec) -> Tensor:
    return draw(*spec.shape, seed=sum(spec.name.encode()), std=0.2) + ("norm" in spec.name)


def full_layer(model: ModelConfig) -> MultiLatentAttention:
    return layer_of(model, ModelParallel.single_rank(), coords={"tp": 0})[0]


def apply(
    layer: MultiLatentAttention,
    model: ModelConfig,
    hidden: Tensor,
    *,
    grad: Tensor,
    positions: Tensor | None = None,
) -> dict[str, Tensor]:
    """Output, and the gradients of input and parameters."""
    hidden = hidden.clone().requires_grad_()
    tokens = torch.empty(B, S if positions is None else len(positions))
    rotary = RotaryTables(model).at(
        S if positions is None else positions.expand(B, -1), like=hidden
    )
    mask = layer.core_attention.plan_mask(None, tokens=tokens)
    output = layer(hidden, LayerContext(AttentionInputs(rotary, mask)))
    output.backward(grad)
    assert hidden.grad is not None
    actual = {"output of the layer": output.detach(), "input": hidden.grad}
    return actual | {
        name: parameter.grad
        for name, parameter in layer.named_parameters()
        if parameter.grad is not None
    }


def test_without_rotary_positions_all_tokens_are_at_position_0() -> None:
    layer, hidden = full_layer(LATENT), draw(B, S, H, seed=1)
    expected = apply(layer, LATENT, hidden, grad=hidden, positions=torch.zeros(S))[
        "output of the layer"
    ]
    mask = layer.core_attention.plan_mask(None, tokens=hidden[..., 0])
    close(layer(hidden, LayerContext(AttentionInputs(mask=mask))), expected, what="Kimi Linear")


# --- transformers


def neighbours_apart(model: ModelConfig, name: str, weight: Tensor) -> Tensor:
    """From rows that pair neighbouring rotary channels to rows that pair i with i + R/2."""
    if name not in ("query", "query_up", "kv_down"):
        return weight
    rotary = model.mla.qk_pos_emb_head_dim
    order = torch.cat((torch.arange(0, rotary, 2), torch.arange(1, rotary, 2)))
    heads = weight.unflatten(0, (1 if name == "kv_down" else N, -1))
    nope, rope = heads[:, :-rotary], heads[:, -rotary:]
    return torch.cat((nope, rope[:, order]), dim=1).flatten(0, 1)


@pytest.mark.parametrize("pairs_neighbours", [False, True])
@pytest.mark.parametrize("model", [LATENT, DIRECT, SCALED], ids=["latent", "direct", "longcat"])
def test_it_is_the_attention_of_deepseek_v3_and_longcat(
    model: ModelConfig, pairs_neighbours: bool
) -> None:
    # Given transformers' layer with random weights, and ours with the same ones in our order,
    is_scaled = model.mla.scale_lora
    pairs_neighbours |= is_scaled  # always in LongCat-Flash
    config = (LongcatFlashConfig if is_scaled else DeepseekV3Config)(
        hidden_size=H,
        num_attention_heads=N,
        num_key_value_heads=N,
        q_lora_rank=model.mla.q_lora_rank,
        kv_lora_rank=model.mla.kv_lora_rank,
        qk_nope_head_dim=model.mla.qk_head_dim,
        qk_rope_head_dim=model.mla.qk_pos_emb_head_dim,
        head_dim=model.mla.qk_pos_emb_head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": model.rotary_base},
        v_head_dim=model.mla.v_head_dim,
        rope_interleave=pairs_neighbours,
        attn_implementation="eager",
    )
    theirs = (LongcatFlashMLA if is_scaled else DeepseekV3Attention)(config, layer_idx=0)
    ours = full_layer(model)
    for name, parameter in ours.named_parameters():
        layer = name.removesuffix(".weight")
        source = theirs.get_submodule(THEIRS[layer]).weight
        source.data.copy_(draw(*source.shape, seed=sum(name.encode()), std=0.5) + ("norm" in name))
        parameter.data.copy_(
            neighbours_apart(model, layer, source.data) if pairs_neighbours else source.data
        )
    # when both attend causally,
    hidden, grad = draw(B, S, H, seed=1), draw(B, S, H, seed=2)
    actual = apply(ours, model, hidden, grad=grad)
    theirs_input = hidden.clone().requires_grad_()
    rotary = DeepseekV3RotaryEmbedding(config)(hidden, torch.arange(S)[None])
    mask = torch.full((S, S), float("-inf")).triu(1)[None, None]
    output, _ = theirs(theirs_input, position_embeddings=rotary, attention_mask=mask)
    output.backward(grad)
    # then outputs and all gradients are equal.
    assert theirs_input.grad is not None
    close(actual["output of the layer"], output.detach(), what="output")
    close(actual["input"], theirs_input.grad, what="input")
    for name in (name for name in actual if name.endswith("weight")):
        layer = name.removesuffix(".weight")
        expected = theirs.get_submodule(THEIRS[layer]).weight.grad
        assert isinstance(expected, Tensor)
        expected = neighbours_apart(model, layer, expected) if pairs_neighbours else expected
        close(actual[name], expected, what=name)


# --- many ranks


def every_shape_on_this_rank(ctx, sequence_parallel, comm_type):
    """This rank's shards of output and gradients equal those of the layer on one rank."""
    tp, cp = ctx.group("tp"), ctx.group("cp")
    tensor_parallel = TensorParallel(tp, sequence_parallel=sequence_parallel)
    parallel = replace(
        ModelParallel.single_rank(),
        tp=tensor_parallel,
        core_attention=build_core_attention(comm_type, cp),
    )
    hidden, grad = draw(B, S, H, seed=1), draw(B, S, H, seed=2)
    chunks = torch.arange(S).chunk(2 * cp.size)
    positions = torch.cat([chunks[chunk] for chunk in zigzag_chunks(cp.index, cp.size)])

    def local(full: Tensor) -> Tensor:
        return tensor_parallel.local_slice(full[:, positions])

    for shape, model in SHAPES.items():
        full = apply(full_layer(model), model, hidden, grad=grad)
        layer, params = layer_of(model, parallel, coords=ctx.coords)
        actual = apply(
            layer,
            model,
            local(hidden),
            grad=local(grad),
            positions=None if cp.size == 1 else positions,
        )
        for name in ("output of the layer", "input"):
            close(actual.pop(name), local(full.pop(name)), what=f"{shape}: {name}")
        assert actual.keys() == full.keys()
        for name, param in params.items():
            total = actual[name].clone()
            for axis in ("cp", *param.spec.grad_sum_axes):
                all_reduce(total, ctx.group(axis))
            close(total, full[name][param.box.slices()], what=f"{shape}: {name}")


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_shard_one_layer(tp: int, sequence_parallel: bool) -> None:
    run_ranks(tp, every_shape_on_this_rank, sequence_parallel, "p2p", tp=tp, shares=True)


@pytest.mark.parametrize("comm_type", ["allgather", "p2p", "a2a"])
def test_every_core_attends_with_heads_that_are_wider_than_their_values(comm_type: str) -> None:
    run_ranks(4, every_shape_on_this_rank, True, comm_type, tp=2, cp=2, shares=True)


# --- one rank


@pytest.mark.parametrize("model", SHAPES.values(), ids=SHAPES)
def test_weight_gradients_that_are_deferred_are_the_same(model: ModelConfig) -> None:
    hidden, grad = draw(B, S, H, seed=1), draw(B, S, H, seed=2)
    expected = apply(full_layer(model), model, hidden, grad=grad)
    queue = WgradQueue()
    parallel = replace(
        ModelParallel.single_rank(), tp=replace(TensorParallel.single_rank(), wgrad_queue=queue)
    )
    layer, params = layer_of(model, parallel, coords={"tp": 0})
    with queue.defer():
        actual = apply(layer, model, hidden, grad=grad)
    norms = {name for name in params if "norm" in name}
    assert actual.keys() == {"output of the layer", "input", *norms}, (
        "the linear layers have no weight gradient yet"
    )
    accumulate_wgrads(queue.take())
    actual |= {
        name: parameter.grad
        for name, parameter in layer.named_parameters()
        if parameter.grad is not None
    }
    assert actual.keys() == {"output of the layer", "input", *params}
    for name, value in actual.items():
        close(value, expected[name], what=name)


@pytest.mark.parametrize("model", SHAPES.values(), ids=SHAPES)
def test_two_tp_ranks_shard_the_heads_and_replicate_what_is_compressed(model: ModelConfig) -> None:
    specs = mla(Declaration(ModelShape.of(model), "fp32", 2))
    sharded = {spec.name.removesuffix(".weight") for spec in specs if spec.shards}
    assert sharded == {"query" if model.mla.q_lora_rank is None else "query_up", "kv_up", "output"}


def test_deepseek_v3_has_the_published_number_of_parameters() -> None:
    shape = ModelShape.of(load_config(["+config=deepseek_v3", "--mtp-num-layers", "0"]).model)
    # Its vocabulary needs no padding.
    assert (
        sum(spec.numel for spec in declare_model(shape)) == num_parameters(shape) == 671_026_404_352
    )


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    weights = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        if name in weights:
            parameter.data.copy_(weights[name].data)


def test_learned_positions_come_besides_the_rotary_ones() -> None:
    model = replace(LATENT, untie_embeddings_and_output_weights=True)
    rotated = randomize(build(model))
    learned = build(replace(model, position_embedding_type="learned_absolute"))
    copy_weights(rotated, learned)
    tokens = random_batch().tokens
    table = learned.embedding.position.weight.data
    table.zero_()
    assert torch.equal(learned.logits(tokens), rotated.logits(tokens))
    table.fill_(0.5)  # one row for all positions is the same as larger word embeddings
    rotated.embedding.word.weight.data += 0.5
    torch.testing.assert_close(learned.logits(tokens), rotated.logits(tokens))
    table.normal_(generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(learned.logits(tokens), rotated.logits(tokens))


def test_the_bias_of_the_output_is_added_once() -> None:
    model = replace(LATENT, add_bias_linear=True)
    biased = full_layer(model)
    hidden = draw(B, S, H, seed=5)
    grad = draw(B, S, H, seed=6)
    with_bias = apply(biased, model, hidden, grad=grad)["output of the layer"]
    without = apply(full_layer(LATENT), LATENT, hidden, grad=grad)["output of the layer"]
    torch.testing.assert_close(with_bias - without, biased.output.bias.expand_as(without))
