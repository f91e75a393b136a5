"""How much arithmetic a token costs: `flops_per_token`, pure."""

from nanotrain.config.config import Activation, ModelConfig
from nanotrain.config.derive import ffn_size, head_dim, query_groups


def flops_per_token(model: ModelConfig, seq_length: int) -> int:
    """Floating-point operations of forward and backward per trained token.

    Matrices cost two operations per weight forward and four backward; causal attention scores and mixes half of
    the S x S pairs. Norms, activations, the softmax and embedding look-ups are left out, as is custom.

    Args:
        model: the shape, its vocabulary size set (padding is not counted as work).
        seq_length: S, tokens in a sample.

    >>> llama7b = ModelConfig(num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32,
    ...                       vocab_size=32000)
    >>> flops_per_token(llama7b, 4096)
    42863689728
    """
    assert model.vocab_size is not None, "the vocabulary size is resolved before a model is counted"
    hidden = model.hidden_size
    query_width = model.num_attention_heads * head_dim(model)
    key_width = query_groups(model) * head_dim(model)
    attention = hidden * (query_width + 2 * key_width) + query_width * hidden
    mlp = (3 if model.activation is Activation.swiglu else 2) * hidden * ffn_size(model)
    weights = model.num_layers * (attention + mlp) + hidden * model.vocab_size
    return 6 * weights + 6 * model.num_layers * query_width * seq_length
