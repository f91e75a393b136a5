"""Static copies of contexts, and what of a context is part of a capture."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from nanotrain.memory.static_inputs import ContextBuffers, NotCapturable, describe, map_tensors


@dataclass(frozen=True)
class Inputs:
    """A context with a table, a factor and anything else."""

    tables: tuple[torch.Tensor, ...]
    factor: float = 1.0
    other: Any = None


INPUTS = Inputs((torch.ones(2), torch.zeros(3)))


def test_tensors_are_replaced_by_path():
    paths: list[str] = []
    mapped = map_tensors(INPUTS, lambda path, tensor: paths.append(path) or 2 * tensor)
    assert paths == [".tables.0", ".tables.1"]
    assert mapped.tables[0].tolist() == [2.0, 2.0] and mapped.factor == 1.0


def test_contexts_are_equal_but_for_values():
    same = replace(INPUTS, tables=(torch.zeros(2), torch.ones(3)))
    assert describe(same) == describe(INPUTS)
    shorter = replace(INPUTS, tables=(torch.zeros(1), torch.ones(3)))
    assert describe(shorter) != describe(INPUTS)
    assert describe(replace(INPUTS, factor=2.0)) != describe(INPUTS)
    with pytest.raises(NotCapturable, match="a range is made for every microbatch"):
        describe(replace(INPUTS, other=range(3)))


def test_a_tensor_is_copied_where_it_has_changed():
    buffers, table = ContextBuffers(), torch.ones(2)
    static = buffers.load("table", table)
    assert static is not table and static.tolist() == [1.0, 1.0]
    static.fill_(7.0)
    assert buffers.load("table", table.view(2)).tolist() == [7.0, 7.0], "it holds this one"
    table.add_(1)
    assert buffers.load("table", table) is static and static.tolist() == [2.0, 2.0]
    assert buffers.load("table", torch.tensor([4.0, 4.0])).tolist() == [4.0, 4.0]
    assert buffers.load("table", torch.ones(3)).shape == (3,)


def test_the_context_of_a_microbatch_in_flight_is_not_overwritten():
    buffers = ContextBuffers()
    buffers.load("table", torch.ones(2))
    buffers.num_in_flight = 1
    with pytest.raises(AssertionError, match="in flight"):
        buffers.load("table", torch.zeros(2))
