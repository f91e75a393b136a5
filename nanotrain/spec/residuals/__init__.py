"""Residual connections, pure: one row per kind, with the parameters and operators of a layer.

    RESIDUALS      by the names in `ModelShape.residual`
    stream_width   channels that stages send for every token

Their modules are in the table of model/transformer.py. docs/residuals.md shows how to add one.
"""

from nanotrain.spec.residuals import attention, gated, hyper_connections, parallel, plain
from nanotrain.spec.residuals.residual import ResidualKind
from nanotrain.spec.shape import ModelShape

RESIDUALS: dict[str, ResidualKind] = {
    "plain": ResidualKind(plain.declare_plain, plain.operators),
    "shortcut": ResidualKind(plain.declare_shortcut, plain.operators),
    "extended": ResidualKind(plain.declare_extended, plain.extended_operators),
    "parallel": ResidualKind(parallel.declare_parallel, parallel.operators),
    "gated": ResidualKind(gated.declare_gated, gated.operators),
    "hyper_connections": ResidualKind(
        hyper_connections.declare_hyper,
        hyper_connections.hyper_operators,
        num_streams=hyper_connections.num_streams,
        end_operators=hyper_connections.hyper_end_operators,
    ),
    "attention": ResidualKind(
        attention.declare_attention,
        attention.operators,
        num_streams=hyper_connections.num_streams,
        declare_end=attention.declare_query,
        end_operators=attention.end_operators,
    ),
    "mhc": ResidualKind(
        hyper_connections.declare_mhc,
        hyper_connections.mhc_operators,
        num_streams=hyper_connections.num_streams,
        declare_end=hyper_connections.declare_mhc_end,
        end_operators=hyper_connections.mhc_end_operators,
    ),
}


def stream_width(shape: ModelShape) -> int:
    """Channels of all residual streams of a token, as stages send them."""
    return RESIDUALS[shape.residual_type].num_streams(shape) * shape.hidden_size
