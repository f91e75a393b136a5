"""Numbers of parameters, from the configuration alone; without the padding of the vocabulary.

A model is its embeddings, layers, final norm and head; a layer two norms, an attention, and an MLP or experts.
"""

from nanotrain.config.config import Activation, ModelConfig, Normalization, PositionEmbedding
from nanotrain.config.derive import ffn_size, head_dim, moe_ffn_size, moe_layers, query_groups


def num_parameters(model_config: ModelConfig) -> int:
    """Elements of all parameters.

    >>> small = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=10)
    >>> num_parameters(small) == 10 * 8 + 4 * 8 * 8 + 3 * 8 * 64 + 3 * 8
    True
    """
    return _count(model_config, experts=model_config.num_experts or 0)


def num_active_parameters(model_config: ModelConfig) -> int:
    """Elements of the parameters that one token meets: of the experts, those it is sent to.

    >>> num_active_parameters(ModelConfig(vocab_size=10)) == num_parameters(ModelConfig(vocab_size=10))
    True
    """
    return _count(model_config, experts=model_config.moe_router_topk)


def _count(model_config: ModelConfig, *, experts: int) -> int:
    hidden, layers = model_config.hidden_size, moe_layers(model_config)
    block = 2 * _norm(model_config, hidden) + (
        _latent_attention(model_config) if model_config.multi_latent_attention else _attention(model_config)
    )
    moe = hidden * (model_config.num_experts or 0) + experts * _mlp(model_config, moe_ffn_size(model_config))
    if model_config.moe_shared_expert_intermediate_size:
        moe += _mlp(model_config, model_config.moe_shared_expert_intermediate_size)
    dense = _mlp(model_config, ffn_size(model_config))

    embedding = (model_config.vocab_size or 0) * hidden
    total = len(layers) * block + sum(moe if has_experts else dense for has_experts in layers)
    total += _norm(model_config, hidden) + embedding
    if model_config.position_embedding_type is PositionEmbedding.learned_absolute:
        total += model_config.max_position_embeddings * hidden
    return total + embedding if model_config.untie_embeddings_and_output_weights else total


def _norm(model_config: ModelConfig, width: int) -> int:
    return 2 * width if model_config.normalization is Normalization.LayerNorm else width


def _attention(model_config: ModelConfig) -> int:
    hidden = model_config.hidden_size
    query, key = (
        model_config.num_attention_heads * head_dim(model_config),
        query_groups(model_config) * head_dim(model_config),
    )
    total = hidden * (2 * query + 2 * key)
    if model_config.add_bias_linear or model_config.add_qkv_bias:
        total += query + 2 * key
    if model_config.add_bias_linear:
        total += hidden
    return total + 2 * head_dim(model_config) if model_config.qk_layernorm else total


def _latent_attention(model_config: ModelConfig) -> int:
    """Down to the latents (their norms, one rotary key for all heads), up to the heads, and out."""
    hidden, heads = model_config.hidden_size, model_config.num_attention_heads
    query, latent = heads * head_dim(model_config), model_config.q_lora_rank
    down_up = hidden * latent + _norm(model_config, latent) + latent * query if latent else hidden * query
    compressed = hidden * (model_config.kv_lora_rank + model_config.qk_pos_emb_head_dim) + _norm(
        model_config, model_config.kv_lora_rank
    )
    return (
        down_up
        + compressed
        + model_config.kv_lora_rank * heads * (model_config.qk_head_dim + model_config.v_head_dim)
        + heads * model_config.v_head_dim * hidden
    )


def _mlp(model_config: ModelConfig, ffn: int) -> int:
    up_projections = 2 if model_config.activation is Activation.swiglu else 1
    biases = up_projections * ffn + model_config.hidden_size if model_config.add_bias_linear else 0
    return model_config.hidden_size * ffn * (up_projections + 1) + biases
