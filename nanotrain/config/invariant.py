"""The fixed blocks of `--invariant`, from the model and the sequence length alone.

A matrix product rounds by its shape, so all products of a run have the shape of a block, in every
layout. Ranks own whole blocks.

    num_weight_blocks     blocks of heads, inner widths and the vocabulary
    num_expert_blocks     blocks of the inner width of an expert
    num_position_blocks   blocks of the positions of a sequence
    num_token_blocks      smaller blocks of positions, by which experts are computed
"""

from collections.abc import Iterable

from nanotrain.config.config import Config
from nanotrain.config.layer_kinds import LinearAttentionConfig

# More blocks allow more ranks; fewer and larger products are faster.
MAX_WEIGHT_BLOCKS = 8
MAX_EXPERT_BLOCKS = 4
MAX_POSITION_BLOCKS = 4
MAX_TOKEN_BLOCKS = 8  # of a block of positions


def num_weight_blocks(config: Config) -> int:
    """The largest power of two up to 8 that divides all sharded sizes of the model.

    >>> from nanotrain.config.config import ModelConfig
    >>> sizes = {"num_attention_heads": 12, "num_query_groups": 4, "ffn_hidden_size": 2048}
    >>> model = ModelConfig(vocab_size=256, **sizes)
    >>> num_weight_blocks(Config(model=model))
    4
    """
    return largest_divisor(sharded_sizes(config).values(), limit=MAX_WEIGHT_BLOCKS)


def sharded_sizes(config: Config) -> dict[str, int]:
    """The sizes that tensor parallelism shards, by the name of their field."""
    model = config.model
    sizes = {
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "ffn_hidden_size": model.ffn_size,
        "vocab_size with padding": model.padded_vocab_size,
    }
    if "mamba2" in model.mixers:
        sizes["mamba_num_heads"] = model.mamba_heads
        sizes["mamba_num_groups times mamba_state_dim"] = (
            model.mamba.num_groups * model.mamba.state_dim
        )
    if "gated_delta_net" in model.mixers:
        linear = model.linear_attention or LinearAttentionConfig()
        sizes["linear_num_key_heads"] = linear.num_key_heads
        sizes["linear_num_value_heads"] = linear.num_value_heads
    if model.moe is not None and model.moe.shared_expert_intermediate_size:
        name = "moe_shared_expert_intermediate_size"
        sizes[name] = model.moe.shared_expert_intermediate_size
    return sizes


def num_expert_blocks(config: Config) -> int:
    """The largest power of two up to 4 that divides the inner width of an expert.

    >>> from nanotrain.config.config import ModelConfig
    >>> num_expert_blocks(Config(model=ModelConfig(ffn_hidden_size=66)))
    2
    """
    return largest_divisor([config.model.moe_ffn_size], limit=MAX_EXPERT_BLOCKS)


def num_position_blocks(config: Config) -> int:
    """The largest power of two up to 4 that divides the sequence length.

    >>> from nanotrain.config.config import DataConfig
    >>> num_position_blocks(Config(data=DataConfig(seq_length=24)))
    4
    """
    return largest_divisor([config.data.seq_length], limit=MAX_POSITION_BLOCKS)


def num_token_blocks(config: Config) -> int:
    """The blocks of positions in up to 8 parts each, of at least two positions.

    >>> from nanotrain.config.config import DataConfig
    >>> num_token_blocks(Config(data=DataConfig(seq_length=24)))
    8
    """
    blocks = num_position_blocks(config)
    length = config.data.seq_length // blocks
    limit = MAX_TOKEN_BLOCKS
    while limit > 1 and (length % limit != 0 or length // limit < 2):
        limit //= 2
    return blocks * limit


def largest_divisor(sizes: Iterable[int], *, limit: int) -> int:
    """The largest power of two up to `limit` that divides all sizes.

    >>> largest_divisor([12, 20], limit=8)
    4
    """
    sizes = list(sizes)
    divisor = limit
    while any(size % divisor != 0 for size in sizes):
        divisor //= 2
    return divisor
