"""The boxes that ranks hold of a parameter tile it."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.errors import TopologyError
from nanotrain.topology.params import ParamKind, ParamSpec, Shard


def spec_of(shape: tuple[int, ...], *shards: Shard) -> ParamSpec:
    return ParamSpec("layers.0.mlp.up.weight", shape, dtype="fp32", kind=ParamKind.matrix, shards=shards)


@given(
    tp=st.integers(1, 3),
    ep=st.integers(1, 3),
    pieces=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dims=st.tuples(st.integers(0, 1), st.integers(0, 1)),
)
def test_the_boxes_of_all_ranks_tile_the_parameter(
    tp: int, ep: int, pieces: tuple[int, int], dims: tuple[int, int]
) -> None:
    # given: two axes, each cutting a dim that it divides (perhaps the same one)
    shape = [pieces[0], pieces[1]]
    shape[dims[0]] *= tp
    shape[dims[1]] *= ep
    spec = spec_of(tuple(shape), Shard(dims[0], "tp"), Shard(dims[1], "ep"))

    # when
    held = np.zeros(shape, int)
    for tp_index, ep_index in product(range(tp), range(ep)):
        held[spec.box({"tp": tp_index, "ep": ep_index, "pp": 0}, {"tp": tp, "ep": ep, "pp": 1}).slices()] += 1

    # then
    assert (held == 1).all()
    assert spec.numel == held.size


def test_an_uncut_parameter_is_whole_on_every_rank() -> None:
    assert spec_of((4, 6)).box({"tp": 1}, {"tp": 2}).shape == (4, 6)


def test_two_cuts_of_one_dim_nest_with_the_first_outside() -> None:
    spec = spec_of((8, 2), Shard(0, "ep"), Shard(0, "tp"))

    box = spec.box({"ep": 1, "tp": 0}, {"ep": 2, "tp": 2})

    assert (box.start, box.stop) == ((4, 0), (6, 2))


def test_a_dim_that_an_axis_cannot_cut_is_an_error_with_its_numbers() -> None:
    with pytest.raises(TopologyError, match=r"\(10, 4\).*tp=4.*10"):
        spec_of((10, 4), Shard(0, "tp")).box({"tp": 0}, {"tp": 4})


def test_only_matrices_decay() -> None:
    assert spec_of((4, 6)).decays
    assert not spec_of((4,)).decays
