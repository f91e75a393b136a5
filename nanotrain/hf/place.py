"""Where a parameter lies in the tensors of a Hugging Face folder.

Most parameters are one tensor. Some are a part of one (GPT-2's query, key and value; gate and up of fused experts), and
the stacked matrices of our experts are as many tensors as there are experts where a family keeps them apart.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from nanotrain.topology.boxes import Box

EXPERT = "{expert}"


@dataclass(frozen=True)
class Piece:
    """The part of a parameter that lies in one tensor.

    Args:
        tensor: the tensor's name.
        stored: the part's box in the tensor.
        box: its box in the parameter.
        transposed: the tensor has the parameter's last two dims swapped.
    """

    tensor: str
    stored: Box
    box: Box
    transposed: bool

    def as_parameter(self, stored: Tensor) -> Tensor:
        """What was read from the tensor, in the parameter's shape."""
        return (stored.t() if self.transposed else stored).reshape(self.box.shape)

    def as_stored(self, part: Tensor) -> Tensor:
        """A part of the parameter, in the tensor's shape."""
        return part.t() if self.transposed else part.reshape(self.stored.shape)


@dataclass(frozen=True)
class Place:
    """A parameter's place in Hugging Face tensors.

    Args:
        tensor: the tensor's name; with {expert} in it, every entry of the parameter's first dim is a tensor of its own.
        shape: the parameter's shape, padding of the vocabulary cut off.
        transposed: the tensor is [inputs, outputs] where the parameter is [outputs, inputs].
        offset: outputs of the tensor that belong to the parameters before this one.
        outputs: outputs of the whole tensor; unset where the parameter is all of them.

    Outputs are the last dim but one, as in [outputs, inputs] and [experts, outputs, inputs], and all of a bias.
    """

    tensor: str
    shape: tuple[int, ...]
    transposed: bool = False
    offset: int = 0
    outputs: int | None = None

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors in the file and their whole shapes.

        >>> Place("experts.{expert}.w1.weight", (2, 3, 4)).tensor_shapes
        {'experts.0.w1.weight': (3, 4), 'experts.1.w1.weight': (3, 4)}
        """
        if EXPERT in self.tensor:
            return {self._name(expert): self.shape[1:] for expert in range(self.shape[0])}
        dim = self._output_dim
        shape = (*self.shape[:dim], self.outputs or self.shape[dim], *self.shape[dim + 1 :])
        return {self.tensor: shape[::-1] if self.transposed else shape}

    def pieces(self, box: Box) -> Iterator[Piece]:
        """A box of the parameter as its pieces in the tensors.

        >>> place = Place("c_attn.weight", (4, 4), transposed=True, offset=4, outputs=12)
        >>> [piece.stored for piece in place.pieces(Box((1, 0), (3, 4)))]
        [Box(start=(0, 5), stop=(4, 7))]
        """
        if EXPERT in self.tensor:
            for expert in range(box.start[0], box.stop[0]):
                entry = Box((expert, *box.start[1:]), (expert + 1, *box.stop[1:]))
                yield Piece(self._name(expert), Box(box.start[1:], box.stop[1:]), entry, transposed=False)
            return
        moved = box.shifted(tuple(self.offset if dim == self._output_dim else 0 for dim in range(len(self.shape))))
        stored = Box(moved.start[::-1], moved.stop[::-1]) if self.transposed else moved
        yield Piece(self.tensor, stored, box, self.transposed)

    @property
    def _output_dim(self) -> int:
        return max(0, len(self.shape) - 2)

    def _name(self, expert: int) -> str:
        return self.tensor.replace(EXPERT, str(expert))
