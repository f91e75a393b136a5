"""Messages between pipeline stages: hidden states, and state of layers that a later stage reads.

    [hidden | key of layer 12 | value of layer 12 | key of layer 14 | ...]   one flat tensor

Without such state a message is the hidden states as they are. The tensors of a received message are
views of it, and autograd sums the gradients of its readers into the gradient of the message.

    B batch   S sequence   H hidden
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from nanotrain.parallel.tp.layers import TensorParallel
from nanotrain.spec.layer_sizes import LayerSizes
from nanotrain.spec.residuals import stream_width
from nanotrain.spec.shape import ModelShape, Source
from nanotrain.spec.shared_state import message_width, state_shapes, tensor_widths
from nanotrain.spec.stages import StageSpec

State = dict[Source, tuple[Tensor, ...]]  # kept tensors by their source


class StageMessages:
    """The messages that a stage receives and sends.

    Args:
        shape: shape of the model.
        spec: layers of the stage.
        tensor_parallel: shards heads, and with sequence parallelism hidden states.

    Attributes:
        widths: elements per hidden state of the received and of the sent message.
    """

    def __init__(
        self, shape: ModelShape, spec: StageSpec, *, tensor_parallel: TensorParallel
    ) -> None:
        tp = tensor_parallel.group.size
        self._sizes = LayerSizes(
            shape,
            batch_size=1,
            seq_length=tp,
            tp=tp,
            sequence_parallel=tensor_parallel.sequence_parallel,
        )
        self._received = shape.carried(spec.first_layer)
        self._sent = shape.carried(spec.last_layer)
        self.widths = (
            message_width(self._sizes, spec.first_layer),
            message_width(self._sizes, spec.last_layer),
        )

    def unpack(self, message: Tensor, *, batch_shape: torch.Size) -> tuple[Tensor, State]:
        """The hidden states [B, S or S/tp, H] and the state of a received message.

        Args:
            message: as `pack` returns it.
            batch_shape: [B, S], tokens of the rank.
        """
        if not self._received:
            return message, {}
        width = stream_width(self._sizes.shape)
        num_hidden = batch_shape.numel() * self._sizes.outside // self._sizes.tokens
        numels = [num_hidden * numel for numel in self._received_widths()]
        pieces = iter(message.split([num_hidden * width, *numels]))
        hidden = next(pieces)
        state: State = {}
        for source in self._received:
            tensors = []
            for shape in state_shapes(self._sizes, source):
                flat = next(pieces)
                tensors.append(flat.view(batch_shape[0], -1, *shape))
            state[source] = tuple(tensors)
        return hidden.view(batch_shape[0], -1, width), state

    def _received_widths(self) -> list[int]:
        """Elements per hidden state of the tensors of a received message."""
        widths: list[int] = []
        for source in self._received:
            widths += tensor_widths(self._sizes, source)
        return widths

    def pack(self, hidden: Tensor, state: Mapping[Source, tuple[Tensor, ...]]) -> Tensor:
        """The message to the next stage: hidden states [B, S or S/tp, H], or one flat tensor."""
        if not self._sent:
            return hidden
        flat = [hidden.flatten()]
        for source in self._sent:
            flat += [x.flatten() for x in state[source]]
        return torch.cat(flat)
