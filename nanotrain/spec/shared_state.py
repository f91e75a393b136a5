"""State that a layer keeps for later layers: pure, without torch.

    SHARED          one row per kind of state: the shapes of its tensors
    shared_width    elements per hidden state of some state, on one rank
    message_width   elements per hidden state of a message between two pipeline stages

Which layer keeps and which reads what is in `ModelShape`: `sources`, `kept` and `carried`. Between
two stages the state that a later stage reads is sent along with the hidden states, as one flat
tensor (model/shared_state.py).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.residuals import stream_width
from nanotrain.spec.shape import Source

Shapes = tuple[tuple[int, ...], ...]
POSITION_DIGITS = 3  # of a position in base 256, so bf16 holds each of them


@dataclass(frozen=True)
class SharedState:
    """A kind of state."""

    # the trailing dims of its tensors [B, S, ...] on one rank, with the sizes of the layer
    shapes: Callable[[LayerSizes], Shapes]
    # [B, S/tp, ...] with sequence parallelism, as hidden states
    is_outside: bool = False
    # the layer that keeps it saves it for its backward
    is_saved: bool = True
    # every tp rank has its own heads; other state is equal on them, or sharded as hidden states
    is_of_heads: bool = False


def key_value_shapes(s: LayerSizes) -> Shapes:
    """Keys and values of the heads of a tp rank, normalized and rotated."""
    groups = max(1, s.shape.query_groups // s.tp)
    return (groups, s.shape.head_dim), (groups, s.shape.value_head_dim)


def layer_input_shapes(s: LayerSizes) -> Shapes:
    """The shape of the input that a layer has for itself."""
    return ((s.shape.layer_input_size,),)


def selection_shapes(s: LayerSizes) -> Shapes:
    """Digits of the positions of the selected keys, which every dtype of hidden states holds."""
    assert s.shape.dsa is not None, "a layer of sparse attention has its sizes"
    return ((s.shape.dsa.topk, POSITION_DIGITS),)


SHARED: dict[str, SharedState] = {
    "key_value": SharedState(key_value_shapes, is_of_heads=True),
    "selection": SharedState(selection_shapes, is_saved=False),
    "layer_input": SharedState(layer_input_shapes, is_outside=True),
}


def state_shapes(s: LayerSizes, source: Source) -> Shapes:
    """The trailing dims of the tensors that a layer keeps."""
    return SHARED[source.kind].shapes(s.at(source.layer))


def tensor_widths(s: LayerSizes, source: Source) -> list[int]:
    """Elements per hidden state of the rank of every tensor that a layer keeps.

    With sequence parallelism a rank has one hidden state for every tp tokens.
    """
    tokens_per_hidden = s.tokens // s.outside
    if SHARED[source.kind].is_outside:
        tokens_per_hidden = 1
    shapes = state_shapes(s, source)
    return [tokens_per_hidden * prod(shape) for shape in shapes]


def shared_width(s: LayerSizes, sources: Iterable[Source]) -> int:
    """Elements per hidden state of the rank of some state."""
    width = 0
    for source in sources:
        width += sum(tensor_widths(s, source))
    return width


def shared_bytes(s: LayerSizes, sources: Iterable[Source]) -> int:
    """Bytes of a microbatch of some state on the rank."""
    return s.outside * shared_width(s, sources) * s.itemsize


def message_width(s: LayerSizes, first_layer: int) -> int:
    """Elements per hidden state of the message to the stage that begins with a layer."""
    sources = s.shape.carried(first_layer)
    carried = shared_width(s, sources)
    return stream_width(s.shape) + carried
