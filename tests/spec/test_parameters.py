"""Declared parameters: names, order, shapes, shards and gradient axes, and what modules allocate
from them.
"""

from dataclasses import replace

import pytest

from nanotrain.config.model import MLAConfig, ModelConfig, MoEConfig, MTPConfig
from nanotrain.spec.counts import num_parameters
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.parameters import declare_model, declare_stage
from nanotrain.spec.params import Constant, Normal, ParamSpec, Shard
from nanotrain.spec.shape import ModelShape
from nanotrain.spec.stages import StageSpec, split_layers
from tests.model.building import GPT2, LLAMA, MODELS, QWEN3

MOE = replace(
    LLAMA,
    moe=MoEConfig(num_experts=8, layer_freq="[0]*1+[1]*1", shared_expert_intermediate_size=16),
)
MLA = replace(
    LLAMA,
    num_query_groups=None,
    multi_latent_attention=True,
    mla=MLAConfig(
        q_lora_rank=24, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6
    ),
)


def declared(
    model: ModelConfig, *, stages: int = 1, tp: int = 1, sequence_parallel: bool = False
) -> list[ParamSpec]:
    return [
        spec
        for stage in split_layers(model.num_layers, stages)
        for spec in declare_stage(
            Declaration(ModelShape.of(model), "bf16", tp, sequence_parallel), stage
        )
    ]


def by_name(model: ModelConfig, **options: object) -> dict[str, ParamSpec]:
    return {spec.name: spec for spec in declared(model, **options)}


def test_parameters_are_named_globally_and_in_registration_order() -> None:
    layer = [
        "attention_norm",
        "attention.query",
        "attention.key",
        "attention.value",
        "attention.query_norm",
    ]
    layer += [
        "attention.key_norm",
        "attention.output",
        "mlp_norm",
        "mlp.gate",
        "mlp.up",
        "mlp.down",
    ]
    expected = ["embedding.word.weight"]
    expected += [f"layers.{i}.{name}.weight" for i in range(2) for name in layer]
    expected += ["final_norm.weight", "head.weight"]
    assert [spec.name for spec in declared(MODELS["qwen3-untied"])] == expected
    assert {spec.dtype for spec in declared(QWEN3)} == {"bf16"}


@pytest.mark.parametrize("name", MODELS)
def test_padding_of_the_vocabulary_is_declared_and_not_counted(name: str) -> None:
    shape = ModelShape.of(MODELS[name])
    padding = (
        (shape.padded_vocab_size - shape.vocab_size)
        * shape.hidden_size
        * (1 if shape.is_tied else 2)
    )
    assert sum(spec.numel for spec in declare_model(shape)) == num_parameters(shape) + padding


@pytest.mark.parametrize("name", MODELS)
def test_two_stages_declare_the_model_and_the_tied_weight_twice(name: str) -> None:
    expected = [spec.name for spec in declared(MODELS[name])]
    names = [spec.name for spec in declared(MODELS[name], stages=2)]
    is_tied = not MODELS[name].untie_embeddings_and_output_weights
    assert sorted(names) == sorted(expected + ["embedding.word.weight"] * is_tied)
    assert [spec.stage for spec in declared(MODELS[name], stages=2)] == sorted(
        spec.stage for spec in declared(MODELS[name], stages=2)
    )


@pytest.mark.parametrize("name", MODELS)
def test_the_boxes_of_two_tp_ranks_tile_every_parameter(name: str) -> None:
    for spec in declared(MODELS[name], tp=2):
        boxes = {spec.box({"tp": rank}, {"tp": 2}) for rank in range(2)}
        assert sum(box.numel for box in boxes) == spec.numel
        assert len(boxes) == (2 if spec.shards else 1)


def test_key_and_value_heads_fewer_than_ranks_are_replicated_and_summed_over_tp() -> None:
    few, many = by_name(LLAMA, tp=4), by_name(LLAMA, tp=2)
    for name in ("layers.0.attention.key.weight", "layers.1.attention.value.weight"):
        assert (few[name].shards, few[name].grad_sum_axes) == ((), ("tp",)), name
        assert (many[name].shards, many[name].grad_sum_axes) == ((Shard(0, "tp"),), ()), name
        assert few[name].shape == many[name].shape == (16, 32)
    assert few["layers.0.attention.query.weight"].shards == (Shard(0, "tp"),)


def test_sequence_parallelism_sums_the_gradients_of_replicated_parameters_over_tp() -> None:
    model = replace(GPT2, qk_layernorm=True)
    apart, together = by_name(model, tp=2, sequence_parallel=True), by_name(model, tp=2)
    changed = {name.removeprefix("layers.0.") for name in apart if apart[name] != together[name]}
    norms = {
        f"{norm}.{part}"
        for norm in ("attention_norm", "mlp_norm", "final_norm")
        for part in ("weight", "bias")
    }
    biases = {"attention.output.bias", "mlp.down.bias"}
    assert {name for name in changed if "layers.1" not in name} == norms | biases | {
        "embedding.position.weight"
    }
    assert together["layers.0.attention.query_norm.weight"].grad_sum_axes == ("tp",)


def test_experts_are_stacked_and_sharded_over_ep_and_etp() -> None:
    specs = by_name(MOE)
    assert specs["layers.1.mlp.experts.gate.weight"].shape == (8, 48, 32)
    assert specs["layers.1.mlp.experts.down.weight"].shape == (8, 32, 48)
    assert specs["layers.1.mlp.experts.up.weight"].shards == (Shard(0, "ep"), Shard(1, "etp"))
    assert specs["layers.1.mlp.experts.down.weight"].shards == (Shard(0, "ep"), Shard(2, "etp"))
    assert {name for name, spec in specs.items() if spec.is_expert} == {
        f"layers.1.mlp.experts.{matrix}.weight" for matrix in ("gate", "up", "down")
    }
    assert specs["layers.1.mlp.router.weight"].grad_sum_axes == ("tp",)
    assert specs["layers.1.mlp.shared.down.weight"].shards == (Shard(1, "tp"),)
    assert "layers.0.mlp.gate.weight" in specs


def test_latent_attention_replicates_what_lies_before_the_heads() -> None:
    specs = by_name(MLA, tp=2, sequence_parallel=True)
    attention = {
        name.split(".", 3)[3]: spec
        for name, spec in specs.items()
        if name.startswith("layers.0.attention.")
    }
    assert {name: spec.shape for name, spec in attention.items()} == {
        "query_down.weight": (24, 32),
        "query_latent_norm.weight": (24,),
        "query_up.weight": (4 * 12, 24),
        "kv_down.weight": (16 + 4, 32),
        "kv_latent_norm.weight": (16,),
        "kv_up.weight": (4 * (8 + 6), 16),
        "output.weight": (32, 4 * 6),
    }
    replicated = {name for name, spec in attention.items() if not spec.shards}
    assert replicated == {name for name, spec in attention.items() if spec.grad_sum_axes == ("tp",)}
    assert replicated == {
        f"{layer}.weight"
        for layer in ("query_down", "query_latent_norm", "kv_down", "kv_latent_norm")
    }


def test_initial_values_and_weight_decay_follow_what_a_parameter_is_for() -> None:
    specs = by_name(MODELS["gpt2-untied"])
    assert specs["layers.0.attention.query.weight"].init == Normal(0.02)
    assert (
        specs["layers.1.mlp.down.weight"].init
        == specs["layers.0.attention.output.weight"].init
        == Normal(0.01)
    )
    assert specs["layers.1.mlp.up.bias"].init == specs["final_norm.bias"].init == Constant(0.0)
    assert specs["final_norm.weight"].init == Constant(1.0)
    assert all(spec.weight_decay is (len(spec.shape) > 1) for spec in specs.values())


def test_units_are_the_embedding_each_layer_and_the_head_with_the_final_norm() -> None:
    units = list(dict.fromkeys(spec.unit for spec in declared(MODELS["llama-untied"])))
    assert units == ["embedding", "layers.0", "layers.1", "head"]


def test_update_rules_on_matrices_apply_inside_the_blocks_only() -> None:
    specs = by_name(replace(GPT2, untie_embeddings_and_output_weights=True))
    needed = {spec.unit for spec in specs.values() if spec.needs_whole_matrix}
    assert needed == {"layers.0", "layers.1"}
    assert all(len(spec.shape) == 2 for spec in specs.values() if spec.needs_whole_matrix)


def test_a_word_embedding_is_shared_where_the_last_stage_reads_it() -> None:
    word = ("embedding.word.weight", ("embed",))
    assert shared(LLAMA) == [word] * 2 and not shared(MODELS["llama-untied"])
    with_mtp = replace(MODELS["llama-untied"], mtp=MTPConfig(num_layers=1))
    assert shared(with_mtp) == [word, word, ("head.weight", ())]


def shared(model: ModelConfig) -> list[tuple[str, tuple[str, ...]]]:
    """Parameters that several units read, over two stages, and the axes that sum their gradients."""
    return [(spec.name, spec.grad_sum_axes) for spec in declared(model, stages=2) if spec.is_shared]


def test_layers_of_multi_token_prediction_are_on_the_last_stage_and_like_the_last_layer() -> None:
    moe = MoEConfig(num_experts=4, layer_freq="[0]+[1]")
    specs = declared(replace(LLAMA, moe=moe, mtp=MTPConfig(num_layers=2)), stages=2)
    units = {spec.unit for spec in specs if spec.stage == 1}
    assert units == {"embedding", "layers.1", "head", "mtp.0", "mtp.1"}
    assert not [spec for spec in specs if spec.stage == 0 and spec.unit.startswith("mtp")]
    like = {
        spec.name.removeprefix("layers.1."): spec.shape for spec in specs if spec.unit == "layers.1"
    }
    of_block = [spec for spec in specs if spec.name.startswith("mtp.1.block.")]
    assert {spec.name.removeprefix("mtp.1.block."): spec.shape for spec in of_block} == like
    (projection,) = (spec for spec in specs if spec.name == "mtp.1.eh_proj.weight")
    assert projection.shape == (32, 64) and not projection.shards


def test_a_middle_stage_has_neither_end() -> None:
    names = [
        spec.unit
        for spec in declare_stage(
            Declaration(ModelShape.of(LLAMA), "fp32"), StageSpec(1, 1, 2, False, False)
        )
    ]
    assert set(names) == {"layers.1"}
