"""State of the distributed optimizer in the form `fully_sharded_model_space`.

A weight of the shape [X, Y], of which a model-parallel rank has [x, y], has a state of this form of
the shape [X / x, Y / y, x * y], whose last dim is sharded over data parallelism. Earlier versions
of megatron-core wrote it; 0.16.1 does not.

Source: Megatron-LM, `dist_checkpointing/strategies/torch.py`.
"""

from collections.abc import Iterator
from itertools import product
from math import prod

import torch
from torch import Tensor

from nanotrain.interop.dcp.tensors import TensorFolder
from nanotrain.spec.boxes import Box

Shape = tuple[int, ...]


def is_flattened(state: Shape, weight: Shape) -> bool:
    """Whether a state of this shape has the shards of a weight flattened.

    >>> is_flattened((2, 1, 32), (8, 8)), is_flattened((2, 1, 16), (8, 8))
    (True, False)
    """
    if len(state) != len(weight) + 1:
        return False
    counts = state[:-1]
    if any(count < 1 or size % count for count, size in zip(counts, weight, strict=True)):
        return False
    return state[-1] == prod(shard_shape(state, weight))


def shard_shape(state: Shape, weight: Shape) -> Shape:
    """The shape of the shards of a weight."""
    return tuple(size // count for count, size in zip(state[:-1], weight, strict=True))


def read_flattened(folder: TensorFolder, key: str, *, box: Box, weight: Shape) -> Tensor:
    """One box of a state whose shards are flattened.

    Args:
        folder: the checkpoint.
        key: key of the state.
        box: the box of the weight.
        weight: shape of the weight.
    """
    stored = folder.tensors[key]
    shape = shard_shape(stored.shape, weight)
    strides = torch.empty(shape, device="meta").stride()
    target = torch.empty(box.shape, dtype=stored.dtype)
    for index in product(*shards_of(box, shape)):
        start = tuple(number * size for number, size in zip(index, shape, strict=True))
        shard = Box(start, tuple(map(sum, zip(start, shape, strict=True))))
        shared = shard.intersect(box)
        if shared is None:
            continue
        inner = shared.within(shard)
        first = flat_index(inner.start, strides)
        last = flat_index(tuple(stop - 1 for stop in inner.stop), strides) + 1
        end = tuple(number + 1 for number in index)
        values = folder.read(key, Box((*index, first), (*end, last))).flatten()
        target[shared.within(box).slices()] = values.as_strided(inner.shape, strides)
    return target


def shards_of(box: Box, shape: Shape) -> Iterator[range]:
    """The shards that a box touches, along each dim."""
    for start, stop, size in zip(box.start, box.stop, shape, strict=True):
        yield range(start // size, -(-stop // size))


def flat_index(index: Shape, strides: Shape) -> int:
    """The element of a flattened shard."""
    return sum(number * stride for number, stride in zip(index, strides, strict=True))
