"""Tiny configurations of families whose config.json has the entries of Llama: the class of
transformers, and what they have besides `LLAMA_SHAPE`. All are compared in fp64.
"""

from typing import Any

from tests.interop.hf.hybrid_shapes import DELTA_NET, GRANITE

KINDS = ["full_attention", "sliding_attention", "sliding_attention"]
THREE = {"num_hidden_layers": 3, "sliding_window": 7, "layer_types": KINDS}
FACTORS = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
ROUTED = {"moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2}
SPARSE = ["dense", "sparse", "sparse"]
BASES = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
SHARES = {  # a scaled base of some channels, and a plain one of others
    "full_attention": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "partial_rotary_factor": 0.5,
    },
    "sliding_attention": {"rope_theta": 100.0, "partial_rotary_factor": 0.25},
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.25, 1.5, 2.0],
    "long_factor": [1.0, 2.0, 3.5, 6.0],
    "original_max_position_embeddings": 16,
}
MAMBA = {
    name: value
    for name, value in GRANITE.items()
    if name.startswith("mamba_") and name not in ("mamba_d_head", "mamba_expand")
}

LLAMA_LIKE: dict[str, tuple[str, dict[str, Any]]] = {
    "exaone": ("Exaone", {}),
    "internlm3": ("InternLM3", {"head_dim": 16, "qkv_bias": True, "bias": True}),
    "iquestcoder": ("IQuestCoder", {"head_dim": 8}),
    "sarvam_mla": ("SarvamMLA", MLA | ROUTED | {"q_lora_rank": None, "n_shared_experts": 2}),
    "sarvam_moe": (
        "SarvamMoE",
        ROUTED | {"head_dim": 16, "n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "helium": ("Helium", {"head_dim": 8, "attention_bias": True}),
    "ministral": ("Ministral", THREE | {"head_dim": 8}),
    "starcoder2": ("Starcoder2", {"sliding_window": 7}),
    "starcoder2-plain": ("Starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "nemotron": ("Nemotron", {"head_dim": 16}),
    "nemotron-biased": (
        "Nemotron",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "jais2": ("Jais2", {}),
    "vaultgemma": (
        "VaultGemma",
        {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 24},
    ),
    "youtu": ("Youtu", MLA),
    "granitemoeshared": (
        "GraniteMoeShared",
        FACTORS | {"num_local_experts": 4, "shared_intermediate_size": 40},
    ),
    "granite_swa": ("GraniteSWA", FACTORS | THREE | {"layer_rope_theta": [0, 1e4, 1e4]}),
    "granite_swa-bases": ("GraniteSWA", FACTORS | THREE | {"layer_rope_theta": [5e5, 100.0, 0]}),
    "granitemoe_swa": ("GraniteMoeSWA", FACTORS | THREE | {"num_local_experts": 4}),
    "hy_v3": (
        "HYV3",
        EXPERTS | {"num_hidden_layers": 3, "head_dim": 16, "num_shared_experts": 2},
    ),
    "afmoe": (
        "Afmoe",
        EXPERTS | THREE | {"head_dim": 16, "num_shared_experts": 2, "route_scale": 2.5},
    ),
    "afmoe-scaled": (  # by 8, which fp32 holds
        "Afmoe",
        EXPERTS | THREE | {"num_dense_layers": 2, "mup_enabled": True, "hidden_size": 64},
    ),
    "minimax_m3_vl_text": (
        "MiniMaxM3VL",
        {
            "num_hidden_layers": 3,
            "head_dim": 16,
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 40,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 2,
            "index_n_heads": 2,
            "index_head_dim": 20,
            "index_block_size": 4,
            "index_topk_blocks": 2,
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            "mlp_layer_types": SPARSE,
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "mellum": (
        "Mellum",
        EXPERTS | THREE | {"mlp_layer_types": SPARSE, "rope_parameters": BASES},
    ),
    "flint": (
        "Flint",
        EXPERTS
        | THREE
        | {"head_dim": 16, "mlp_only_layers": [0], "shared_expert_intermediate_size": 40},
    ),
    "laguna": (
        "Laguna",
        EXPERTS
        | THREE
        | {"head_dim": 8, "num_attention_heads_per_layer": [4, 8, 8], "mlp_layer_types": SPARSE}
        | {"shared_expert_intermediate_size": 40, "moe_routed_scaling_factor": 2.5},
    ),
    "laguna-yarn": (
        "Laguna",
        EXPERTS
        | THREE
        | {"head_dim": 16, "gating": "per-element", "rope_parameters": SHARES}
        | {"shared_expert_intermediate_size": 24, "tie_word_embeddings": True},
    ),
    "bailing_hybrid": (
        "BailingHybrid",
        MLA
        | {"num_hidden_layers": 3, "layer_group_size": 2, "first_k_dense_replace": 1, "head_dim": 6}
        | {"num_local_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
        | {"moe_intermediate_size": 24, "q_lora_rank": None},
    ),
    "bailing_hybrid-unbounded": (
        "BailingHybrid",
        MLA
        | {"layer_types": ["full_attention", "linear_attention"], "head_dim": 8}
        | {"mlp_layer_types": ["sparse", "dense"], "n_shared_experts": 2}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        | {"moe_intermediate_size": 24, "kda_safe_gate": False, "short_conv_kernel_size": 3},
    ),
    "bamba": (
        "Bamba",
        MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1], "head_dim": 8},
    ),
    "persimmon": ("Persimmon", {"num_key_value_heads": None}),
    "persimmon-plain": (
        "Persimmon",
        {"num_key_value_heads": None, "qk_layernorm": False, "partial_rotary_factor": 1.0},
    ),
    "gpt_bigcode": (
        "GPTBigCode",
        {"num_key_value_heads": 1, "n_inner": 80, "max_position_embeddings": 128},
    ),
    "aria_text": ("AriaText", {"moe_num_experts": 4, "moe_topk": 2}),
    "lara_mini": (
        "LaraMini",
        EXPERTS
        | DELTA_NET
        | {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 7}
        | {"shared_expert_intermediate_size": 40}
        | {"layer_types": ["linear_attention", *KINDS[:2], "linear_attention"]},
    ),
    "hyperclovax": ("HyperCLOVAX", FACTORS),
    "hyperclovax-pre": ("HyperCLOVAX", FACTORS | {"use_post_norm": False}),
    "lfm3": (
        "Lfm3",
        {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 7, "conv_L_cache": 3}
        | {"layer_types": ["conv", "sliding_attention", "full_attention", "conv"]},
    ),
    "lfm3-plain": (
        "Lfm3",
        {"head_dim": 8, "conv_L_cache": 3, "layer_types": ["conv", "full_attention"]}
        | {"use_sandwich_norm": False, "use_attention_gate": False, "rope_parameters": BASES},
    ),
    "apertus1p5_text": ("Apertus1p5Text", {"rope_parameters": BASES["full_attention"]}),
    "cohere_compass_text": (
        "CohereCompassText",
        THREE | {"rope_parameters": BASES | {"full_attention": None}, "logit_scale": 0.25},
    ),
    "cohere_compass_text-bases": (
        "CohereCompassText",
        THREE | {"rope_parameters": BASES, "tie_word_embeddings": False},
    ),
    "codegen": (
        "CodeGen",
        {"num_key_value_heads": None, "num_attention_heads": 8, "hidden_size": 64}
        | {"rotary_dim": 4, "n_inner": 48, "max_position_embeddings": 128},
    ),
    "gpt_neo": (
        "GPTNeo",
        {"num_key_value_heads": None, "max_position_embeddings": 128, "window_size": 7}
        | {"attention_types": [[["global", "local"], 1]]},
    ),
    "opt": (
        "OPT",
        {"num_key_value_heads": None, "max_position_embeddings": 128, "ffn_dim": 48},
    ),
    "opt-plain": (
        "OPT",
        {"num_key_value_heads": None, "max_position_embeddings": 128, "ffn_dim": 48}
        | {"enable_bias": False, "activation_function": "gelu", "tie_word_embeddings": False},
    ),
    "biogpt": (  # embeddings times 8, which fp32 holds
        "BioGpt",
        {"num_key_value_heads": None, "max_position_embeddings": 128, "hidden_size": 64},
    ),
    "axk1": (
        "AXK1",
        MLA
        | ROUTED
        | {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
        | {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "cohere2_moe": (
        "Cohere2Moe",
        THREE
        | {"head_dim": 8, "num_experts": 4, "num_shared_experts": 2}
        | {"mlp_layer_types": SPARSE, "prefix_dense_intermediate_size": 40},
    ),
    "cohere2_moe-sigmoid": (
        "Cohere2Moe",
        THREE
        | {"head_dim": 8, "num_experts": 4, "num_shared_experts": 1, "rms_norm_eps": 1e-5}
        | {"shared_expert_combination_strategy": "sum", "expert_selection_fn": "sigmoid"},
    ),
    "minicpm3": ("MiniCPM3", MLA | {"dim_model_base": 16}),
    "minicpm3-untied": (
        "MiniCPM3",
        MLA | {"q_lora_rank": None, "dim_model_base": 32, "tie_word_embeddings": False},
    ),
    # longer than the original context, and as long
    "minicpm3-longrope": (
        "MiniCPM3",
        MLA | {"dim_model_base": 16, "rope_parameters": LONGROPE | {"rope_theta": 1e4}},
    ),
    "phi3-longrope": (
        "Phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
    ),
    "phi3-longrope-short": (
        "Phi3",
        {
            "rope_parameters": LONGROPE | {"attention_factor": 1.7},
            "original_max_position_embeddings": 96,
            "max_position_embeddings": 128,
        },
    ),
}
# The file of transformers that computes a family, where its name is not the family's.
MODELING = {
    "exaone": "llama",
    "internlm3": "llama",
    "iquestcoder": "llama",
    "sarvam_mla": "deepseek_v3",
    "sarvam_moe": "glm4_moe",
    "aria_text": "aria",
    "minimax_m3_vl_text": "minimax_m3_vl",
    "apertus1p5_text": "apertus1p5",
    "cohere_compass_text": "cohere_compass",
}
# Names of files for names in memory, where neither `layers` nor `other_layers` of a family has
# both.
IN_FILES = {
    "bailing_hybrid": {"model.embed_tokens": "model.word_embeddings"},
    "exaone": {
        "model.embed_tokens": "transformer.wte",
        "model.layers": "transformer.h",
        "model.norm": "transformer.ln_f",
        "self_attn.o_proj": "attn.attention.out_proj",
        "self_attn": "attn.attention",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "gate_proj": "c_fc_0",
        "up_proj": "c_fc_1",
        "down_proj": "c_proj",
    },
    "sarvam_moe": {"model.embed_tokens": "model.word_embeddings"},
    "nemotron_h": {"model.": "backbone."},
    "gpt_neox": {"lm_head.": "embed_out."},
}
# The class of a model, where its name is not that of its configuration.
ARCHITECTURES = {
    "CohereCompassText": "CohereCompassForCausalLM",
    "GPT2": "GPT2LMHeadModel",
    "Exaone": "LlamaForCausalLM",
    "InternLM3": "LlamaForCausalLM",
    "IQuestCoder": "LlamaForCausalLM",
    "SarvamMLA": "DeepseekV3ForCausalLM",
    "SarvamMoE": "Glm4MoeForCausalLM",
}
