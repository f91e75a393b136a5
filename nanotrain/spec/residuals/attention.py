"""Block attention residuals: sublayers read earlier blocks by attention over the depth (Kimi).

The streams of a token are the embedding and the sum of every block of layers; they lie one after
the other, [B, S, n H]. model/attention_residuals.py has the formula.
"""

from collections.abc import Sequence
from dataclasses import replace

from nanotrain.spec.declaration import Declaration, Specs, grouped, nest, summed
from nanotrain.spec.layer_sizes import FP32, LayerSizes
from nanotrain.spec.operators import Norm, Operator, Operators, Residual, Saved
from nanotrain.spec.residuals.plain import declare_plain
from nanotrain.spec.residuals.residual import Sublayer, normalized_operators

# operators of a sublayer's weights and of the head's weights, in a forward and in a backward;
# counted by a dispatch mode
LAUNCHES = (10, 17)
END_LAUNCHES = (9, 16)
NUM_FP32_COPIES = 3  # of the streams, while a backward computes their weights again


def declare_attention(declare: Declaration, sublayers: Sequence[Sublayer], *, index: int) -> Specs:
    """Sublayers, followed by the pseudo-query of each."""
    specs = declare_plain(declare, sublayers, index=index)
    for sublayer in sublayers:
        specs += nest(f"{sublayer.name}_connection", declare_query(declare))
    return specs


def declare_query(declare: Declaration) -> Specs:
    """A pseudo-query; zeros give every stream the same weight."""
    query = declare.vector("weight", declare.shape.hidden_size)
    return grouped("connections", summed([query], declare.sequence_axes))


def operators(s: LayerSizes, sublayers: Sequence[Sublayer]) -> Operators:
    """Sublayers between reading and writing of the streams."""
    written = Saved(s.shape.residual_streams * s.itemsize)
    weights = weigh(s, LAUNCHES)
    weights = replace(weights, saves=(*weights.saves, written))
    operators: Operators = []
    for sublayer in sublayers:
        operators += [weights, pass_over_streams(s, "read")]
        operators += normalized_operators(s, sublayer)
        operators.append(pass_over_streams(s, "write"))
    return operators


def end_operators(s: LayerSizes) -> Operators:
    """The weighted sum of the last streams."""
    return [weigh(s, END_LAUNCHES), pass_over_streams(s, "leave")]


def weigh(s: LayerSizes, launches: tuple[int, int]) -> Operator:
    """The weights of the streams, by torch's operators in fp32.

    It keeps the streams and what it returns.

    Args:
        s: sizes of the layer.
        launches: operators of a forward, and of a backward, before which the forward runs again.
    """
    n = s.shape.residual_streams
    numel = n * s.outside * s.shape.hidden_size
    forward, backward = launches
    return Norm(
        name="stream_weights",
        numel=numel * FP32 // s.itemsize,
        launches=forward,
        backward_launches=forward + backward,
        saves=(Saved(n * s.outside * s.width), Saved(n * s.outside * FP32)),
        working=NUM_FP32_COPIES * numel * FP32,
    )


def pass_over_streams(s: LayerSizes, name: str) -> Residual:
    """A read or a write of all streams."""
    numel = s.shape.residual_streams * s.outside * s.shape.hidden_size
    return Residual(name=f"{name}_streams", numel=numel)
