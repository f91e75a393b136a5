"""Where a parameter is in the tensors of a Hugging Face folder.

Most parameters are one tensor. Some are a slice of one (GPT-2's query, key and value; gate and up of fused experts).
Stacked experts are one tensor per expert where a family stores them apart. Some have their rows in another order
(rotary channels of DeepSeek-V3).
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from nanotrain.spec.boxes import Box

EXPERT = "{expert}"


@dataclass(frozen=True)
class TensorSlice:
    """The part of a parameter in one tensor."""

    tensor: str  # name of the tensor
    stored: Box  # box of the part in the tensor
    box: Box  # its box in the parameter
    transposed: bool  # the tensor has the last two dims of the parameter swapped
    interleaved: tuple[int, int] = (0, 1)  # as in `TensorMapping`, along the last stored dim

    def as_parameter(self, stored: Tensor) -> Tensor:
        """Stored values in the parameter's shape."""
        stored = self.picked(stored)
        return (stored.mT if self.transposed else stored).reshape(self.box.shape)

    def as_stored(self, part: Tensor) -> Tensor:
        """Values of the parameter in the shape of `picked`."""
        if self.transposed:
            return part.mT
        return part.reshape(self.stored.shape) if self.interleaved == (0, 1) else part

    def picked(self, stored: Tensor) -> Tensor:
        """The elements of the tensor's box that belong to the parameter, as a view."""
        first, step = self.interleaved
        return stored[..., first::step]


@dataclass(frozen=True)
class TensorMapping:
    """A parameter in Hugging Face tensors.

    Outputs are the last dim but one, as in [outputs, inputs] and [experts, outputs, inputs], and the dim of a bias.
    """

    tensor: str  # full name of the tensor; with {expert}, each entry of the parameter's first dim is one tensor
    shape: tuple[int, ...]  # of the parameter, without the padding of the vocabulary
    transposed: bool = False  # the tensor is [inputs, outputs] where the parameter is [outputs, inputs]
    offset: int = 0  # the first output of the parameter in the tensor
    num_outputs: int | None = None  # outputs of the tensor; None for those of the parameter
    interleaved: tuple[int, int] = (0, 1)  # of parameters whose outputs alternate: which, of how many
    is_bias: bool = False  # outputs are the last dim
    rows: tuple[int, ...] | None = None  # the row of the tensor for each row of the parameter; None for the same

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and full shapes of the tensors.

        >>> TensorMapping("experts.{expert}.w1.weight", (2, 3, 4)).tensor_shapes
        {'experts.0.w1.weight': (3, 4), 'experts.1.w1.weight': (3, 4)}
        """
        if EXPERT in self.tensor:
            return {self._of_expert(expert): self.shape[1:] for expert in range(self.shape[0])}
        dim = self._output_dim
        num_outputs = self.shape[dim] * self.interleaved[1] if self.num_outputs is None else self.num_outputs
        shape = (*self.shape[:dim], num_outputs, *self.shape[dim + 1 :])
        return {self.tensor: _swapped(shape) if self.transposed else shape}

    def slices(self, box: Box) -> Iterator[TensorSlice]:
        """A box of the parameter as slices of the tensors.

        >>> mapping = TensorMapping("c_attn.weight", (4, 4), transposed=True, offset=4, num_outputs=12)
        >>> [found.stored for found in mapping.slices(Box((1, 0), (3, 4)))]
        [Box(start=(0, 5), stop=(4, 7))]
        """
        if EXPERT in self.tensor:
            for expert in range(box.start[0], box.stop[0]):
                entry = Box((expert, *box.start[1:]), (expert + 1, *box.stop[1:]))
                yield TensorSlice(self._of_expert(expert), Box(box.start[1:], box.stop[1:]), entry, transposed=False)
        elif self.rows is not None:
            for start, stop in _runs(self.rows, start=box.start[0], stop=box.stop[0]):
                part = Box((start, *box.start[1:]), (stop, *box.stop[1:]))
                distance = self.rows[start] - start
                stored = part.shifted([distance, *[0] * (len(self.shape) - 1)])
                yield TensorSlice(self.tensor, stored, part, transposed=False)
        else:
            dim = self._output_dim
            shifted = box.shifted([self.offset if other == dim else 0 for other in range(len(self.shape))])
            factors = [self.interleaved[1] if other == dim else 1 for other in range(len(self.shape))]
            ends = [
                tuple(at * factor for at, factor in zip(ends, factors, strict=True))
                for ends in (shifted.start, shifted.stop)
            ]
            stored = Box(*(map(_swapped, ends) if self.transposed else ends))
            yield TensorSlice(self.tensor, stored, box, self.transposed, self.interleaved)

    @property
    def _output_dim(self) -> int:
        return len(self.shape) - 1 if self.is_bias else max(0, len(self.shape) - 2)

    def _of_expert(self, expert: int) -> str:
        return self.tensor.replace(EXPERT, str(expert))


def _swapped(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes with the last two swapped."""
    return (*sizes[:-2], *reversed(sizes[-2:]))


def _runs(rows: tuple[int, ...], *, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The ranges of [start, stop) whose rows follow one another.

    >>> list(_runs((0, 1, 2, 4, 3), start=1, stop=5))
    [(1, 3), (3, 4), (4, 5)]
    """
    first = start
    for row in range(start + 1, stop + 1):
        if row == stop or rows[row] != rows[row - 1] + 1:
            yield first, row
            first = row
