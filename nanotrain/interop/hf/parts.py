"""Entries of config.json that the tables of families.yaml cannot express.

A part is a function that reads entries and one that writes them.

    PARTS   all parts by the names that families.yaml has for them; others are in positions.py,
            windows.py, layer_types.py, experts.py and residuals.py
"""

from functools import partial

from nanotrain.config.model import ModelConfig
from nanotrain.interop.hf.canonical import resolved
from nanotrain.interop.hf.deepseek_v4 import DEEPSEEK_V4_PARTS
from nanotrain.interop.hf.experts import EXPERT_PARTS
from nanotrain.interop.hf.gemma4 import GEMMA4_PARTS
from nanotrain.interop.hf.laguna import LAGUNA_PARTS
from nanotrain.interop.hf.layer_types import FULL, LAYER_PARTS, rounded
from nanotrain.interop.hf.layout import Part, Raw, Values, reject
from nanotrain.interop.hf.lfm3 import LFM3_PARTS
from nanotrain.interop.hf.positions import POSITION_PARTS
from nanotrain.interop.hf.residuals import RESIDUAL_PARTS
from nanotrain.interop.hf.windows import WINDOW_PARTS


def _check_full_attention(raw: Raw) -> Values:
    """Refuse a Qwen with sliding-window attention."""
    window = raw.get("sliding_window", 0)
    has_window = raw.get("use_sliding_window") and window is not None
    others = sorted(set(raw.get("layer_types") or ()) - {FULL})
    if others and not has_window:
        reject("layer_types", others[0], instead=FULL)
    # Without layer_types the window applies from layer max_window_layers on.
    first = raw.get("max_window_layers", 28)
    is_reached = not raw.get("layer_types") and first < raw["num_hidden_layers"]
    if has_window and (others or is_reached):
        reject("use_sliding_window", True, instead="false")
    return {}


def _read_heads(raw: Raw) -> Values:
    num_heads = raw["num_attention_heads"]
    return {
        "kv_channels": raw.get("head_dim") or raw["hidden_size"] // num_heads,
        "num_query_groups": raw.get("num_key_value_heads") or num_heads,
    }


def _read_mla(raw: Raw) -> Values:
    """MLA: as many key/value heads as heads; transformers fixes the norm epsilon."""
    num_heads = raw["num_attention_heads"]
    groups = raw.get("num_key_value_heads")
    if groups not in (None, num_heads):
        expected = f"{num_heads}, equal to num_attention_heads,"
        reject("num_key_value_heads", groups, instead=expected)
    values: Values = {"multi_latent_attention": True}
    # epsilon of transformers' norms of compressed vectors, whatever rms_norm_eps is
    if raw["rms_norm_eps"] != 1e-6:
        values["mla.compressed_norm_epsilon"] = 1e-6
    return values


def _write_mla(model_config: ModelConfig) -> Values:
    return {"num_key_value_heads": model_config.num_attention_heads}


def _read_scale(raw: Raw) -> Values:
    scalar = raw["query_pre_attn_scalar"]
    return {"softmax_scale": None if scalar == raw["head_dim"] else scalar**-0.5}


def _write_scale(model_config: ModelConfig) -> Values:
    scale = model_config.softmax_scale
    if scale is None:
        return {"query_pre_attn_scalar": resolved(model_config).kv_channels}
    return {"query_pre_attn_scalar": round(scale**-2)}


def _read_biases(raw: Raw) -> Values:
    """Biases of all linear layers; attention and MLP must agree."""
    attention = raw.get("attention_bias", False)
    mlp = raw.get("mlp_bias", False)
    if attention != mlp:
        reject("attention_bias", attention, instead=f"that of mlp_bias, {str(mlp).lower()}")
    return {"add_bias_linear": bool(attention)}


def _write_biases(model_config: ModelConfig) -> Values:
    has_biases = model_config.add_bias_linear
    return {"attention_bias": has_biases, "mlp_bias": has_biases}


def _read_hyperclovax(raw: Raw) -> Values:
    """HyperCLOVA X: norms of outputs, if any, and logits that are multiplied."""
    return {
        "logits_scaling": rounded(1 / raw["logits_scaling"]),
        "norm_placement": "sandwich" if raw["use_post_norm"] else "pre",
    }


def _write_hyperclovax(model_config: ModelConfig) -> Values:
    scale = model_config.softmax_scale
    if scale is None:
        scale = resolved(model_config).head_dim ** -0.5
    return {
        "attention_multiplier": scale,
        "logits_scaling": rounded(1 / model_config.logits_scaling),
        "use_post_norm": model_config.norm_placement == "sandwich",
    }


# names of the activations in config.json
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}


def _read_activation(raw: Raw) -> Values:
    name = raw["activation_function"]
    if name not in ACTIVATIONS:
        reject("activation_function", name, instead=f"one of {', '.join(ACTIVATIONS)}")
    return {"activation": ACTIVATIONS[name]}


def _write_activation(model_config: ModelConfig, *, tanh: str = "gelu_new") -> Values:
    is_tanh = model_config.activation == "gelu_tanh"
    return {"activation_function": tanh if is_tanh else model_config.activation}


def _read_embedding_width(raw: Raw) -> Values:
    """OPT: word embeddings as wide as the hidden states."""
    width = raw["word_embed_proj_dim"]
    if width not in (None, raw["hidden_size"]):
        reject("word_embed_proj_dim", width, instead=f"hidden_size, {raw['hidden_size']},")
    return {}


def _write_embedding_width(model_config: ModelConfig) -> Values:
    return {"word_embed_proj_dim": model_config.hidden_size}


PARTS: dict[str, Part] = {
    "full_attention": Part(_check_full_attention),
    "heads": Part(_read_heads),
    "mla": Part(_read_mla, _write_mla),
    "softmax_scale": Part(_read_scale, _write_scale),
    "llama_biases": Part(_read_biases, _write_biases),
    "gpt2_activation": Part(_read_activation, _write_activation),
    "embedding_width": Part(_read_embedding_width, _write_embedding_width),
    "hyperclovax": Part(_read_hyperclovax, _write_hyperclovax),
    "bigcode_activation": Part(write=partial(_write_activation, tanh="gelu_pytorch_tanh")),
    **DEEPSEEK_V4_PARTS,
    **EXPERT_PARTS,
    **GEMMA4_PARTS,
    **LAGUNA_PARTS,
    **LAYER_PARTS,
    **LFM3_PARTS,
    **POSITION_PARTS,
    **RESIDUAL_PARTS,
    **WINDOW_PARTS,
}
