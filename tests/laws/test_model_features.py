"""Law L1 for features of the model, and for stages of any lengths: every layout computes what one rank computes."""

from typing import Any

import pytest

from tests.laws.compare import Row, assert_row_trains_as_one_rank

YARN = {
    "position_embedding_type": "yarn",
    "rotary_scaling_factor": 3.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 4.0,
    "mscale_all_dim": 0.5,
}
MODELS: dict[str, dict[str, Any]] = {
    "window": {"num_layers": 3, "window_size": 5, "window_attn_skip_freq": "2"},
    "four layers": {"num_layers": 4},
    "yarn, squared ReLU": YARN | {"kv_channels": 16, "rotary_percent": 0.5, "activation": "squared_relu"},
    "yarn with MLA, experts in turn": YARN
    | {
        "num_query_groups": None,
        "multi_latent_attention": True,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
        "activation": "quick_geglu",
        "num_experts": 4,
        "moe_ffn_hidden_size": 24,
        "moe_router_force_load_balancing": True,
    },
}
OLMO = {
    "norm_placement": "post",
    "qk_layernorm": True,
    "qk_layernorm_across_heads": True,
    "num_query_groups": 1,  # replicated over tp
    "window_size": 5,
    "window_attn_skip_freq": "2",
    "rotary_base_local": 100.0,
}
GEMMA = {
    "norm_placement": "sandwich",
    "apply_layernorm_1p": True,
    "qk_layernorm": True,
    "activation": "geglu_tanh",
    "scale_embeddings": True,
    "softmax_scale": 0.2,
    "final_logit_softcapping": 4.0,
    "rotary_seq_len_interpolation_factor": 2.0,
}
MODELS |= {"norms after, over all heads": OLMO, "norms on both sides, soft-capped logits": GEMMA}
DROPOUT = {"attention_dropout": 0.2, "hidden_dropout": 0.1, "softmax_type": "learnable"}
MLA = {name: value for name, value in MODELS["yarn with MLA, experts in turn"].items() if name not in YARN}
MODELS |= {
    "dropout, sinks": DROPOUT,
    "dropout, MLA": MLA | {"attention_dropout": 0.2, "hidden_dropout": 0.1},
    "off-by-one softmax": {"softmax_type": "off-by-one"},
    "soft-capped scores": {"attn_logit_softcapping": 0.5, "window_size": 5},
}
GPT_OSS = {
    "softmax_type": "learnable",
    "window_size": 5,
    "window_attn_skip_freq": "2",
    "activation": "quick_geglu",
    "glu_linear_offset": 1.0,
    "activation_func_clamp_value": 0.3,
    "add_bias_linear": True,
    "num_experts": 4,
    "moe_ffn_hidden_size": 24,
    "moe_aux_loss_coeff": [0.01],
}
MODELS |= {"gpt-oss": GPT_OSS}
VPP = {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2}
SP = {"sequence_parallel": True}
LAYOUTS: list[Row] = [
    ("window", 4, {"strategy": "optim_grads", "tp": 2, "cp": 2}, SP),
    ("window", 2, {"strategy": "optim", "cp": 2}, {"cp_comm_type": "allgather"}),
    ("window", 2, {"strategy": "optim", "cp": 2}, {"cp_comm_type": "a2a"}),
    ("yarn, squared ReLU", 4, {"strategy": "optim", "tp": 2, "cp": 2}, SP),
    ("yarn, squared ReLU", 4, {"strategy": "optim_grads_params", "pp": 2}, {"pipeline_schedule": "zb-h1"}),
    ("four layers", 4, {"strategy": "optim", "pp": 2}, VPP | {"pipeline_model_parallel_layout": "E|tt|tt|L"}),
    ("four layers", 2, {"strategy": "optim_grads_params", "pp": 2}, {"pipeline_model_parallel_layout": "Ettt|tL"}),
    ("norms after, over all heads", 4, {"strategy": "optim", "tp": 2, "cp": 2}, SP),
    ("norms on both sides, soft-capped logits", 4, {"strategy": "optim_grads_params", "tp": 2, "pp": 2}, SP),
    ("dropout, sinks", 4, {"strategy": "optim", "tp": 2, "cp": 2}, SP),
    ("dropout, sinks", 4, {"strategy": "optim_grads_params", "pp": 2, "tp": 2}, {"pipeline_schedule": "zb-h1"}),
    ("dropout, sinks", 2, {"strategy": "optim", "cp": 2}, {"cp_comm_type": "a2a"}),
    ("dropout, MLA", 4, {"strategy": "optim", "tp": 2, "cp": 2, "etp": 1, "ep": 2}, {"cp_comm_type": "allgather"}),
    ("off-by-one softmax", 2, {"strategy": "optim", "tp": 2}, SP),
    ("off-by-one softmax", 2, {"strategy": "optim_grads", "cp": 2}, {}),
    ("soft-capped scores", 2, {"strategy": "optim", "cp": 2}, {}),
    ("gpt-oss", 4, {"strategy": "optim", "tp": 2, "cp": 2, "etp": 2, "ep": 2}, SP),
    ("gpt-oss", 4, {"strategy": "optim_grads_params", "tp": 2, "pp": 2, "etp": 1, "ep": 2}, {}),
    ("yarn with MLA, experts in turn", 4, {"strategy": "optim", "tp": 2, "cp": 2, "etp": 1, "ep": 2}, {}),
]


@pytest.mark.parametrize("row", LAYOUTS, ids=str)
def test_a_feature_trains_as_on_one_rank(row: Row) -> None:
    assert_row_trains_as_one_rank(row, MODELS)
