"""A block with a shortcut, written out: each part that is added to the residual stream has the
factor of its kind.
"""

from dataclasses import replace

import pytest
import torch

from nanotrain.config.layer_kinds import MoEConfig
from nanotrain.data.batch import Batch
from nanotrain.model.context import BatchContext
from nanotrain.model.transformer import ShortcutBlock
from tests.model.building import LLAMA, build, randomize

SHORTCUT = replace(
    LLAMA,
    num_layers=1,
    moe=MoEConfig(
        num_experts=4,
        router_topk=2,
        ffn_hidden_size=24,
        shortcut=True,
        shared_expert_intermediate_size=40,
    ),
)
FACTORS = {
    "no factor": (1.0, 1.0),
    "residual": (0.3, 1.0),
    "MLP": (1.0, 0.4),
}


@pytest.mark.parametrize("name", FACTORS)
def test_every_output_in_a_block_with_a_shortcut_has_its_factor(name: str) -> None:
    residual, of_mlp = FACTORS[name]
    config = replace(SHORTCUT, residual_multiplier=residual, mlp_output_multiplier=of_mlp)
    stage = randomize(build(config))
    block = stage.layers["0"]
    assert isinstance(block, ShortcutBlock)
    tokens = torch.zeros(2, 12, dtype=torch.int64)
    batch = Batch.from_tokens(tokens)
    like = torch.zeros(2, 12, 32)
    context = stage._layer_context(BatchContext(batch), dropout=None, like=like)
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1))
    mlp_factor = residual * of_mlp

    attended = x + residual * block.attention(block.attention_norm(x), context)
    hidden = block.mlp_norm(attended)
    shared = block.mlp.shared(hidden, context)
    routed = block.mlp(hidden, context) - shared  # the layer returns the sum of both
    y = attended + mlp_factor * shared
    second = block.second
    y = y + residual * second.attention(second.attention_norm(y), context)
    y = y + mlp_factor * second.mlp(second.mlp_norm(y), context)
    expected = y + mlp_factor * routed
    torch.testing.assert_close(block(x, context), expected, rtol=1e-5, atol=1e-5)
    assert routed.abs().max() > 1e-2 and shared.abs().max() > 1e-2
