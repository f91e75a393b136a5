"""Small models of Gemma 4: dense, with values that are keys, with experts, with inputs of layers."""

from typing import Any

from tests.model.building import VOCAB

GEMMA4: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
    "num_hidden_layers": 4,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "final_logit_softcapping": 5.0,
    "hidden_size_per_layer_input": 0,
    "pad_token_id": None,
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("Gemma4", GEMMA4),
    "gemma4-keys": (
        "Gemma4",
        GEMMA4
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "tie_word_embeddings": False},
    ),
    "gemma4-experts": (
        "Gemma4",
        GEMMA4
        | {
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "attention_k_eq_v": True,
        },
    ),
    "gemma4-inputs": (
        "Gemma4",
        GEMMA4
        | {
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": VOCAB,
        },
    ),
}
