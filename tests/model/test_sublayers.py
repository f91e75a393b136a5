"""The sublayers of a block, and blocks that have them side by side, written out."""

from dataclasses import replace

import pytest
import torch

from nanotrain.data.batch import Batch
from nanotrain.model.context import BatchContext
from tests.model.building import LLAMA, build, randomize


def random_block(**fields):
    """A block with random weights, its input and its context."""
    stage = randomize(build(replace(LLAMA, num_layers=1, **fields)))
    batch = Batch.from_tokens(torch.zeros(2, 12, dtype=torch.int64))
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1))
    return stage.layers["0"], x, stage._layer_context(BatchContext(batch), dropout=None, like=x)


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])
def test_a_sublayer_normalizes_its_input_its_output_or_both(placement: str) -> None:
    block, x, context = random_block(norm_placement=placement)
    hidden = x if placement == "post" else block.attention_norm(x)
    attended = block.attention(hidden, context)
    expected = attended if placement == "pre" else block.attention_post_norm(attended)
    torch.testing.assert_close(block.attention_output(x, context), expected)
    assert [*dict(block.named_children())] == [
        f"{half}{part}" for half in ("attention", "mlp") for part in ("_norm", "", "_post_norm")
    ]


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_attention_and_mlp_side_by_side_read_one_input(factor: float) -> None:
    for shared in (False, True):
        block, x, context = random_block(
            residual_type="parallel", parallel_shared_norm=shared, residual_multiplier=factor
        )
        norms = (block.input_norm,) * 2 if shared else (block.attention_norm, block.mlp_norm)
        attended = block.attention(norms[0](x), context)
        transformed = block.mlp(norms[1](x), context)
        expected = x + factor * (attended + transformed)
        torch.testing.assert_close(block(x, context), expected, rtol=1e-6, atol=1e-5)
        assert attended.abs().max() > 1e-2 and transformed.abs().max() > 1e-2
