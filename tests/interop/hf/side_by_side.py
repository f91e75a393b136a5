"""Tiny configurations of families with attention beside the MLP, or with norms without bias."""

from typing import Any

from tests.model.building import VOCAB

SMALL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
NEOX_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "vocab_size": VOCAB,
}
LLAMA_SHAPE = NEOX_SHAPE | {"num_key_value_heads": 2}
NEW_FALCON = {"ffn_hidden_size": 48, "new_decoder_architecture": True, "num_kv_heads": 2}
# attention beside the MLP, norms without bias or weights
SIDE_BY_SIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_neox": (
        "GPTNeoX",
        NEOX_SHAPE
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}
            | {"partial_rotary_factor": 0.25}
        },
    ),
    "gpt_neox-one_by_one": (
        "GPTNeoX",
        NEOX_SHAPE
        | {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new"}
        | {"tie_word_embeddings": True},
    ),
    "gptj": (
        "GPTJ",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": VOCAB}
        | SMALL_TOKENS
        | {"rotary_dim": 4},
    ),
    "phi": ("Phi", LLAMA_SHAPE | SMALL_TOKENS),
    "phi-norms": (
        "Phi",
        LLAMA_SHAPE
        | SMALL_TOKENS
        | {"qk_layernorm": True, "tie_word_embeddings": True, "partial_rotary_factor": 1.0},
    ),
    "falcon": ("Falcon", NEOX_SHAPE | {"ffn_hidden_size": 48}),
    "falcon-new": (
        "Falcon",
        NEOX_SHAPE | NEW_FALCON | {"bias": True, "tie_word_embeddings": False},
    ),
    "falcon-new-one_norm": ("Falcon", NEOX_SHAPE | NEW_FALCON | {"num_ln_in_parallel_attn": 1}),
    "stablelm": ("StableLm", LLAMA_SHAPE | SMALL_TOKENS | {"use_qkv_bias": True}),
    "stablelm-parallel": (
        "StableLm",
        LLAMA_SHAPE | SMALL_TOKENS | {"use_parallel_residual": True, "tie_word_embeddings": True},
    ),
    "cohere": ("Cohere", LLAMA_SHAPE | SMALL_TOKENS),
    "cohere-untied": (
        "Cohere",
        LLAMA_SHAPE | SMALL_TOKENS | {"tie_word_embeddings": False, "logit_scale": 0.25},
    ),
    "cohere2": (
        "Cohere2",
        LLAMA_SHAPE
        | SMALL_TOKENS
        | {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "olmo": ("Olmo", LLAMA_SHAPE | SMALL_TOKENS),
}
# names of transformers' packages
SIDE_BY_SIDE_IN_FP64 = {name: name.partition("-")[0] for name in SIDE_BY_SIDE}
