"""How much arithmetic a token costs: `flops_per_token`, pure."""

from nanotrain.config.config import Activation, ModelConfig
from nanotrain.config.derive import ffn_size, head_dim, moe_ffn_size, moe_layers, query_groups


def flops_per_token(model_config: ModelConfig, seq_length: int) -> int:
    """Floating-point operations of forward and backward per trained token.

    Matrices cost two operations per weight forward and four backward; causal attention scores and mixes half of
    the S x S pairs. Of the experts those count that a token is sent to, and the shared one. Norms, activations,
    softmaxes, routers and embedding look-ups are left out, as is custom.

    Args:
        model_config: the shape, its vocabulary size set (padding is not counted as work).
        seq_length: S, tokens in a sample.

    >>> llama7b = ModelConfig(num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32,
    ...                       vocab_size=32000)
    >>> flops_per_token(llama7b, 4096)
    42863689728
    """
    assert model_config.vocab_size is not None, "the vocabulary size is resolved before a model is counted"
    num_moe_layers = sum(moe_layers(model_config))
    num_dense_layers = model_config.num_layers - num_moe_layers
    attention = (
        _latent_attention_weights(model_config)
        if model_config.multi_latent_attention
        else _attention_weights(model_config)
    )
    weights = (
        model_config.num_layers * attention
        + num_dense_layers * _mlp_weights(model_config, ffn_size(model_config))
        + num_moe_layers * _active_expert_weights(model_config)
        + model_config.hidden_size * model_config.vocab_size
    )
    value_dim = model_config.v_head_dim if model_config.multi_latent_attention else head_dim(model_config)
    pairs_width = model_config.num_attention_heads * (head_dim(model_config) + value_dim)
    return 6 * weights + 3 * model_config.num_layers * pairs_width * seq_length


def _attention_weights(model_config: ModelConfig) -> int:
    query_width, key_width = (
        model_config.num_attention_heads * head_dim(model_config),
        query_groups(model_config) * head_dim(model_config),
    )
    return model_config.hidden_size * (2 * query_width + 2 * key_width)


def _latent_attention_weights(model_config: ModelConfig) -> int:
    """Down to the latents, up to the heads, and out."""
    hidden, heads, latent = model_config.hidden_size, model_config.num_attention_heads, model_config.q_lora_rank
    query_width = heads * head_dim(model_config)
    query = latent * (hidden + query_width) if latent is not None else hidden * query_width
    keys_and_values = hidden * (model_config.kv_lora_rank + model_config.qk_pos_emb_head_dim)
    keys_and_values += model_config.kv_lora_rank * heads * (model_config.qk_head_dim + model_config.v_head_dim)
    return query + keys_and_values + heads * model_config.v_head_dim * hidden


def _active_expert_weights(model_config: ModelConfig) -> int:
    shared = _mlp_weights(model_config, model_config.moe_shared_expert_intermediate_size or 0)
    return model_config.moe_router_topk * _mlp_weights(model_config, moe_ffn_size(model_config)) + shared


def _mlp_weights(model_config: ModelConfig, inner: int) -> int:
    return (3 if model_config.activation is Activation.swiglu else 2) * model_config.hidden_size * inner
