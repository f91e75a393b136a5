"""GPT-2: config.json read and written, and the names of its tensors."""

from collections.abc import Mapping
from typing import Any

from nanotrain.config.config import Activation, ModelConfig, Normalization, PositionEmbedding
from nanotrain.interop.hf.naming import HFName, Naming
from nanotrain.interop.hf.reject import reject, require_values
from nanotrain.spec.shape import ModelShape

# Names of the activations in config.json.
ACTIVATIONS = {
    "gelu": Activation.gelu,
    "gelu_new": Activation.gelu_tanh,
    "gelu_pytorch_tanh": Activation.gelu_tanh,
    "gelu_fast": Activation.gelu_tanh,
}
REQUIRED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}


def read_gpt2(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the config.json of a GPT-2. Its dropout rates describe no weights and are ignored.

    Raises:
        HuggingFaceError: an unsupported feature.
    """
    activation = raw.get("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        reject("activation_function", activation, instead=f"one of {', '.join(ACTIVATIONS)}")
    require_values(raw, REQUIRED)
    return ModelConfig(
        num_layers=raw.get("n_layer", 12),
        hidden_size=raw.get("n_embd", 768),
        ffn_hidden_size=raw.get("n_inner") or 4 * raw.get("n_embd", 768),
        num_attention_heads=raw.get("n_head", 12),
        max_position_embeddings=raw.get("n_positions", raw.get("n_ctx", 1024)),
        vocab_size=raw.get("vocab_size", 50257),
        position_embedding_type=PositionEmbedding.learned_absolute,
        normalization=Normalization.LayerNorm,
        norm_epsilon=raw.get("layer_norm_epsilon", 1e-5),
        activation=ACTIVATIONS[activation],
        add_bias_linear=True,
        untie_embeddings_and_output_weights=not raw.get("tie_word_embeddings", True),
        init_method_std=raw.get("initializer_range", 0.02),
    )


def write_gpt2(model_config: ModelConfig) -> dict[str, Any]:
    """Write the config.json of a GPT-2; what it cannot represent is detected by reading it back."""
    return {
        "activation_function": "gelu" if model_config.activation is Activation.gelu else "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "initializer_range": model_config.init_method_std,
        "layer_norm_epsilon": model_config.norm_epsilon,
        "n_ctx": model_config.max_position_embeddings,
        "n_embd": model_config.hidden_size,
        "n_head": model_config.num_attention_heads,
        "n_inner": ModelShape.of(model_config).ffn_size,
        "n_layer": model_config.num_layers,
        "n_positions": model_config.max_position_embeddings,
        "resid_pdrop": 0.0,
        "tie_word_embeddings": not model_config.untie_embeddings_and_output_weights,
        "vocab_size": model_config.vocab_size,
    }


QKV = ("attention.query", "attention.key", "attention.value")
GPT2 = Naming(
    ends={
        "embedding.word": "transformer.wte",
        "embedding.position": "transformer.wpe",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    layer="transformer.h.{layer}",
    layers={
        "attention_norm": "ln_1",
        "attention.query": HFName("attn.c_attn", fused=QKV, transposed=True),
        "attention.key": HFName("attn.c_attn", fused=QKV, transposed=True),
        "attention.value": HFName("attn.c_attn", fused=QKV, transposed=True),
        "attention.output": HFName("attn.c_proj", transposed=True),
        "mlp_norm": "ln_2",
        "mlp.up": HFName("mlp.c_fc", transposed=True),
        "mlp.down": HFName("mlp.c_proj", transposed=True),
    },
)
