"""A parameter in the tensors of Hugging Face files.

TensorMapping   the tensors of one parameter: names, shapes, and slices for any box
TensorSlice     the part of a parameter in one tensor, and its values in either layout
Interleave      outputs of several parameters that alternate in one tensor
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from nanotrain.spec.boxes import Box

EXPERT = "{expert}"
Shape = tuple[int, ...]


class Interleave(NamedTuple):
    """Outputs of several parameters that alternate along the last dim of a tensor."""

    first: int = 0  # number of this parameter among them
    step: int = 1  # number of parameters


@dataclass(frozen=True)
class TensorSlice:
    """The part of a parameter in one tensor."""

    tensor: str  # name of the tensor
    stored: Box  # box of the part in the tensor
    box: Box  # box of the part in the parameter
    transposed: bool  # the tensor has the last two dims of the parameter swapped
    interleaved: Interleave = Interleave()  # as in `TensorMapping`

    def as_parameter(self, stored: Tensor) -> Tensor:
        """Stored values in the parameter's shape."""
        stored = self.picked(stored)
        if self.transposed:
            stored = stored.mT
        return stored.reshape(self.box.shape)

    def as_stored(self, part: Tensor) -> Tensor:
        """Values of the parameter as the file stores them, the inverse of `as_parameter`.

        Of interleaved tensors only the elements of this parameter (`picked`).
        """
        if self.transposed:
            return part.mT
        if self.interleaved.step == 1:
            return part.reshape(self.stored.shape)
        return part

    def picked(self, stored: Tensor) -> Tensor:
        """The elements of the tensor's box that belong to the parameter, as a view."""
        return stored[..., self.interleaved.first :: self.interleaved.step]


@dataclass(frozen=True)
class TensorMapping:
    """A parameter in Hugging Face tensors.

    Outputs are the last dim but one, as in [outputs, inputs] and [experts, outputs, inputs], and
    the last dim of a bias.
    """

    # full name of the tensor; with {expert}, there is one tensor per expert (the first dim)
    tensor: str
    shape: Shape  # shape of the parameter, without the padding of the vocabulary
    # the tensor is [inputs, outputs] where the parameter is [outputs, inputs]
    transposed: bool = False
    offset: int = 0  # first output of the parameter in the tensor
    num_outputs: int | None = None  # outputs of the tensor; None for as many as the parameter's
    interleaved: Interleave = Interleave()  # position among alternating parameters
    is_bias: bool = False  # outputs are the last dim
    # row of the tensor for every row of the parameter; None where both have the same order
    rows: tuple[int, ...] | None = None
    unsqueezed: Sequence[int] = ()  # dims of size 1 that only the tensor has

    @property
    def tensor_shapes(self) -> dict[str, Shape]:
        """Names and full shapes of the tensors.

        >>> TensorMapping("experts.{expert}.w1.weight", (2, 3, 4)).tensor_shapes
        {'experts.0.w1.weight': (3, 4), 'experts.1.w1.weight': (3, 4)}
        """
        if EXPERT in self.tensor:
            return {self._expert_tensor(index): self.shape[1:] for index in range(self.shape[0])}
        dim = self._output_dim
        num_outputs = self.num_outputs
        if num_outputs is None:
            num_outputs = self.shape[dim] * self.interleaved.step
        shape = (*self.shape[:dim], num_outputs, *self.shape[dim + 1 :])
        if self.transposed:
            return {self.tensor: _swap_last_two(shape)}
        return {self.tensor: _insert(shape, self.unsqueezed, value=1)}

    def slices(self, box: Box) -> Iterator[TensorSlice]:
        """A box of the parameter as slices of the tensors.

        >>> mapping = TensorMapping("c.weight", (4, 4), transposed=True, offset=4, num_outputs=12)
        >>> [part.stored for part in mapping.slices(Box((1, 0), (3, 4)))]
        [Box(start=(0, 5), stop=(4, 7))]
        """
        if EXPERT in self.tensor:
            yield from self._expert_slices(box)
        elif self.rows is not None:
            yield from self._row_slices(self.rows, box)
        else:
            start = _insert(self._corner(box.start), self.unsqueezed, value=0)
            stop = _insert(self._corner(box.stop), self.unsqueezed, value=1)
            stored = Box(start, stop)
            yield TensorSlice(self.tensor, stored, box, self.transposed, self.interleaved)

    def _expert_slices(self, box: Box) -> Iterator[TensorSlice]:
        """One slice per expert; every expert has its own tensor."""
        stored = Box(box.start[1:], box.stop[1:])
        for expert in range(box.start[0], box.stop[0]):
            part = Box((expert, *stored.start), (expert + 1, *stored.stop))
            yield TensorSlice(self._expert_tensor(expert), stored, part, transposed=False)

    def _row_slices(self, rows: tuple[int, ...], box: Box) -> Iterator[TensorSlice]:
        """One slice per run of rows that follow one another in the tensor too."""
        for start, stop in _runs(rows, start=box.start[0], stop=box.stop[0]):
            part = Box((start, *box.start[1:]), (stop, *box.stop[1:]))
            distance = [0] * len(self.shape)
            distance[0] = rows[start] - start
            yield TensorSlice(self.tensor, part.shifted(distance), part, transposed=False)

    def _corner(self, corner: Shape) -> Shape:
        """A corner of a box of the parameter, in the tensor."""
        dim = self._output_dim
        output = (corner[dim] + self.offset) * self.interleaved.step
        moved = (*corner[:dim], output, *corner[dim + 1 :])
        return _swap_last_two(moved) if self.transposed else moved

    @property
    def _output_dim(self) -> int:
        if self.is_bias:
            return len(self.shape) - 1
        return max(0, len(self.shape) - 2)

    def _expert_tensor(self, expert: int) -> str:
        return self.tensor.replace(EXPERT, str(expert))


def _insert(sizes: Shape, dims: Sequence[int], *, value: int) -> Shape:
    """Insert a value at some dims.

    >>> _insert((8, 4), [1], value=1)
    (8, 1, 4)
    """
    for dim in dims:
        sizes = (*sizes[:dim], value, *sizes[dim:])
    return sizes


def _swap_last_two(sizes: Shape) -> Shape:
    return (*sizes[:-2], *reversed(sizes[-2:]))


def _runs(rows: tuple[int, ...], *, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Ranges (first, stop) of [start, stop) whose rows follow one another.

    >>> list(_runs((0, 1, 2, 4, 3), start=1, stop=5))
    [(1, 3), (3, 4), (4, 5)]
    """
    first = start
    for row in range(start + 1, stop + 1):
        if row == stop or rows[row] != rows[row - 1] + 1:
            yield first, row
            first = row
