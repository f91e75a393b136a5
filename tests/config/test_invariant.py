"""Blocks of `--invariant` follow from the model and the sequence length."""

import pytest

from nanotrain.config.invariant import (
    num_expert_blocks,
    num_position_blocks,
    num_weight_blocks,
    sharded_sizes,
)
from tests.config.asking import config_of


@pytest.mark.parametrize(
    ("heads", "groups", "width", "num_blocks"),
    [(8, 8, 64, 8), (16, 4, 64, 4), (16, 16, 36, 4), (6, 6, 64, 2), (5, 5, 64, 1)],
)
def test_the_number_divides_heads_and_widths(
    heads: int, groups: int, width: int, num_blocks: int
) -> None:
    config = config_of(
        num_attention_heads=heads,
        num_query_groups=groups,
        hidden_size=heads * 8,
        ffn_hidden_size=width,
        vocab_size=300,
    )
    assert num_weight_blocks(config) == num_blocks
    assert sharded_sizes(config)["vocab_size with padding"] == 384


def test_blocks_divide_the_heads_of_linear_attention() -> None:
    sizes = {"num_attention_heads": 8, "hidden_size": 64, "vocab_size": 300}
    mamba = {"mamba_num_heads": 12, "mamba_num_groups": 4, "mamba_state_dim": 6}
    assert num_weight_blocks(config_of(**sizes, **mamba, hybrid_layer_pattern="M-")) == 4
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 8}
    names = {"linear_attention_type": "gated_delta_net", "linear_attention_freq": "2"}
    assert num_weight_blocks(config_of(**sizes, **linear, **names, num_layers=2)) == 2


@pytest.mark.parametrize(("width", "num_blocks"), [(64, 4), (66, 2), (63, 1)])
def test_experts_are_in_at_most_four_blocks(width: int, num_blocks: int) -> None:
    config = config_of(num_experts=4, moe_ffn_hidden_size=width, vocab_size=300)
    assert num_expert_blocks(config) == num_blocks


@pytest.mark.parametrize(("length", "num_blocks"), [(256, 4), (6, 2), (7, 1)])
def test_positions_are_in_at_most_four_blocks(length: int, num_blocks: int) -> None:
    assert num_position_blocks(config_of(seq_length=length, vocab_size=300)) == num_blocks
