"""Both sides of the conditions of rules: what is just allowed, and what is just refused.

`messages.json` has settings that break each rule; here are the neighbours that break none, and each
kind of layer that a rule counts.
"""

from typing import Any

import pytest

from nanotrain.config.rules.check import check_rules
from nanotrain.errors import ErrorCollector
from tests.config.asking import config_of

Keys = dict[str, Any]


def messages_of(group: str, keys: Keys) -> list[str]:
    errors = ErrorCollector()
    check_rules(config_of(**keys), group, errors=errors)
    return [str(error) for error in errors.errors]


CP2: Keys = {"context_parallel_size": 2}
CP4: Keys = {"context_parallel_size": 4}
TP2: Keys = {"tensor_model_parallel_size": 2}
TP4: Keys = {"tensor_model_parallel_size": 4}
EXPERTS: Keys = {"num_experts": 8}
FULL: Keys = {"recompute_granularity": "full", "recompute_method": "block"}
SELECTIVE: Keys = {"recompute_granularity": "selective"}
OFFLOAD: Keys = {"cpu_offloading": True}
FP8: Keys = {"fp8_format": "e4m3"}
POST: Keys = {"norm_placement": "post"}
# by kind of layer: the settings, and the tokens that its convolution sees before its own
CONVOLUTIONS: dict[str, tuple[Keys, int]] = {
    "mamba2": ({"mamba_conv_kernel_dim": 7}, 6),
    "attention_mamba2": ({"mamba_conv_kernel_dim": 7}, 6),
    "gated_delta_net": ({"linear_conv_kernel_dim": 5}, 4),
    "kda": ({"linear_conv_kernel_dim": 5}, 4),
    "short_conv": ({"linear_conv_kernel_dim": 5}, 4),
}
HALO = "token in each of the two chunks", "tokens in each of the two chunks"


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_a_chunk_has_as_many_tokens_as_a_convolution_sees(kind: str, cp: int) -> None:
    sizes, num_tokens = CONVOLUTIONS[kind]
    heads = {"linear_num_value_heads": 4, "linear_num_key_heads": 4, "mamba_num_groups": 4}
    keys = sizes | heads | {"linear_attention_type": kind, "context_parallel_size": cp}

    def refused(chunk_tokens: int, **more: Any) -> list[str]:
        length = {"seq_length": 2 * cp * chunk_tokens}
        found = messages_of("layout", keys | length | more)
        return [text for text in found if any(halo in text for halo in HALO)]

    assert not refused(num_tokens)
    (message,) = refused(num_tokens - 1)
    assert f"seq_length {2 * cp * (num_tokens - 1)} has {num_tokens - 1} token" in message
    assert f"sees {num_tokens} tokens before its own" in message
    assert not refused(1, context_parallel_size=1)
    # the longest convolution of a model counts; another kind of layer has none
    if "mamba" not in kind:
        both = {"hybrid_layer_pattern": "MG--", "mamba_conv_kernel_dim": 9}
        assert refused(7, **both) and not refused(8, **both)
        assert not refused(num_tokens, mamba_conv_kernel_dim=9)
    else:
        assert not refused(num_tokens, linear_conv_kernel_dim=9)


# group of rules, settings, a part of the message; "" where the settings are allowed
CASES: list[tuple[str, Keys, str]] = [
    # key/value heads: shared by ranks, or whole heads per rank
    ("layout", TP4 | {"num_query_groups": 2}, ""),
    ("layout", TP2 | {"num_query_groups": 4}, ""),
    ("layout", TP4 | {"num_attention_heads": 12, "num_query_groups": 3}, "3 key/value heads"),
    ("layout", TP4 | {"num_query_groups": 3, "multi_latent_attention": True}, ""),
    # the sequence over ranks
    ("layout", {"seq_length": 7}, ""),
    ("layout", TP2 | {"seq_length": 7}, ""),
    ("layout", TP2 | {"seq_length": 7, "sequence_parallel": True}, "cannot be split into 2"),
    ("layout", TP2 | EXPERTS | {"seq_length": 7}, "cannot be split into 2"),
    ("layout", EXPERTS | {"seq_length": 7}, ""),
    ("layout", CP2 | {"seq_length": 12}, ""),
    ("layout", CP2 | {"seq_length": 14}, "cannot be split into 4"),
    ("layout", CP2 | TP4 | EXPERTS | {"seq_length": 12}, "cannot be split into 8"),
    ("layout", CP2 | TP4 | EXPERTS | {"seq_length": 16}, ""),
    # expert axes
    ("layout", {"expert_tensor_parallel_size": 1}, ""),
    ("layout", {"expert_tensor_parallel_size": 2}, "expert_tensor_parallel_size 2 has no effect"),
    ("layout", {"expert_model_parallel_size": 2}, "expert_model_parallel_size 2 has no effect"),
    # recomputation: four layers
    ("layout", FULL | {"recompute_num_layers": 4}, ""),
    ("layout", FULL | {"recompute_num_layers": 5}, "above the layers of a stage"),
    ("layout", SELECTIVE | {"recompute_modules": ["moe"]}, "moe has no effect"),
    ("layout", SELECTIVE | EXPERTS | {"recompute_modules": ["moe"]}, ""),
    ("layout", SELECTIVE | {"recompute_modules": ["moe_act"]}, "moe_act has no effect"),
    ("layout", SELECTIVE | EXPERTS | {"recompute_modules": ["moe_act"]}, ""),
    (
        "layout",
        SELECTIVE | EXPERTS | {"recompute_modules": ["moe", "moe_act"]},
        "moe_act has no effect",
    ),
    ("layout", SELECTIVE | {"recompute_modules": ["mla_up_proj"]}, "mla_up_proj has no effect"),
    (
        "layout",
        SELECTIVE | {"recompute_modules": ["mla_up_proj"], "multi_latent_attention": True},
        "",
    ),
    ("layout", SELECTIVE | {"recompute_modules": ["layernorm"]}, ""),
    ("layout", SELECTIVE | POST | {"recompute_modules": ["layernorm"]}, "layernorm has no effect"),
    (
        "layout",
        SELECTIVE | POST | {"recompute_modules": ["layernorm"], "linear_norm_placement": "pre"},
        "",
    ),
    # offloading: the last of four layers stays
    ("layout", OFFLOAD | {"cpu_offloading_num_layers": 3}, ""),
    ("layout", OFFLOAD | {"cpu_offloading_num_layers": 4}, "is not below the layers of a stage"),
    (
        "layout",
        OFFLOAD | {"cpu_offloading_num_layers": 4},
        "set --cpu-offloading-num-layers to at most 3",
    ),
    (
        "layout",
        OFFLOAD | {"cpu_offloading_num_layers": 1, "num_layers": 1},
        "leave --cpu-offloading out",
    ),
    # fp8: heads of 64, 4 of them
    ("layout", FP8, ""),
    ("layout", FP8 | TP4, ""),
    ("layout", FP8 | TP4 | {"num_query_groups": 1}, ""),
    ("layout", FP8 | {"kv_channels": 6}, "heads / tp x kv_channels is 24"),
    ("layout", FP8 | TP2 | {"num_query_groups": 1, "kv_channels": 24}, "kv_channels is 24"),
    ("layout", FP8 | {"ffn_hidden_size": 700}, "ffn_hidden_size / tp is 700"),
    (
        "layout",
        FP8 | EXPERTS | {"ffn_hidden_size": 700, "moe_ffn_hidden_size": 704},
        "",
    ),
    (
        "layout",
        FP8 | EXPERTS | {"moe_ffn_hidden_size": 704, "moe_shared_expert_intermediate_size": 40},
        "moe_shared_expert_intermediate_size / tp is 40",
    ),
    (
        "layout",
        FP8 | EXPERTS | {"moe_ffn_hidden_size": 704, "moe_latent_size": 40},
        "moe_latent_size is 40",
    ),
    (
        "layout",
        FP8 | {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 2},
        "",
    ),
    (
        "layout",
        FP8 | {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 3},
        "no layer is left for fp8",
    ),
    # routers
    ("model", EXPERTS | {"moe_router_topk": 1}, "a softmax over one expert is always 1"),
    ("model", EXPERTS | {"moe_router_topk": 1, "moe_router_pre_softmax": True}, ""),
    ("model", EXPERTS | {"moe_router_topk": 1, "moe_router_score_function": "sigmoid"}, ""),
    (
        "model",
        EXPERTS | {"moe_router_num_groups": 4, "moe_router_group_topk": 4, "moe_router_topk": 8},
        "",
    ),
    (
        "model",
        EXPERTS | {"moe_router_num_groups": 4, "moe_router_group_topk": 3, "moe_router_topk": 7},
        "a token cannot be sent to 7 experts",
    ),
    (
        "model",
        EXPERTS | {"moe_router_num_groups": 4, "moe_router_group_topk": 3, "moe_router_topk": 6},
        "",
    ),
    (
        "model",
        EXPERTS | {"moe_router_num_groups": 4, "moe_router_group_topk": 5},
        "a token cannot use 5 of 4 groups",
    ),
    (
        "model",
        EXPERTS | {"moe_router_load_balancing_type": ["none"], "moe_aux_loss_coeff": [0.0]},
        "",
    ),
    (
        "model",
        EXPERTS
        | {
            "moe_router_load_balancing_type": ["aux_loss", "none"],
            "moe_aux_loss_coeff": [0.1, 0.0],
        },
        "it takes none, or different losses",
    ),
    (
        "model",
        EXPERTS
        | {
            "moe_router_load_balancing_type": ["aux_loss", "aux_loss"],
            "moe_aux_loss_coeff": [0.1, 0.1],
        },
        "it takes none, or different losses",
    ),
    (
        "model",
        EXPERTS
        | {
            "moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"],
            "moe_aux_loss_coeff": [0.1, 0.1],
        },
        "",
    ),
    # positions: a sequence may be as long as the table
    ("model", {"seq_length": 64, "max_position_embeddings": 64}, ""),
    ("model", {"seq_length": 65, "max_position_embeddings": 64}, "seq_length 65 is longer than"),
    # learning rates and schedules
    ("run", {"min_lr": 1e-3, "lr": 1e-3}, ""),
    ("run", {"min_lr": 2e-3, "lr": 1e-3}, "min_lr 0.002 is above lr 0.001"),
    ("run", {"lr_warmup_init": 1e-3, "lr": 1e-3, "lr_warmup_iters": 5}, ""),
    ("run", {"lr_decay_iters": 6, "lr_warmup_iters": 5}, ""),
    ("run", {"lr_decay_iters": 5, "lr_warmup_iters": 5}, "a warmup of 5 steps leaves nothing"),
    (
        "run",
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 100, "train_iters": 100},
        "",
    ),
    (
        "run",
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 101, "train_iters": 100},
        "longer than the whole schedule of 100",
    ),
    ("run", {"split": "1"}, ""),
    ("run", {"split": "1,0,0"}, ""),
    ("run", {"split": "1,0,0,0"}, "split is '1,0,0,0'"),
    ("run", {"split": "1,inf"}, "split is '1,inf'"),
    (
        "run",
        {
            "weight_decay_incr_style": "linear",
            "start_weight_decay": 0.1,
            "end_weight_decay": 0.1,
        },
        "",
    ),
]


@pytest.mark.parametrize(("group", "keys", "message"), CASES, ids=str)
def test_a_rule_refuses_what_it_says_and_no_more(group: str, keys: Keys, message: str) -> None:
    found = messages_of(group, keys)
    if message:
        assert any(message in text for text in found), found
    else:
        assert not found
