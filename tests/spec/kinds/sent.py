"""Bytes that the operators of a kind send over cp."""

from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.layer_sizes import LayerSizes


def sent_over_cp(kind: str, sizes: LayerSizes) -> dict[str, tuple[int, int]]:
    """Bytes of forward and backward, by operation."""
    sent = {}
    for operator in MIXERS[kind].operators(sizes):
        for operation, forward, backward in operator.over_cp:
            before = sent.get(operation, (0, 0))
            sent[operation] = (before[0] + forward, before[1] + backward)
    return sent
