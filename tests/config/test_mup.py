"""Factors of muP: those of Megatron-LM, and the same without it."""

from dataclasses import replace

from nanotrain.config.layer_kinds import MLAConfig
from nanotrain.config.model import ModelConfig
from nanotrain.config.mup import logits_divisor, score_scale, width_multiplier, without_mup

MUP = ModelConfig(hidden_size=256, kv_channels=16, use_mup=True, mup_base_hidden_size=64)


def test_factors_are_those_of_megatron_lm() -> None:
    assert width_multiplier(MUP) == logits_divisor(MUP) == 4
    assert score_scale(MUP) == 1 / 16
    assert score_scale(replace(MUP, mup_base_head_dim=16)) == 1 / 4
    assert score_scale(replace(MUP, mup_attn_scale_power=0.5)) == 1 / 4
    assert score_scale(replace(MUP, softmax_scale=0.5)) == 0.5
    assert logits_divisor(replace(MUP, mup_output_mult=0.5)) == 2
    assert replace(MUP, mup_embedding_mult=3.0).embedding_scale == 3


def test_scores_of_latent_attention_keep_their_factor() -> None:
    """As there, where it is 1 / sqrt(channels of a query) times a factor of the rotary scaling."""
    assert score_scale(replace(MUP, mla=MLAConfig(kv_lora_rank=16))) is None


def test_without_it_factors_are_those_of_any_model() -> None:
    off = replace(MUP, use_mup=False)
    assert width_multiplier(off) == logits_divisor(off) == off.embedding_scale == 1
    assert score_scale(off) is None


def test_the_same_model_without_it_has_the_same_factors() -> None:
    model = replace(MUP, mup_embedding_mult=3.0, embedding_multiplier=2.0, scale_embeddings=True)
    plain = without_mup(model)
    assert not plain.use_mup
    assert score_scale(plain) == score_scale(model)
    assert logits_divisor(plain) == logits_divisor(model)
    assert plain.embedding_scale == model.embedding_scale
    assert without_mup(plain) is plain
