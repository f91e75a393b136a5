"""How much arithmetic a token costs: `flops_per_token`, pure."""

from nanotrain.config.config import Activation, ModelConfig
from nanotrain.config.derive import ffn_size, head_dim, moe_ffn_size, moe_layers, query_groups


def flops_per_token(model: ModelConfig, seq_length: int) -> int:
    """Floating-point operations of forward and backward per trained token.

    Matrices cost two operations per weight forward and four backward; causal attention scores and mixes half of
    the S x S pairs. Of the experts those count that a token is sent to, and the shared one. Norms, activations,
    softmaxes, routers and embedding look-ups are left out, as is custom.

    Args:
        model: the shape, its vocabulary size set (padding is not counted as work).
        seq_length: S, tokens in a sample.

    >>> llama7b = ModelConfig(num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32,
    ...                       vocab_size=32000)
    >>> flops_per_token(llama7b, 4096)
    42863689728
    """
    assert model.vocab_size is not None, "the vocabulary size is resolved before a model is counted"
    num_moe_layers = sum(moe_layers(model))
    num_dense_layers = model.num_layers - num_moe_layers
    attention = _latent_attention_weights(model) if model.multi_latent_attention else _attention_weights(model)
    weights = (
        model.num_layers * attention
        + num_dense_layers * _mlp_weights(model, ffn_size(model))
        + num_moe_layers * _active_expert_weights(model)
        + model.hidden_size * model.vocab_size
    )
    value_dim = model.v_head_dim if model.multi_latent_attention else head_dim(model)
    pairs_width = model.num_attention_heads * (head_dim(model) + value_dim)
    return 6 * weights + 3 * model.num_layers * pairs_width * seq_length


def _attention_weights(model: ModelConfig) -> int:
    query_width, key_width = model.num_attention_heads * head_dim(model), query_groups(model) * head_dim(model)
    return model.hidden_size * (2 * query_width + 2 * key_width)


def _latent_attention_weights(model: ModelConfig) -> int:
    """Down to the latents, up to the heads, and out."""
    hidden, heads, latent = model.hidden_size, model.num_attention_heads, model.q_lora_rank
    query_width = heads * head_dim(model)
    query = latent * (hidden + query_width) if latent is not None else hidden * query_width
    keys_and_values = hidden * (model.kv_lora_rank + model.qk_pos_emb_head_dim)
    keys_and_values += model.kv_lora_rank * heads * (model.qk_head_dim + model.v_head_dim)
    return query + keys_and_values + heads * model.v_head_dim * hidden


def _active_expert_weights(model: ModelConfig) -> int:
    shared = _mlp_weights(model, model.moe_shared_expert_intermediate_size or 0)
    return model.moe_router_topk * _mlp_weights(model, moe_ffn_size(model)) + shared


def _mlp_weights(model: ModelConfig, inner: int) -> int:
    return (3 if model.activation is Activation.swiglu else 2) * model.hidden_size * inner
