"""Rules of recomputation, offloading and sizes in fp8. The default model has 4 layers."""

import pytest

from nanotrain.config.config import Config
from nanotrain.config.load import load_config
from nanotrain.config.rules.memory import odd_sizes
from nanotrain.config.rules.settings import Settings
from nanotrain.errors import ConfigError, ConfigErrors
from tests.config.asking import config_of, validate

PP2 = {"pipeline_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2}
FP8 = {"fp8_format": "hybrid"}
FITTING = {"hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128}
FULL, SELECTIVE = {"recompute_granularity": "full"}, {"recompute_granularity": "selective"}
EXPERTS, MLA = {"num_experts": 4}, {"multi_latent_attention": True}
OFFLOAD = {"cpu_offloading": True, "cpu_offloading_num_layers": 2}


def modules(*names: str) -> dict[str, object]:
    return SELECTIVE | {"recompute_modules": list(names)}


@pytest.mark.parametrize(
    "keys",
    [
        FULL,
        FULL | {"recompute_method": "block"},
        FULL | {"recompute_method": "uniform", "recompute_num_layers": 4},
        PP2 | FULL | {"num_layers": 5, "recompute_method": "block", "recompute_num_layers": 3},
        SELECTIVE,
        modules("core_attn", "layernorm", "mlp"),
        modules("moe") | EXPERTS,
        modules("moe_act", "mlp") | EXPERTS | {"moe_layer_freq": "[0]+[1]*3"},
        modules("mla_up_proj") | MLA,
        modules("core_attn", "mlp") | {"torch_compile": True},
        modules("layernorm", "moe_act") | EXPERTS | {"torch_compile": True},
        modules("mla_up_proj") | MLA | {"torch_compile": True},
        modules("pointwise"),
        modules("pointwise", "moe", "core_attn") | EXPERTS | {"torch_compile": True},
        OFFLOAD,
    ],
)
def test_what_fits_breaks_no_rule(keys):
    validate(config_of(**keys), to_train=True)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"recompute_method": "block"},
            "recompute_method = block has no effect: it belongs to",
        ),
        (SELECTIVE | {"recompute_num_layers": 2}, "recompute_num_layers = 2 has no effect"),
        ({"recompute_modules": ["mlp"]}, "it belongs to recompute_granularity selective"),
        (FULL | {"recompute_modules": ["mlp"]}, "it belongs to recompute_granularity selective"),
        (FULL | {"recompute_num_layers": 2}, "recompute_method is unset"),
        (
            FULL | {"recompute_num_layers": 2},
            "set --recompute-method uniform or --recompute-method block",
        ),
        (
            FULL | {"recompute_method": "block", "recompute_num_layers": 5},
            "set --recompute-num-layers to at most 4",
        ),
        (
            PP2 | FULL | {"recompute_method": "uniform", "recompute_num_layers": 3},
            "the longest of 2 pipeline stages has 2 of 4 layers",
        ),
        (modules("core_atn"), "did you mean --recompute-modules core_attn?"),
        (modules("core_attn", "moe"), "moe has no effect: the model has no experts"),
        (modules("mla_up_proj"), "mla_up_proj has no effect: multi_latent_attention is off"),
        (modules("mlp") | EXPERTS, "mlp has no effect: every layer has experts"),
        (
            modules("moe", "core_attn") | EXPERTS | {"moe_shortcut": True},
            "recompute_modules moe core_attn with moe_shortcut",
        ),
        (modules("moe", "moe_act") | EXPERTS, "moe_act has no effect"),
        ({"cpu_offloading_num_layers": 2}, "cpu_offloading_num_layers = 2 has no effect"),
        (
            OFFLOAD | {"cpu_offloading_num_layers": 0},
            "set --cpu-offloading-num-layers to at most 3",
        ),
        (
            OFFLOAD | {"cpu_offloading_num_layers": 4},
            "the longest of 1 pipeline stage has 4 of 4 layers",
        ),
        (
            OFFLOAD | PP2 | {"cpu_offloading_num_layers": 2},
            "set --cpu-offloading-num-layers to at most 1",
        ),
        (OFFLOAD | SELECTIVE, "cpu_offloading with recompute_granularity selective"),
        (OFFLOAD | {"torch_compile": True}, "cpu_offloading with torch_compile"),
        (OFFLOAD | {"device": "cpu"}, "activations on a CPU are in host memory already"),
        (modules("pointwise", "layernorm"), "pointwise recomputes layernorm already"),
        (modules("moe_act", "pointwise") | EXPERTS, "pointwise recomputes moe_act already"),
        (
            modules("pointwise") | EXPERTS | {"moe_shortcut": True},
            "recompute_modules pointwise with moe_shortcut",
        ),
    ],
)
def test_a_contradiction_is_one_error(keys, message):
    with pytest.raises(ConfigError) as caught:
        validate(config_of(**keys), to_train=True)
    assert message in str(caught.value)


def test_the_flags_of_megatron_lm():
    line = "--mock-data --vocab-size 512 --recompute-granularity full --recompute-method block --recompute-num-layers 2"
    memory = load_config(line.split()).memory
    assert (memory.recompute_granularity, memory.recompute_method, memory.recompute_num_layers) == (
        "full",
        "block",
        2,
    )
    line = "--mock-data --vocab-size 512 --recompute-activations --recompute-modules core_attn layernorm"
    memory = load_config(line.split()).memory
    assert memory.recompute_granularity == "selective" and memory.recompute_modules == [
        "core_attn",
        "layernorm",
    ]
    memory = load_config([*line.split(), "--recompute-granularity", "full"]).memory
    assert memory.recompute_granularity == "selective"


def test_the_longest_stage_of_a_layout_is_counted():
    layout = PP2 | {"num_layers": 6, "pipeline_model_parallel_layout": "Et|tttttL"}
    validate(
        config_of(**layout, **FULL, recompute_method="block", recompute_num_layers=5), to_train=True
    )
    with pytest.raises(ConfigError, match="the longest of 2 pipeline stages has 5 of 6 layers"):
        validate(
            config_of(**layout, **FULL, recompute_method="block", recompute_num_layers=6),
            to_train=True,
        )


def error_of(config: Config) -> str:
    """The only error."""
    with pytest.raises(ConfigError) as caught:
        validate(config, to_train=True)
    assert not isinstance(caught.value, ConfigErrors), str(caught.value)
    return str(caught.value)


def test_odd_sizes_are_one_error_with_their_numbers() -> None:
    fields = {
        "hidden_size": 40,
        "num_attention_heads": 4,
        "ffn_hidden_size": 56,
        "tensor_model_parallel_size": 2,
    }
    error = error_of(config_of(**fields, **FP8))
    for part in (
        "hidden_size is 40",
        "kv_channels is 20",
        "ffn_hidden_size / tp is 28",
        "hidden_size: 48",
    ):
        assert part in error
    validate(config_of(**fields), to_train=True)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tensor_model_parallel_size": 2, "num_query_groups": 1, "kv_channels": 16}, []),
        ({"tensor_model_parallel_size": 4, "ffn_hidden_size": 96}, ["ffn_hidden_size / tp"]),
        ({"num_experts": 4, "moe_ffn_hidden_size": 24}, ["moe_ffn_hidden_size / etp"]),
        (
            {
                "num_experts": 4,
                "moe_ffn_hidden_size": 64,
                "moe_shared_expert_intermediate_size": 40,
            },
            ["moe_shared_expert_intermediate_size / tp"],
        ),
        (
            {"multi_latent_attention": True, "kv_lora_rank": 32, "qk_pos_emb_head_dim": 8},
            ["kv_lora_rank + qk_pos_emb_head_dim"],
        ),
    ],
)
def test_every_matrix_of_a_rank_is_checked(fields: dict[str, object], expected: list[str]) -> None:
    assert list(odd_sizes(Settings(config_of(**FITTING | fields)))) == expected
