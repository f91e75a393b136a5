"""Stored arguments become a configuration; what has no place here is refused by its name."""

from typing import Any

import pytest
import torch

from nanotrain.config.config import Config
from nanotrain.errors import CheckpointError
from nanotrain.interop.megatron.arguments import config_of_arguments
from tests.interop.megatron.cases import CASES, GLOBAL_BATCH, MICRO_BATCH, ROWS, arguments_of


def config_of(name: str = "tp2", *, num_rows: int = ROWS, **changes: Any) -> Config:
    arguments = vars(arguments_of(CASES[name], samples=16)) | changes
    return config_of_arguments(arguments, num_rows=num_rows).config


def test_a_llama() -> None:
    config = config_of()
    model = config.model
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (2, 16, 4)
    assert (model.activation, model.normalization) == ("swiglu", "RMSNorm")
    assert (model.position_embedding_type, model.num_query_groups) == ("rope", 2)
    assert model.untie_embeddings_and_output_weights and not model.add_bias_linear
    assert (config.optim.lr, config.optim.adam_beta2, config.optim.weight_decay) == (
        1e-2,
        0.95,
        0.1,
    )
    assert (config.train.global_batch_size, config.train.micro_batch_size) == (
        GLOBAL_BATCH,
        MICRO_BATCH,
    )
    assert config.data.seq_length == 12


def test_the_defaults_of_megatron_are_meant() -> None:
    model = config_of("gpt2").model
    assert (model.activation, model.add_bias_linear) == ("gelu", True)
    assert model.num_query_groups is None  # its argument is 1 without --group-query-attention
    assert config_of("gpt2", bias_gelu_fusion=True).model.activation == "gelu_tanh"
    assert config_of("gpt2", squared_relu=True).model.activation == "squared_relu"


def test_the_vocabulary_is_that_of_the_logits() -> None:
    arguments = vars(arguments_of(CASES["tp2"], samples=16))
    result = config_of_arguments(arguments, num_rows=ROWS)
    assert (result.config.model.vocab_size, result.config.model.padded_vocab_size) == (48, 48)
    assert any("48, the padded size" in note for note in result.notes)
    assert config_of(num_rows=47).model.padded_vocab_size == 47


def test_data_types_and_lists() -> None:
    assert config_of(bf16=True, params_dtype=torch.bfloat16).precision.params_dtype == "bf16"
    model = config_of("moe", moe_layer_freq=[0, 1]).model
    assert model.moe_layers == (False, True)
    assert config_of(window_size=(5, 0)).model.window_size == 5


def test_layers_of_mamba_by_their_shares() -> None:
    """Runs before the pattern was stored, and runs of other models, whose shares are 0."""
    shares = {"hybrid_attention_ratio": 0.25, "hybrid_mlp_ratio": 0.25}
    spec = ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]
    plain = {"hybrid_override_pattern": None, "is_hybrid_model": None}
    layers = {
        "MM*-": plain | shares,
        "MMMM": plain | {"spec": spec, "hybrid_mlp_ratio": 0.0},
        "M-*M": {"is_hybrid_model": True, "hybrid_attention_ratio": 0.0},
    }
    for pattern, changes in layers.items():
        model = config_of("hybrid_buckets", **changes).model
        assert model.hybrid_layer_pattern == pattern
    assert config_of(hybrid_attention_ratio=0.0).model.hybrid_layer_pattern is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rotary_interleaved": True}, "rotary_interleaved True"),
        ({"fp32_residual_connection": True}, "fp32-residual-connection"),
        ({"num_layers": "many"}, "num_layers"),
        ({"hidden_size": 17}, "hidden_size"),
        ({"decoupled_weight_decay": False}, "decoupled_weight_decay False"),
    ],
)
def test_what_has_no_place_here_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        config_of(**changes)


def test_arguments_must_be_there() -> None:
    with pytest.raises(CheckpointError, match="has no arguments"):
        config_of_arguments({}, num_rows=ROWS)


@pytest.mark.parametrize(
    "changes",
    [
        {"normalization": "${oc.env:MY_SECRET}"},
        {"moe_router_load_balancing_type": ["none", "${oc.env:MY_SECRET}"]},
        {"window_size": ["${oc.env:MY_SECRET}", 0]},
        {"hybrid_override_pattern": "${model.num_layers}"},
        {"seed": "${train.micro_batch_size}"},
    ],
)
def test_a_value_that_stands_for_another_is_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setenv("MY_SECRET", "LayerNorm")
    with pytest.raises(CheckpointError, match="would be replaced") as error:
        config_of(**changes)
    assert "LayerNorm" not in str(error.value)


def notes_of(**changes: Any) -> list[str]:
    arguments = vars(arguments_of(CASES["tp2"], samples=16)) | changes
    notes = config_of_arguments(arguments, num_rows=ROWS).notes
    return [note for note in notes if "left out" in note]


def test_what_changes_the_next_step_is_taken() -> None:
    config = config_of(
        reset_attention_mask=True,
        reset_position_ids=True,
        eod_mask_loss=True,
        qk_layernorm=True,
        no_weight_decay_cond_type="apply_wd_to_qk_layernorm",
    )
    assert config.data.reset_attention_mask and config.data.reset_position_ids
    assert config.data.eod_mask_loss and config.optim.apply_wd_to_qk_layernorm
    config = config_of(fp16=True, params_dtype=torch.float16, loss_scale_window=500, hysteresis=4)
    assert (config.precision.loss_scale_window, config.precision.hysteresis) == (500, 4)
    assert config_of(fp16=True, loss_scale=128.0).precision.loss_scale == 128.0
    moments = {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16}
    assert config_of(**moments).precision.exp_avg_dtype == "bf16"
    with pytest.raises(CheckpointError, match="moe-input-jitter-eps 0.01"):
        config_of("moe", moe_input_jitter_eps=0.01)


def test_what_is_left_out_is_named() -> None:
    assert notes_of() == []
    assert notes_of(fim_data=True, fim_rate=0.3, sample_rate=0.5, a_patch=3) == [
        "left out 4 arguments with other values than Megatron-LM's defaults: "
        "a_patch, fim_data, fim_rate, sample_rate"
    ]


def test_what_is_off_against_a_default_is_named() -> None:
    kernels = {"masked_softmax_fusion": False, "bias_dropout_fusion": False}
    assert notes_of(**kernels, check_for_nan_in_loss_and_grad=True) == []
    assert notes_of(**kernels, check_for_nan_in_loss_and_grad=False, fim_data=False) == [
        "left out 1 argument with other values than Megatron-LM's defaults: "
        "check_for_nan_in_loss_and_grad"
    ]


def test_defaults_and_layouts_are_not_named() -> None:
    usual = {"sample_rate": 1.0, "mask_prob": 0.15, "fim_rate": 0.5, "rl_default_top_k": -1}
    layout = {
        "world_size": 8,
        "virtual_pipeline_model_parallel_size": 2,
        "data_path": ["corpus"],
        "main_params_dtype": torch.float32,
    }
    assert notes_of(**usual, **layout, enable_msc=True, vocab_extra_ids=0) == []
