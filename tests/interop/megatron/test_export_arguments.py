"""Configurations as arguments of Megatron-LM, which the import reads as they were."""

from dataclasses import replace

import pytest
import torch

from nanotrain.config.config import Config, DataConfig
from nanotrain.config.model import ModelConfig
from nanotrain.config.schema import with_values
from nanotrain.interop.megatron.arguments import config_of_arguments
from nanotrain.interop.megatron.export_arguments import arguments_of_config, lost_settings
from tests.interop.megatron.models import DEEPSEEK, GATED, GPT2, HYBRID, LLAMA, MIXED, MOE

MODELS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "moe": MOE,
    "mixed": MIXED,
    "gelu_tanh": replace(GPT2, activation="gelu_tanh"),
    "squared_relu": replace(GPT2, activation="squared_relu"),
    "hybrid": HYBRID,
    "deepseek": DEEPSEEK,
    "gated": GATED,
    "window": replace(LLAMA, window_size=4, window_attn_skip_freq="2"),
    "padded": replace(LLAMA, make_vocab_size_divisible_by=32),
}


def config_of(model_config: ModelConfig) -> Config:
    data = DataConfig(data_path=["none"], seq_length=12)
    return Config(model=model_config, data=data)


@pytest.mark.parametrize("name", MODELS)
def test_the_import_reads_the_same_model(name: str) -> None:
    config = config_of(MODELS[name])
    arguments = arguments_of_config(config, batch_size=8)
    assert lost_settings(config, arguments) == []
    rows = MODELS[name].padded_vocab_size
    assert config_of_arguments(arguments, num_rows=rows).config.model.vocab_size == rows


def test_the_import_reads_the_same_run() -> None:
    changes = {
        "optim.lr": 1e-2,
        "optim.lr_decay_style": "WSD",
        "optim.lr_wsd_decay_samples": 40,
        "optim.lr_decay_samples": 80,
        "optim.adam_beta2": 0.9,
        "train.rampup_batch_size": [2, 2, 8],
        "train.global_batch_size": 8,
        "precision.params_dtype": "bf16",
        "precision.use_precision_aware_optimizer": True,
        "precision.exp_avg_dtype": "bf16",
    }
    config = with_values(config_of(LLAMA), changes)
    arguments = arguments_of_config(config, batch_size=8)
    assert lost_settings(config, arguments) == []
    assert arguments["exp_avg_dtype"] == torch.bfloat16 and arguments["bf16"] is True


def test_names_of_megatron() -> None:
    arguments = arguments_of_config(config_of(replace(MOE, window_size=4)), batch_size=8)
    expected = {
        "swiglu": True,
        "group_query_attention": True,
        "padded_vocab_size": 40,
        "window_size": (4, 0),
        "moe_ffn_hidden_size": 24,
        "layernorm_epsilon": 1e-5,
        "tensor_model_parallel_size": 1,
        "global_batch_size": 8,
        "no_save_rng": True,
    }
    assert {name: arguments[name] for name in expected} == expected
