"""Numbers of parameters, from the configuration alone; without the padding of the vocabulary.

A model is its embeddings, layers, final norm and head; a layer two norms, an attention, and an MLP or experts.
"""

from nanotrain.config.config import Activation, ModelConfig, Normalization, PositionEmbedding
from nanotrain.config.derive import ffn_size, head_dim, moe_ffn_size, moe_layers, query_groups


def num_parameters(model: ModelConfig) -> int:
    """Elements of all parameters.

    >>> small = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=10)
    >>> num_parameters(small) == 10 * 8 + 4 * 8 * 8 + 3 * 8 * 64 + 3 * 8
    True
    """
    return _count(model, experts=model.num_experts or 0)


def num_active_parameters(model: ModelConfig) -> int:
    """Elements of the parameters that one token meets: of the experts, those it is sent to.

    >>> num_active_parameters(ModelConfig(vocab_size=10)) == num_parameters(ModelConfig(vocab_size=10))
    True
    """
    return _count(model, experts=model.moe_router_topk)


def _count(model: ModelConfig, *, experts: int) -> int:
    hidden, layers = model.hidden_size, moe_layers(model)
    block = 2 * _norm(model, hidden) + (_latent_attention(model) if model.multi_latent_attention else _attention(model))
    moe = hidden * (model.num_experts or 0) + experts * _mlp(model, moe_ffn_size(model))
    if model.moe_shared_expert_intermediate_size:
        moe += _mlp(model, model.moe_shared_expert_intermediate_size)
    dense = _mlp(model, ffn_size(model))

    embedding = (model.vocab_size or 0) * hidden
    total = len(layers) * block + sum(moe if has_experts else dense for has_experts in layers)
    total += _norm(model, hidden) + embedding
    if model.position_embedding_type is PositionEmbedding.learned_absolute:
        total += model.max_position_embeddings * hidden
    return total + embedding if model.untie_embeddings_and_output_weights else total


def _norm(model: ModelConfig, width: int) -> int:
    return 2 * width if model.normalization is Normalization.LayerNorm else width


def _attention(model: ModelConfig) -> int:
    hidden = model.hidden_size
    query, key = model.num_attention_heads * head_dim(model), query_groups(model) * head_dim(model)
    total = hidden * (2 * query + 2 * key)
    if model.add_bias_linear or model.add_qkv_bias:
        total += query + 2 * key
    if model.add_bias_linear:
        total += hidden
    return total + 2 * head_dim(model) if model.qk_layernorm else total


def _latent_attention(model: ModelConfig) -> int:
    """Down to the latents (their norms, one rotary key for all heads), up to the heads, and out."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    query, latent = heads * head_dim(model), model.q_lora_rank
    down_up = hidden * latent + _norm(model, latent) + latent * query if latent else hidden * query
    compressed = hidden * (model.kv_lora_rank + model.qk_pos_emb_head_dim) + _norm(model, model.kv_lora_rank)
    return (
        down_up
        + compressed
        + model.kv_lora_rank * heads * (model.qk_head_dim + model.v_head_dim)
        + heads * model.v_head_dim * hidden
    )


def _mlp(model: ModelConfig, ffn: int) -> int:
    up_projections = 2 if model.activation is Activation.swiglu else 1
    biases = up_projections * ffn + model.hidden_size if model.add_bias_linear else 0
    return model.hidden_size * ffn * (up_projections + 1) + biases
