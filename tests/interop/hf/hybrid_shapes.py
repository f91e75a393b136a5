"""Entries of config.json of small models whose layers differ: linear attention, windows, chunks,
two blocks.
"""

from tests.model.building import VOCAB

NEMOTRON_H = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "ssm_state_size": 6,
    "chunk_size": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 4,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
    "time_step_min": 0.05,
}

GRANITE = {
    "mamba_n_heads": 8,
    "mamba_chunk_size": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "shared_intermediate_size": 40,
    "embedding_multiplier": 12.0,
    "logits_scaling": 6.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
}

FALCON_H1 = {
    "mamba_d_ssm": 48,
    "mamba_n_heads": 6,
    "mamba_chunk_size": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 6,
    "embedding_multiplier": 5.0,
    "lm_head_multiplier": 0.3,
    "mlp_multipliers": [0.8, 1.3],
    "key_multiplier": 0.7,
    "attention_in_multiplier": 2.0,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.875, 1.25, 0.75, 1.125, 1.5],
    "ssm_in_multiplier": 0.5,
    "ssm_out_multiplier": 0.6,
}

LFM2_MOE = {
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "num_dense_layers": 1,
    "routed_scaling_factor": 2.5,
}

HYBRID = ["linear_attention", "full_attention", "linear_attention"]
MIMO = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "v_head_dim": 16,
    "sliding_window": 7,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
}
MAMBA2 = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 6,
    "n_groups": 2,
    "vocab_size": VOCAB,
}
DELTA_NET = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
SHARED_EXPERT = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "num_experts_per_tok": 2,
}
QWEN3_NEXT = DELTA_NET | SHARED_EXPERT | {"head_dim": 16, "num_experts": 4}
KIMI_LINEAR = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_key_value_heads": 4,
    "linear_num_heads": 4,
    "linear_head_dim": 8,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 2,
}
# Widths of queries, keys and values are equal: transformers saves convolutions in three equal
# parts.
OLMO_HYBRID = DELTA_NET | {"linear_num_value_heads": 2, "linear_value_head_dim": 8}

LLAMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 7,
    "attn_scale": 0.4,
    "floor_scale": 5,
}
_LONGCAT = {
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 24,
    "num_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "moe_topk": 3,
}
LONGCAT = {
    "longcat_flash": _LONGCAT,
    "longcat_flash-tied": _LONGCAT
    | {"rms_norm_eps": 1e-6, "zero_expert_num": 0, "tie_word_embeddings": True},
}
GLM4_MOE = {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "attention_bias": True,
    "use_qk_norm": True,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
}

# every kind of attention and of experts; windows of tokens that end inside of a sequence
DEEPSEEK_V4 = {
    "hidden_size": 32,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 12,
    "layer_types": [
        "sliding_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "swiglu_limit": 1.0,
    "sliding_window": 6,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 5,
    # so many index heads that no score is exactly 0
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 5,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 128,
    "vocab_size": 131,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
