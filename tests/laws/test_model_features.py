"""Law L1 for features of the model, and for stages of any lengths: every layout computes what one rank computes."""

from typing import Any

import pytest

from tests.laws.compare import Row, assert_row_trains_as_one_rank

DROPOUT = {"attention_dropout": 0.2, "hidden_dropout": 0.1}
WINDOWS = {"window_size": 5, "window_attn_skip_freq": "2"}
YARN = {
    "position_embedding_type": "yarn",
    "rotary_scaling_factor": 3.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 4.0,
    "mscale_all_dim": 0.5,
}
EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 24}
# each has as many features as go together, so that every feature is in every layout
MODELS: dict[str, dict[str, Any]] = {
    # norms of OLMo, experts of gpt-oss
    "sinks, norms after, clamped experts": DROPOUT
    | WINDOWS
    | EXPERTS
    | {
        "softmax_type": "learnable",
        "softmax_scale": 0.2,
        "norm_placement": "post",
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
        "num_query_groups": 1,  # replicated over tp
        "rotary_base_local": 100.0,
        "activation": "quick_geglu",
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 0.3,
        "add_bias_linear": True,
        "moe_aux_loss_coeff": [0.01],
    },
    # norms and ends of Gemma
    "off-by-one softmax, norms on both sides, soft-capped": DROPOUT
    | WINDOWS
    | YARN
    | {
        "kv_channels": 16,
        "rotary_percent": 0.5,
        "rotary_seq_len_interpolation_factor": 2.0,
        "softmax_type": "off-by-one",
        "attn_logit_softcapping": 0.5,
        "final_logit_softcapping": 4.0,
        "norm_placement": "sandwich",
        "apply_layernorm_1p": True,
        "qk_layernorm": True,
        "activation": "geglu_tanh",
        "scale_embeddings": True,
    },
    "MLA with YaRN, experts in turn": DROPOUT
    | YARN
    | EXPERTS
    | {
        "num_query_groups": None,
        "multi_latent_attention": True,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
        "activation": "squared_relu",
        "moe_router_force_load_balancing": True,
    },
}
VPP = {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2}
SP = {"sequence_parallel": True}
EP = {"etp": 1, "ep": 2}  # of models with experts
EVERY: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (4, {"strategy": "optim", "tp": 2, "cp": 2}, SP),
    (4, {"strategy": "optim_grads_params", "tp": 2, "pp": 2}, SP),
    (2, {"strategy": "optim", "cp": 2}, {"cp_comm_type": "allgather"}),
    (2, {"strategy": "optim", "cp": 2}, {"cp_comm_type": "a2a"}),
    (2, {"strategy": "optim", "cp": 2}, {}),
    (2, {"strategy": "optim_grads", "tp": 2}, SP),
    (2, {"strategy": "no_shard", "pp": 2}, {"pipeline_schedule": "zb-h1"}),
    (2, {"strategy": "optim_grads_params"}, {}),
]
LAYOUTS: list[Row] = [
    (name, ranks, sizes | (EP if ranks == 4 and "num_experts" in model else {}), options)
    for name, model in MODELS.items()
    for ranks, sizes, options in EVERY
]
MODELS |= {"four layers": {"num_layers": 4}}
LAYOUTS += [
    ("four layers", 4, {"strategy": "optim", "pp": 2}, VPP | {"pipeline_model_parallel_layout": "E|tt|tt|L"}),
    ("four layers", 2, {"strategy": "optim_grads_params", "pp": 2}, {"pipeline_model_parallel_layout": "Ettt|tL"}),
]


@pytest.mark.parametrize("row", LAYOUTS, ids=str)
def test_a_feature_trains_as_on_one_rank(row: Row) -> None:
    assert_row_trains_as_one_rank(row, MODELS)
