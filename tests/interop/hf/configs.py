"""Tiny configurations of every family, by names of tests."""

from typing import Any

from tests.interop.hf import gemma4_shapes, hybrid_shapes
from tests.interop.hf.llama_like import LLAMA_LIKE, MODELING
from tests.interop.hf.side_by_side import SIDE_BY_SIDE, SIDE_BY_SIDE_IN_FP64
from tests.model.building import VOCAB

LLAMA_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 5e5}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
GPT2_SHAPE = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCAB}
SMALL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
GPT2_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}

QWEN3_EXPERTS = {"moe_intermediate_size": 24, "head_dim": 16}

DEEPSEEK_V3 = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}
# so many index heads that no score is exactly 0, among which every library has an order of its own
INDEXER = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 6}
GLM5 = {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5}
GLM5 |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}

SIGMOID_ROUTER = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
}

QUERY_SCALING = YARN | {"llama_4_scaling_beta": 0.5}
ALPHA = {
    "head_dim": 16,
    "rope_parameters": {"rope_type": "dynamic", "alpha": 9.0, "factor": 1.0, "rope_theta": 10000.0},
}
FACTORS = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.5,
}

LAYERED = ["sliding_attention", "full_attention"]
GEMMA3 = {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16}

GPT_OSS = {
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 7,
    "swiglu_limit": 0.4,
}

MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (
        "Mixtral",
        LLAMA_SHAPE | {"num_local_experts": 4, "rope_parameters": {"rope_theta": 5e5}},
    ),
    "mixtral-window": ("Mixtral", LLAMA_SHAPE | {"num_local_experts": 4, "sliding_window": 9}),
    "mixtral-tied": (
        "Mixtral",
        LLAMA_SHAPE | {"num_local_experts": 6, "tie_word_embeddings": True, "head_dim": 16},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        LLAMA_SHAPE
        | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
        | {"num_experts": 6, "num_experts_per_tok": 3, "mlp_only_layers": [1]},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        LLAMA_SHAPE
        | QWEN3_EXPERTS
        | {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
    ),
    "qwen3_moe-dense-layer": (
        "Qwen3Moe",
        LLAMA_SHAPE
        | QWEN3_EXPERTS
        | {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
    ),
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2_SHAPE | GPT2_DROPOUT),
    "gpt2-untied-gelu": (
        "GPT2",
        GPT2_SHAPE
        | GPT2_DROPOUT
        | {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 80},
    ),
    "llama": ("Llama", LLAMA_SHAPE),
    "llama-tied": ("Llama", LLAMA_SHAPE | {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama-biased": ("Llama", LLAMA_SHAPE | {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("Llama", LLAMA_SHAPE | {"rope_parameters": LLAMA3_ROPE, "num_key_value_heads": 1}),
    "llama-yarn": ("Llama", LLAMA_SHAPE | {"rope_parameters": YARN, "head_dim": 32}),
    "qwen2": ("Qwen2", LLAMA_SHAPE),
    "qwen2-tied": ("Qwen2", LLAMA_SHAPE | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", LLAMA_SHAPE | {"head_dim": 16}),
    "qwen3-tied": ("Qwen3", LLAMA_SHAPE | {"head_dim": 16, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", LLAMA_SHAPE | SMALL_TOKENS | {"no_rope_layer_interval": 2}),
    "smollm3-untied": (
        "SmolLM3",
        LLAMA_SHAPE | SMALL_TOKENS | {"no_rope_layers": [0, 1], "tie_word_embeddings": False},
    ),
    "mistral": ("Mistral", LLAMA_SHAPE | {"head_dim": 16, "sliding_window": None}),
    "mistral-window": ("Mistral", LLAMA_SHAPE | {"sliding_window": 7}),
    "phi3": ("Phi3", LLAMA_SHAPE | SMALL_TOKENS | {"partial_rotary_factor": 0.5}),
    "phi3-whole-heads": ("Phi3", LLAMA_SHAPE | SMALL_TOKENS | {"tie_word_embeddings": True}),
    "deepseek_v3": ("DeepseekV3", LLAMA_SHAPE | DEEPSEEK_V3),
    "deepseek_v3-direct": (
        "DeepseekV3",
        LLAMA_SHAPE | DEEPSEEK_V3 | {"q_lora_rank": None, "rope_parameters": None},
    ),
    "deepseek_v32": (
        "DeepseekV32",
        LLAMA_SHAPE | DEEPSEEK_V3 | INDEXER | {"rope_parameters": None},
    ),
    "deepseek_v32-yarn": ("DeepseekV32", LLAMA_SHAPE | DEEPSEEK_V3 | INDEXER),
    "glm_moe_dsa": ("GlmMoeDsa", LLAMA_SHAPE | DEEPSEEK_V3 | INDEXER | GLM5),
    "glm_moe_dsa-shared": (  # GLM-5.2: two layers of four have no indexer
        "GlmMoeDsa",
        LLAMA_SHAPE
        | DEEPSEEK_V3
        | INDEXER
        | GLM5
        | {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
    "glm4_moe": ("Glm4Moe", LLAMA_SHAPE | hybrid_shapes.GLM4_MOE),
    "glm4_moe-plain": (
        "Glm4Moe",
        LLAMA_SHAPE | hybrid_shapes.GLM4_MOE | {"use_qk_norm": False, "attention_bias": False},
    ),
    "olmo2": ("Olmo2", LLAMA_SHAPE | SMALL_TOKENS | {"num_key_value_heads": 2}),
    "olmo3": ("Olmo3", LLAMA_SHAPE | SMALL_TOKENS | {"num_hidden_layers": 4, "sliding_window": 6}),
    "olmo3-yarn": (
        "Olmo3",
        LLAMA_SHAPE
        | SMALL_TOKENS
        | {
            "sliding_window": 6,
            "layer_types": LAYERED,
            "rope_parameters": {"full_attention": YARN},
        },
    ),
    "gpt_oss": ("GptOss", LLAMA_SHAPE | SMALL_TOKENS | GPT_OSS),
    "gpt_oss-unscaled": (
        "GptOss",
        LLAMA_SHAPE | SMALL_TOKENS | GPT_OSS | {"rope_parameters": PLAIN_ROPE},
    ),
    **gemma4_shapes.CONFIGS,
    "gemma3": ("Gemma3", LLAMA_SHAPE | GEMMA3 | {"layer_types": LAYERED}),
    "gemma3-linear": (
        "Gemma3",
        LLAMA_SHAPE
        | GEMMA3
        | {
            "layer_types": LAYERED,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
            },
            "tie_word_embeddings": False,
        },
    ),
    "nemotron_h": ("NemotronH", hybrid_shapes.NEMOTRON_H | {"hybrid_override_pattern": "ME*-ME"}),
    "nemotron_h-latent": (
        "NemotronH",
        hybrid_shapes.NEMOTRON_H | {"hybrid_override_pattern": "E*", "moe_latent_size": 20},
    ),
    "nemotron_h-dense": (
        "NemotronH",
        hybrid_shapes.NEMOTRON_H | {"hybrid_override_pattern": "M*-"},
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        LLAMA_SHAPE
        | hybrid_shapes.GRANITE
        | {"num_local_experts": 6, "num_hidden_layers": 3, "layer_types": hybrid_shapes.HYBRID},
    ),
    "granitemoehybrid-dense": (
        "GraniteMoeHybrid",
        LLAMA_SHAPE
        | hybrid_shapes.GRANITE
        | {
            "num_local_experts": 0,
            "layer_types": hybrid_shapes.HYBRID[:2],
            "tie_word_embeddings": True,
        }
        | {"time_step_limit": (1.3, float("inf"))},
    ),
    "granitemoehybrid-attention": (
        "GraniteMoeHybrid",
        LLAMA_SHAPE
        | hybrid_shapes.GRANITE
        | {
            "num_local_experts": 0,
            "layer_types": ["full_attention"] * 2,
            "position_embedding_type": "rope",
        },
    ),
    "falcon_h1": ("FalconH1", LLAMA_SHAPE | SMALL_TOKENS | hybrid_shapes.FALCON_H1),
    "falcon_h1-norm": (
        "FalconH1",
        LLAMA_SHAPE
        | SMALL_TOKENS
        | hybrid_shapes.FALCON_H1
        | {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "time_step_limit": (1.3, float("inf")),
        },
    ),
    "lfm2": ("Lfm2", LLAMA_SHAPE | SMALL_TOKENS | {"full_attn_idxs": [1], "block_multiple_of": 16}),
    "lfm2_moe": ("Lfm2Moe", LLAMA_SHAPE | SMALL_TOKENS | hybrid_shapes.LFM2_MOE),
    "mamba2": ("Mamba2", SMALL_TOKENS | hybrid_shapes.MAMBA2),
    "qwen3_next": ("Qwen3Next", LLAMA_SHAPE | hybrid_shapes.QWEN3_NEXT | {"mlp_only_layers": [1]}),
    "qwen3_5": ("Qwen3_5", LLAMA_SHAPE | hybrid_shapes.DELTA_NET | {"head_dim": 16}),
    "qwen3_5-tied": (
        "Qwen3_5",
        LLAMA_SHAPE
        | hybrid_shapes.DELTA_NET
        | {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2}
        | {
            "rope_parameters": {
                "rope_theta": 1e6,
                "partial_rotary_factor": 0.5,
                "rope_type": "default",
            }
        }
        | {"head_dim": 16, "tie_word_embeddings": True},
    ),
    "qwen3_5_moe": ("Qwen3_5Moe", LLAMA_SHAPE | hybrid_shapes.QWEN3_NEXT),
    "olmo_hybrid": (
        "OlmoHybrid",
        LLAMA_SHAPE
        | SMALL_TOKENS
        | hybrid_shapes.OLMO_HYBRID
        | {"rope_parameters": {"rope_type": None, "rope_theta": None}},
    ),
    "olmo_hybrid-rotary": (
        "OlmoHybrid",
        LLAMA_SHAPE
        | SMALL_TOKENS
        | hybrid_shapes.OLMO_HYBRID
        | {
            "linear_allow_neg_eigval": False,
            "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
        },
    ),
    "kimi_linear": ("KimiLinear", LLAMA_SHAPE | SMALL_TOKENS | hybrid_shapes.KIMI_LINEAR),
    **MIXTURES,
    "seed_oss": ("SeedOss", LLAMA_SHAPE | SMALL_TOKENS | {"head_dim": 16, "attention_bias": True}),
    "arcee": ("Arcee", LLAMA_SHAPE | SMALL_TOKENS),
    "cwm": ("Cwm", LLAMA_SHAPE | SMALL_TOKENS | {"sliding_window": 7, "head_dim": 16}),
    "flex_olmo": (
        "FlexOlmo",
        LLAMA_SHAPE | SMALL_TOKENS | {"num_experts": 4, "num_experts_per_tok": 2},
    ),
    "minimax_m2": (
        "MiniMaxM2",
        LLAMA_SHAPE
        | SMALL_TOKENS
        | {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "dots1": (
        "Dots1",
        LLAMA_SHAPE
        | SIGMOID_ROUTER
        | {"head_dim": 16, "first_k_dense_replace": 1, "norm_topk_prob": True},
    ),
    "solar_open": (
        "SolarOpen",
        LLAMA_SHAPE | SIGMOID_ROUTER | {"head_dim": 16, "attention_bias": True},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        LLAMA_SHAPE
        | DEEPSEEK_V3
        | {"rope_parameters": None, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "moonlight": (
        "DeepseekV3",
        LLAMA_SHAPE | DEEPSEEK_V3 | {"rms_norm_eps": 0.1, "n_group": 1, "topk_group": 1},
    ),
    "ministral3": (
        "Ministral3",
        LLAMA_SHAPE | SMALL_TOKENS | {"head_dim": 16, "rope_parameters": QUERY_SCALING},
    ),
    "mistral4": (
        "Mistral4",
        LLAMA_SHAPE
        | SMALL_TOKENS
        | DEEPSEEK_V3
        | {"n_group": 1, "topk_group": 1, "rms_norm_eps": 0.1}
        | {"rope_parameters": QUERY_SCALING | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "ernie4_5": ("Ernie4_5", LLAMA_SHAPE | SMALL_TOKENS | {"head_dim": 16}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        LLAMA_SHAPE
        | SMALL_TOKENS
        | {"moe_intermediate_size": 24, "moe_num_experts": 4, "moe_k": 2},
    ),
    "granite": ("Granite", LLAMA_SHAPE | SMALL_TOKENS | FACTORS),
    "granitemoe": ("GraniteMoe", LLAMA_SHAPE | SMALL_TOKENS | FACTORS | {"num_local_experts": 4}),
    "deepseek_v2": (
        "DeepseekV2",
        LLAMA_SHAPE
        | DEEPSEEK_V3
        | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1},
    ),
    **{
        name: ("LongcatFlash", SMALL_TOKENS | fields)
        for name, fields in hybrid_shapes.LONGCAT.items()
    },
    "gemma": ("Gemma", LLAMA_SHAPE | SMALL_TOKENS | {"head_dim": 16}),
    "gemma2": (
        "Gemma2",
        LLAMA_SHAPE
        | SMALL_TOKENS
        | {"head_dim": 16, "sliding_window": 7, "attn_logit_softcapping": 0.5},
    ),
    "glm": ("Glm", LLAMA_SHAPE | SMALL_TOKENS | {"head_dim": 16}),
    "glm4": ("Glm4", LLAMA_SHAPE | SMALL_TOKENS | {"head_dim": 16}),
    "olmoe": ("Olmoe", LLAMA_SHAPE | SMALL_TOKENS | {"num_experts": 4, "num_experts_per_tok": 2}),
    "exaone4": (
        "Exaone4",
        LLAMA_SHAPE | SMALL_TOKENS | {"sliding_window": 7, "sliding_window_pattern": 2},
    ),
    "hunyuan_v1_dense": ("HunYuanDenseV1", LLAMA_SHAPE | SMALL_TOKENS | ALPHA),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        LLAMA_SHAPE | SMALL_TOKENS | ALPHA | {"num_experts": 4, "moe_topk": [2, 2]},
    ),
    "exaone_moe": (
        "ExaoneMoe",
        LLAMA_SHAPE
        | SMALL_TOKENS
        | {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": 7, "sliding_window_pattern": 2}
        | {
            "moe_intermediate_size": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
        },
    ),
    "apertus": ("Apertus", LLAMA_SHAPE | SMALL_TOKENS | {"rope_parameters": PLAIN_ROPE}),
    "apertus-scaled": (
        "Apertus",
        LLAMA_SHAPE | SMALL_TOKENS | {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    "nanochat": ("NanoChat", LLAMA_SHAPE | SMALL_TOKENS),
    "mimo_v2_flash": ("MiMoV2Flash", LLAMA_SHAPE | SMALL_TOKENS | hybrid_shapes.MIMO),
    "mimo_v2_flash-alone": (
        "MiMoV2Flash",
        LLAMA_SHAPE
        | SMALL_TOKENS
        | hybrid_shapes.MIMO
        | {"layer_types": LAYERED, "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}
        | {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "nanochat-tied": (
        "NanoChat",
        LLAMA_SHAPE
        | SMALL_TOKENS
        | {"final_logit_softcapping": 2.0, "rms_norm_eps": 1e-3, "tie_word_embeddings": True},
    ),
    "llama4": ("Llama4", LLAMA_SHAPE | SMALL_TOKENS | hybrid_shapes.LLAMA4),
    "llama4-scaled": (
        "Llama4",
        LLAMA_SHAPE | SMALL_TOKENS | hybrid_shapes.LLAMA4 | {"rope_parameters": LLAMA3_ROPE},
    ),
    "llama4-plain": (
        "Llama4",
        LLAMA_SHAPE
        | SMALL_TOKENS
        | hybrid_shapes.LLAMA4
        | {"interleave_moe_layer_step": 1, "use_qk_norm": False, "attn_temperature_tuning": False}
        | {"no_rope_layers": [0, 1, 1, 0], "tie_word_embeddings": True},
    ),
    "llama4-by-lists": (
        "Llama4",
        LLAMA_SHAPE
        | SMALL_TOKENS
        | hybrid_shapes.LLAMA4
        | {"moe_layers": [1, 2], "layer_types": ["chunked_attention", *3 * ["full_attention"]]},
    ),
}
CONFIGS |= {
    name: (family, LLAMA_SHAPE | SMALL_TOKENS | fields)
    for name, (family, fields) in LLAMA_LIKE.items()
}
CONFIGS |= SIDE_BY_SIDE
CONFIGS |= {
    "deepseek_v4": ("DeepseekV4", hybrid_shapes.DEEPSEEK_V4),
    "deepseek_v4-yarn": (
        "DeepseekV4",
        hybrid_shapes.DEEPSEEK_V4
        | {"rope_parameters": YARN, "tie_word_embeddings": True, "layer_types": None}
        | {"mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]},
    ),
}
EXPERT_BIASES = ("e_score_correction_bias", "feed_forward.expert_bias")
# Models that are compared in fp64, and the package of transformers that has them.
FP64_FAMILIES = (
    "nemotron_h",
    "granitemoehybrid",
    "falcon_h1",
    "mamba2",
    "lfm2",
    "qwen3_next",
    "qwen3_5",
    "olmo_hybrid",
    "kimi_linear",
    "nanochat",
    "mimo_v2_flash",
    "longcat_flash",
    "deepseek_v4",
)
IN_FP64 = {name: name.partition("-")[0] for name in CONFIGS if name.startswith(FP64_FAMILIES)}
# not with YaRN, whose angles are in fp32
IN_FP64 |= {name: name for name in ("deepseek_v32", "glm_moe_dsa")}
IN_FP64 |= {"glm_moe_dsa-shared": "glm_moe_dsa"}
IN_FP64 |= {"apertus": "apertus"}  # alike with the scaling of Llama 3
IN_FP64 |= dict.fromkeys(("llama4", "llama4-plain", "llama4-by-lists"), "llama4")
for name in LLAMA_LIKE:
    package = name.partition("-")[0]
    IN_FP64[name] = MODELING.get(package, package)
IN_FP64 |= SIDE_BY_SIDE_IN_FP64
CONFIG_CLASSES = {
    "Gemma3": "Gemma3TextConfig",
    "Qwen3_5": "Qwen3_5TextConfig",
    "Qwen3_5Moe": "Qwen3_5MoeTextConfig",
}
IN_FP64 |= dict.fromkeys((name for name in CONFIGS if name.startswith("gemma4")), "gemma4")
CONFIG_CLASSES |= {"Gemma4": "Gemma4TextConfig"}
CONFIG_CLASSES |= {"Llama4": "Llama4TextConfig", "MiniMaxM3VL": "MiniMaxM3VLTextConfig"}
