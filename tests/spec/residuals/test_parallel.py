"""Attention and MLP side by side keep what they share once."""

from nanotrain.config.model import ModelConfig
from nanotrain.plan.saved_bytes import saved_bytes
from nanotrain.spec.kinds.block import block_operators
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.shape import ModelShape

TOKENS = 8


def kept(modules=(), **fields) -> int:
    shape = ModelShape.of(ModelConfig(vocab_size=10, **fields))
    sizes = LayerSizes.for_model(shape, seq_length=TOKENS)
    return saved_bytes(block_operators(sizes, 0), modules)


def test_two_norms_keep_their_input_once_and_one_norm_its_output_once() -> None:
    hidden = TOKENS * 256 * 2
    statistics = TOKENS * 4
    one_after_the_other = kept()
    two = kept(residual_type="parallel")
    one = kept(residual_type="parallel", parallel_shared_norm=True)
    assert one_after_the_other - two == hidden
    assert two - one == hidden + statistics


def test_recomputed_norms_leave_the_input_of_the_layer() -> None:
    hidden = TOKENS * 256 * 2
    for shared, num_outputs in ((False, 2), (True, 1)):
        fields = {"residual_type": "parallel", "parallel_shared_norm": shared}
        dropped = kept(**fields) - kept(["layernorm"], **fields)
        assert dropped == num_outputs * (hidden + TOKENS * 4)
