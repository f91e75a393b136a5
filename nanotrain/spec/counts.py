"""Parameter counts and FLOPs of a model, and the peak FLOP/s of devices: the parts of MFU (model
FLOPs utilization).

Counts come from the declared parameters, without the padding of the vocabulary. Peaks are
`peak_flops.yaml`.
"""

import re
from collections.abc import Iterable
from dataclasses import replace

from nanotrain.config.tables import read_table
from nanotrain.spec.kinds.block import (
    block_operators,
    head_operators,
    model_operators,
)
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.operators import Operator
from nanotrain.spec.parameters import declare_model
from nanotrain.spec.params import ParamSpec
from nanotrain.spec.shape import ModelShape


def num_parameters(shape: ModelShape) -> int:
    """Elements of all parameters.

    >>> from nanotrain.config.config import ModelConfig
    >>> small = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=10)
    >>> num_parameters(ModelShape.of(small)) == 10 * 8 + 4 * 8 * 8 + 3 * 8 * 64 + 3 * 8
    True
    """
    return sum(spec.numel for spec in _unpadded(shape))


def num_active_parameters(shape: ModelShape) -> int:
    """Elements of the parameters that one token uses; of the routed experts only its top k count,
    on average.

    >>> from nanotrain.config.config import ModelConfig
    >>> shape = ModelShape.of(ModelConfig(vocab_size=10))
    >>> num_active_parameters(shape) == num_parameters(shape)
    True
    """
    return sum(_active(spec, shape) for spec in _unpadded(shape))


def flops_per_token(shape: ModelShape, seq_length: int) -> int:
    """Floating-point operations of forward and backward per trained token.

    6 per active weight of a matrix product (2 forward, 4 backward), plus what the kinds of layers
    compute of a sequence without weights, such as causal attention. Multi-token prediction counts
    with its blocks, projections and uses of the head. As usual, norms (including those of MLA),
    activations, softmaxes, routers and embedding look-ups are left out.

    >>> from nanotrain.config.config import ModelConfig
    >>> llama7b = ModelConfig(
    ...     num_layers=32,
    ...     hidden_size=4096,
    ...     ffn_hidden_size=11008,
    ...     num_attention_heads=32,
    ...     vocab_size=32000,
    ... )
    >>> flops_per_token(ModelShape.of(llama7b), 4096)
    42863689728
    """
    sizes = LayerSizes.for_model(
        replace(shape, padded_vocab_size=shape.vocab_size), seq_length=seq_length
    )
    weights = 0
    sequence_flops = 0
    for operator in model_operators(sizes):
        weights += operator.active_weights
        sequence_flops += operator.sequence_flops
    return 6 * weights + 3 * sequence_flops // max(1, seq_length)


def layer_weights(shape: ModelShape) -> tuple[int, ...]:
    """Weights that a token is multiplied with in every layer.

    The weights after the layers count as weights of the last layer.

    >>> from nanotrain.config.config import ModelConfig
    >>> layer_weights(ModelShape.of(ModelConfig(hidden_size=8, num_layers=2, vocab_size=10)))
    (1792, 1872)
    """
    sizes = LayerSizes.for_model(replace(shape, padded_vocab_size=shape.vocab_size), seq_length=1)
    weights = [_active_weights(block_operators(sizes, layer)) for layer in range(shape.num_layers)]
    head = _active_weights(head_operators(sizes))
    weights[-1] += head
    for layer in shape.mtp_predictions:  # every prediction uses the head
        weights[-1] += _active_weights(block_operators(sizes, layer)) + head
    return tuple(weights)


def _active_weights(operators: Iterable[Operator]) -> int:
    """Weights that operators multiply a token with, on average."""
    return sum(operator.active_weights for operator in operators)


def _unpadded(shape: ModelShape) -> tuple[ParamSpec, ...]:
    """The parameters of a model, without padding of the vocabulary."""
    return declare_model(replace(shape, padded_vocab_size=shape.vocab_size))


def _active(spec: ParamSpec, shape: ModelShape) -> int:
    if not spec.is_expert or shape.moe is None:
        return spec.numel
    return spec.numel * shape.moe.router_topk // shape.moe.num_choices


def peak_flops(device_name: str, dtype: str) -> float | None:
    """The dense matrix peak of a device in FLOP/s, or None if unknown (CPUs, MIG slices, unlisted
    cards).

    >>> peak_flops("NVIDIA H100 80GB HBM3", "bf16")
    989400000000000.0
    >>> peak_flops("AMD EPYC 7763", "fp32") is None
    True
    """
    if " MIG " in device_name:  # the slice's fraction of the peak is unknown
        return None
    for pattern, peaks in read_table("peak_flops").items():
        if re.search(pattern, device_name):
            return float(peaks[dtype]) if dtype in peaks else None
    return None
