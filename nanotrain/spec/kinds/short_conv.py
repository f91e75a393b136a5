"""Gated short convolution (LFM2), the pure half of model/short_conv.py."""

from collections.abc import Collection

from nanotrain.spec.declaration import ContextRank, Declaration, RankSizes, Specs, nest
from nanotrain.spec.shape import ModelShape


def declare(declare: Declaration) -> Specs:
    """Two gates, the values, their convolution and the output; all of the width of the residual
    stream.
    """
    hidden, bias = declare.shape.hidden_size, declare.shape.has_linear_bias
    projection = declare.column_linear(hidden, hidden, bias=bias)
    return (
        *nest("gate_in", projection),
        *nest("gate_out", projection),
        *nest("value", projection),
        *nest("conv", declare.convolution(hidden, kernel_size(declare.shape), bias=bias)),
        *nest("output", declare.row_linear(hidden, hidden, bias=bias)),
    )


def kernel_size(shape: ModelShape) -> int:
    """Tokens that the convolution sees."""
    assert shape.linear_attention is not None, "linear_attention_type is set"
    return shape.linear_attention.conv_kernel_dim


def saved_bytes(rank: RankSizes, layer: int, *, modules: Collection[str]) -> int:
    """The factors of both products, and the input of the output projection."""
    return rank.tokens * 6 * rank.shape.hidden_size // rank.tp * rank.itemsize


def cp_bytes(shape: ModelShape, rank: ContextRank) -> dict[str, tuple[int, int]]:
    """The tokens before each chunk, and their gradients back."""
    num_bytes = rank.halo_bytes((kernel_size(shape) - 1) * shape.hidden_size)
    return {"p2p": (num_bytes, num_bytes)}
