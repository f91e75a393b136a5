"""Law L1 for a model shaped like DeepSeek-V3: MLA, a dense first layer, expert bias, group-limited
top-k.
"""

import pytest

from tests.laws.compare import Row, assert_row_trains_as_one_rank

MLA = {
    "num_query_groups": None,
    "multi_latent_attention": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}
DEEPSEEK = MLA | {
    "num_layers": 4,
    "untie_embeddings_and_output_weights": True,
    "num_experts": 4,
    "moe_layer_freq": "[0]*1+[1]*3",
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_topk": 2,
    "moe_router_score_function": "sigmoid",
    "moe_router_topk_scaling_factor": 2.5,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_router_enable_expert_bias": True,
    "moe_aux_loss_coeff": 1e-2,
}
# Dense, without q_lora_rank, with LayerNorms of the compressed keys and values.
DIRECT = {
    name: value for name, value in DEEPSEEK.items() if not name.startswith(("num_experts", "moe_"))
} | {
    "q_lora_rank": None,
    "normalization": "LayerNorm",
    "untie_embeddings_and_output_weights": False,
    "compressed_norm_epsilon": 1e-2,
    "mla_scale_lora": True,
}
# Megatron-LM's defaults: learned positions besides the rotary ones, and biases of MLP and output.
LEARNED = DIRECT | {"position_embedding_type": "learned_absolute", "add_bias_linear": True}
MODELS = {"deepseek": DEEPSEEK, "direct": DIRECT, "learned": LEARNED}

SP, ZB = {"sequence_parallel": True}, {"pipeline_schedule": "zb-h1"}
LAYOUTS: list[Row] = [
    ("direct", 2, {"strategy": "optim_grads", "tp": 2}, {}),
    ("deepseek", 2, {"strategy": "optim", "pp": 2}, ZB),
    ("deepseek", 2, {"strategy": "optim_grads", "cp": 2}, {}),
    ("deepseek", 4, {"strategy": "optim", "tp": 4, "etp": 1, "ep": 4}, SP),
    ("direct", 4, {"strategy": "optim", "tp": 2, "cp": 2}, SP | {"cp_comm_type": "a2a"}),
    ("deepseek", 4, {"strategy": "optim", "tp": 2, "pp": 2, "etp": 2}, SP | ZB),
    ("learned", 4, {"strategy": "optim", "tp": 2, "pp": 2}, SP),
    ("learned", 2, {"strategy": "optim_grads", "cp": 2}, {}),
    (
        "deepseek",
        4,
        {"strategy": "optim_grads", "tp": 2, "etp": 1, "ep": 2},
        {"overlap_grad_reduce": True},
    ),
]


@pytest.mark.parametrize("row", LAYOUTS, ids=str)
def test_an_mla_model_trains_as_on_one_rank(row: Row) -> None:
    assert_row_trains_as_one_rank(row, MODELS)
