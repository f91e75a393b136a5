"""Rules of fp8: contradictions, and sizes that torch's products cannot take."""

import pytest

from nanotrain.config.config import Config
from nanotrain.config.load import load_config
from nanotrain.config.rules.fp8 import E4M3_ONLY, SCALED_ALONG_ROWS, odd_sizes
from nanotrain.config.rules.rule import Values
from nanotrain.errors import ConfigError, ConfigErrors
from nanotrain.precision.fp8 import RECIPES
from tests.config.asking import config_of, validate

FP8 = {"fp8_format": "hybrid"}
SHARDED = {"fp8_param_gather": True, "data_parallel_sharding_strategy": "optim"}
FITTING = {"hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128}


def error_of(config: Config) -> str:
    """The only error."""
    with pytest.raises(ConfigError) as caught:
        validate(config, to_train=True)
    assert not isinstance(caught.value, ConfigErrors), str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (FP8 | {"params_dtype": "fp16"}, "fp8_format with params_dtype fp16"),
        (FP8 | {"fp8_recipe": "blockwise"}, "fp8_recipe blockwise with fp8_format hybrid"),
        (FP8 | {"fp8_recipe": "mxfp8"}, "fp8_recipe mxfp8 with fp8_format hybrid"),
        (FP8 | SHARDED | {"fp8_recipe": "rowwise"}, "fp8_param_gather with fp8_recipe rowwise"),
        (SHARDED, "precision.fp8.param_gather = true has no effect"),
        (FP8 | {"fp8_param_gather": True}, "no_shard gathers no parameters"),
        ({"fp8_recipe": "tensorwise"}, "precision.fp8.recipe = tensorwise has no effect"),
        ({"first_last_layers_bf16": True}, "precision.fp8.first_last_layers_bf16 = true has no effect"),
        (FP8 | {"fp8_recipe": "tensorwise", "fp8_margin": 1}, "only fp8_recipe delayed keeps an amax history"),
        (FP8 | {"fp8_recipe": "rowwise", "fp8_amax_history_len": 4}, "only fp8_recipe delayed keeps an amax history"),
        (FP8 | {"fp8_amax_compute_algo": "max"}, "the history has one step"),
        (FP8 | {"num_layers_at_end_in_bf16": 2}, "it belongs to first_last_layers_bf16"),
        (
            FP8 | {"first_last_layers_bf16": True, "num_layers": 4, "num_layers_at_end_in_bf16": 3},
            "1 layer at the start and 3 at the end of 4 without fp8",
        ),
    ],
)
def test_each_contradiction_is_one_error(fields: dict[str, object], text: str) -> None:
    assert text in error_of(config_of(**FITTING | fields))


def test_what_fits_together_passes() -> None:
    for name in RECIPES:
        validate(config_of(**FITTING, fp8_format="e4m3", fp8_recipe=name), to_train=True)
    validate(config_of(**FITTING, **FP8, fp8_amax_history_len=16, fp8_amax_compute_algo="max", fp8_margin=1))
    validate(config_of(**FITTING, **FP8, first_last_layers_bf16=True, num_layers_at_end_in_bf16=0), to_train=True)


def test_the_recipes_with_e4m3_only_are_those_of_the_table() -> None:
    assert [name for name, recipe in RECIPES.items() if recipe.e4m3_only] == list(E4M3_ONLY)


def test_the_recipes_that_are_not_gathered_scale_a_transposed_weight_otherwise() -> None:
    assert [name for name, recipe in RECIPES.items() if not recipe.is_transposable] == list(SCALED_ALONG_ROWS)


def test_odd_sizes_are_one_error_with_their_numbers() -> None:
    fields = {"hidden_size": 40, "num_attention_heads": 4, "ffn_hidden_size": 56, "tensor_model_parallel_size": 2}
    error = error_of(config_of(**fields, **FP8))
    for part in ("hidden_size is 40", "kv_channels is 20", "ffn_hidden_size / tp is 28", "hidden_size: 48"):
        assert part in error
    validate(config_of(**fields), to_train=True)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tensor_model_parallel_size": 2, "num_query_groups": 1, "kv_channels": 16}, []),
        ({"tensor_model_parallel_size": 4, "ffn_hidden_size": 96}, ["ffn_hidden_size / tp"]),
        ({"num_experts": 4, "moe_ffn_hidden_size": 24}, ["moe_ffn_hidden_size / etp"]),
        (
            {"num_experts": 4, "moe_ffn_hidden_size": 64, "moe_shared_expert_intermediate_size": 40},
            ["moe_shared_expert_intermediate_size / tp"],
        ),
        (
            {"multi_latent_attention": True, "kv_lora_rank": 32, "qk_pos_emb_head_dim": 8},
            ["kv_lora_rank + qk_pos_emb_head_dim"],
        ),
    ],
)
def test_every_matrix_of_a_rank_is_checked(fields: dict[str, object], expected: list[str]) -> None:
    assert [name for name, _ in odd_sizes(Values(config_of(**FITTING | fields)))] == expected


def test_fp8_means_the_hybrid_format() -> None:
    arguments = ["--mock-data", "--vocab-size", "512", "--hidden-size", "64", "--num-attention-heads", "4", "--fp8"]
    assert load_config(arguments).precision.fp8.format == "hybrid"
    with pytest.raises(ConfigError, match="--fp8 contradicts --fp8-format e4m3"):
        load_config([*arguments, "--fp8-format", "e4m3"])
