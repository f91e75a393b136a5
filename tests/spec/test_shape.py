"""Derived sizes of a model."""

from dataclasses import replace

import pytest

from nanotrain.config.model import MLAConfig, ModelConfig, MoEConfig, MTPConfig
from nanotrain.errors import ConfigError
from nanotrain.spec.shape import ModelShape
from tests.model.building import GPT2, LLAMA


def test_sizes_follow_from_the_configuration() -> None:
    shape = ModelShape.of(ModelConfig(hidden_size=256, num_attention_heads=4, vocab_size=50257))
    assert (shape.head_dim, shape.value_head_dim, shape.query_groups) == (64, 64, 4)
    assert (shape.ffn_size, shape.padded_vocab_size) == (704, 50304)
    assert shape.is_gated and shape.is_tied and shape.normalization == "RMSNorm"


def test_learned_positions_and_biases_of_gpt2() -> None:
    shape = ModelShape.of(GPT2)
    assert (shape.num_positions, shape.ffn_size, shape.is_gated) == (64, 128, False)
    assert shape.has_linear_bias and shape.has_qkv_bias and shape.normalization == "LayerNorm"


def test_latent_attention_has_two_head_widths() -> None:
    model = replace(
        LLAMA,
        multi_latent_attention=True,
        mla=MLAConfig(kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4),
    )
    shape = ModelShape.of(replace(model, mla=replace(model.mla, v_head_dim=6)))
    assert (shape.head_dim, shape.value_head_dim) == (12, 6)
    assert shape.mla == MLAConfig(
        kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6
    )
    assert ModelShape.of(LLAMA).mla is None


def test_layers_with_experts_are_resolved_per_layer() -> None:
    shape = ModelShape.of(
        replace(LLAMA, num_layers=4, moe=MoEConfig(num_experts=8, layer_freq="[0]+[1]*3"))
    )
    assert [shape.has_experts(layer) for layer in range(4)] == [False, True, True, True]
    assert shape.moe_ffn_size == 48
    assert not ModelShape.of(LLAMA).has_experts(0)


def test_heads_have_l2_norms_in_layers_with_rotary_positions() -> None:
    shape = ModelShape.of(replace(LLAMA, num_layers=4, qk_l2_norm=True, no_rope_freq="2"))
    assert [shape.for_layer(layer).qk_l2_norm for layer in range(4)] == [True, False] * 2


def test_heads_fewer_than_ranks_are_replicated() -> None:
    shape = ModelShape.of(LLAMA)  # two key/value heads
    assert [shape.replicates_kv_heads(size) for size in (1, 2, 4)] == [False, False, True]


def test_an_unknown_vocabulary_is_an_error() -> None:
    with pytest.raises(ConfigError, match="vocab"):
        ModelShape.of(ModelConfig(activation="gelu"))


def test_layers_of_multi_token_prediction_have_the_kinds_of_the_pattern_else_of_the_last_layer() -> (
    None
):
    config = ModelConfig(
        num_layers=3, vocab_size=8, hybrid_layer_pattern="M-*/*-/*-", mtp=MTPConfig(num_layers=2)
    )
    shape = ModelShape.of(config)
    assert [shape.kinds(layer) for layer in range(2, 5)] == [
        ("attention", None),
        *[("attention", "dense")] * 2,
    ]
    last = ModelShape.of(
        replace(config, hybrid_layer_pattern=None, linear_attention_type="short_conv")
    )
    assert last.kinds(3) == last.kinds(2) == ("short_conv", "dense")
