"""Several residual streams that learned weights mix: hyper-connections and mHC.

A sublayer reads a weighted sum of n streams and is added to each of them with a weight of its own;
the streams are mixed by an n x n matrix. The weights depend on the token.

    hyper_connections   Zhu et al. 2024 (arXiv 2409.19606), section 2
    mhc                 manifold-constrained: the mixing matrix is doubly stochastic (DeepSeek-V4)

Between layers the streams of a token are one after the other, [B, S, n H].
"""

from collections.abc import Sequence
from dataclasses import replace

from nanotrain.spec.declaration import Declaration, Specs, grouped, nest, summed
from nanotrain.spec.layer_sizes import FP32, LayerSizes
from nanotrain.spec.operators import Norm, Operators, Product, Residual, Saved
from nanotrain.spec.params import ParamSpec
from nanotrain.spec.residuals.plain import declare_plain
from nanotrain.spec.residuals.residual import (
    Sublayer,
    hidden_norm,
    normalized_operators,
)
from nanotrain.spec.shape import ModelShape

SCALE_INIT = 0.01  # initial factors of the weights that depend on the token
NUM_PASSES = 2  # reads of the streams, and as many writes, in fp32, for their weights
NUM_FP32_COPIES = 4  # of the streams, while a backward computes their weights again


def num_streams(shape: ModelShape) -> int:
    """Residual streams between layers."""
    return shape.residual_streams


def declare_mhc(declare: Declaration, sublayers: Sequence[Sublayer], *, index: int) -> Specs:
    """Sublayers, followed by the weights of reading, writing and mixing of each."""
    n = declare.shape.residual_streams
    num_weights = n * (n + 2)
    specs = declare_plain(declare, sublayers, index=index)
    for sublayer in sublayers:
        inputs = n * declare.shape.hidden_size
        connection = _projection(
            declare, (num_weights, inputs), num_biases=num_weights, num_scales=3
        )
        specs += nest(f"{sublayer.name}_connection", connection)
    return specs


def declare_hyper(declare: Declaration, sublayers: Sequence[Sublayer], *, index: int) -> Specs:
    """Sublayers, followed by the weights of each and the norm of the streams that they read."""
    n = declare.shape.residual_streams
    hidden = declare.shape.hidden_size
    specs = declare_plain(declare, sublayers, index=index)
    for sublayer in sublayers:
        connection = _projection(declare, (n + 2, hidden), num_biases=n * (n + 2), num_scales=2)
        connection += nest("norm", hidden_norm(declare))
        specs += nest(f"{sublayer.name}_connection", connection)
    return specs


def declare_mhc_end(declare: Declaration) -> Specs:
    """The weights with which the last streams are summed."""
    n = declare.shape.residual_streams
    return _projection(declare, (n, n * declare.shape.hidden_size), num_biases=n, num_scales=1)


def _projection(
    declare: Declaration, shape: tuple[int, int], *, num_biases: int, num_scales: int
) -> Specs:
    """The parameters of a connection: a matrix, biases and scales.

    The matrix gives weights that depend on the token, the biases are the same for all tokens. Every
    tp rank has all of them.

    Args:
        declare: sizes of the layer.
        shape: outputs and inputs of the matrix.
        num_biases: length of the bias vector.
        num_scales: length of the vector of scales.
    """
    weight = replace(declare.weight(*shape), needs_whole_matrix=False)
    specs: tuple[ParamSpec, ...] = (
        weight,
        declare.vector("bias", num_biases),
        declare.vector("scale", num_scales, value=SCALE_INIT),
    )
    return grouped("connections", summed(specs, declare.sequence_axes))


def mhc_operators(s: LayerSizes, sublayers: Sequence[Sublayer]) -> Operators:
    """Sublayers between reading and mixing of the streams."""
    n = s.shape.residual_streams
    project = _project(s, outputs=n * (n + 2), inputs=n * s.shape.hidden_size)
    iterations = s.shape.mhc_sinkhorn_iterations
    forward = 16 + 6 * iterations
    weigh = _weigh(s, forward=forward, backward=30 + 14 * iterations)
    return _operators(s, sublayers, project=project, weigh=weigh)


def hyper_operators(s: LayerSizes, sublayers: Sequence[Sublayer]) -> Operators:
    """Sublayers between reading and mixing of the streams; each stream has its own projection."""
    n = s.shape.residual_streams
    project = _project(s, outputs=n * (n + 2), inputs=s.shape.hidden_size)
    return _operators(s, sublayers, project=project, weigh=_weigh(s, forward=16, backward=35))


def _operators(
    s: LayerSizes, sublayers: Sequence[Sublayer], *, project: Product, weigh: Norm
) -> Operators:
    """Sublayers between reading and mixing of the streams.

    Args:
        s: sizes of the layer.
        sublayers: sublayers of the layer.
        project: the projection of the streams to the weights of a connection.
        weigh: the weights of the streams from that projection.
    """
    operators: Operators = []
    for sublayer in sublayers:
        weights = (f"{sublayer.name}_connection.weight",)
        operators += [replace(project, weights=weights), weigh, _pass_over_streams(s, "read")]
        operators += normalized_operators(s, sublayer)
        output = Saved(s.outside * s.width)
        operators.append(replace(_pass_over_streams(s, "mix"), saves=(output,)))
    return operators


def _weigh(s: LayerSizes, *, forward: int, backward: int) -> Norm:
    """The weights of the streams from their projection, by torch's operators in fp32.

    Args:
        s: sizes of the layer.
        forward: operators of a forward, each of which is a launch; counted by a dispatch mode.
        backward: operators of a backward, before which the forward runs again.
    """
    streams = s.shape.residual_streams * s.outside * s.shape.hidden_size
    return Norm(
        name="stream_weights",
        numel=NUM_PASSES * streams * FP32 // s.itemsize,
        launches=forward,
        backward_launches=forward + backward,
    )


def _project(s: LayerSizes, *, outputs: int, inputs: int, weights: tuple[str, ...] = ()) -> Product:
    """The projection of the streams to their weights; it saves the streams and its outputs."""
    n = s.shape.residual_streams
    streams = Saved(n * s.outside * s.width)
    returned = Saved(s.outside * _weight_bytes(s))
    return Product(
        name="connection",
        weights=weights,
        rows=s.outside,
        outputs=outputs,
        inputs=inputs,
        saves=(streams, returned),
        working=NUM_FP32_COPIES * n * s.outside * s.shape.hidden_size * FP32,
    )


def _weight_bytes(s: LayerSizes) -> int:
    """Bytes per token of the weights of reading, writing and mixing."""
    n = s.shape.residual_streams
    return n * FP32 + (n + n * n) * s.itemsize


def _pass_over_streams(s: LayerSizes, name: str) -> Residual:
    """Reading, or mixing and writing, of all streams."""
    numel = s.shape.residual_streams * s.outside * s.shape.hidden_size
    return Residual(name=f"{name}_streams", numel=numel)


def mhc_end_operators(s: LayerSizes) -> Operators:
    """The weighted sum of the last streams."""
    n = s.shape.residual_streams
    weights = ("leave_streams.weight",)
    project = _project(s, outputs=n, inputs=n * s.shape.hidden_size, weights=weights)
    streams, _ = project.saves
    returned = Saved(s.outside * n * FP32)
    project = replace(project, name="leave_streams", saves=(streams, returned))
    return [project, _pass_over_streams(s, "leave")]


def hyper_end_operators(s: LayerSizes) -> Operators:
    """The sum of the last streams."""
    return [_pass_over_streams(s, "leave")]
