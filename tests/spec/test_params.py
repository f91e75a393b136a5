"""Boxes and replicas of a parameter on its ranks."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.errors import TopologyError
from nanotrain.spec.params import LocalParam, Normal, ParamSpec, Shard, localize


def spec_of(shape: tuple[int, ...], *shards: Shard) -> ParamSpec:
    return ParamSpec(
        "layers.0.mlp.up.weight",
        shape,
        dtype="fp32",
        init=Normal(0.02),
        weight_decay=True,
        shards=shards,
    )


@given(
    tp=st.integers(1, 3),
    ep=st.integers(1, 3),
    lengths=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dims=st.tuples(st.integers(0, 1), st.integers(0, 1)),
)
def test_the_boxes_of_all_ranks_tile_the_parameter(
    tp: int, ep: int, lengths: tuple[int, int], dims: tuple[int, int]
) -> None:
    # given: two axes, each sharding a dim that it divides (perhaps the same one)
    shape = [lengths[0], lengths[1]]
    shape[dims[0]] *= tp
    shape[dims[1]] *= ep
    spec = spec_of(tuple(shape), Shard(dims[0], "tp"), Shard(dims[1], "ep"))

    # when
    count = np.zeros(shape, int)
    for tp_index, ep_index in product(range(tp), range(ep)):
        count[
            spec.box(
                {"tp": tp_index, "ep": ep_index, "pp": 0}, {"tp": tp, "ep": ep, "pp": 1}
            ).slices()
        ] += 1

    # then
    assert (count == 1).all()
    assert spec.numel == count.size


def test_an_unsharded_parameter_has_its_full_shape_on_every_rank() -> None:
    assert spec_of((4, 6)).box({"tp": 1}, {"tp": 2}).shape == (4, 6)


def test_two_shards_of_one_dim_nest_with_the_first_outside() -> None:
    spec = spec_of((8, 2), Shard(0, "ep"), Shard(0, "tp"))

    box = spec.box({"ep": 1, "tp": 0}, {"ep": 2, "tp": 2})

    assert (box.start, box.stop) == ((4, 0), (6, 2))


def test_a_dim_that_an_axis_does_not_divide_is_an_error_with_its_numbers() -> None:
    with pytest.raises(TopologyError, match=r"\(10, 4\).*tp=4.*10"):
        spec_of((10, 4), Shard(0, "tp")).box({"tp": 0}, {"tp": 4})


def test_replicas_are_numbered_over_an_axis_that_does_not_shard() -> None:
    coords, sizes = {"tp": 1, "etp": 0}, {"tp": 2, "etp": 1}
    assert localize(spec_of((4, 6), Shard(0, "tp")), coords=coords, sizes=sizes).replica_id == 0
    assert localize(spec_of((4, 6)), coords=coords, sizes=sizes).replica_id == 1
    assert localize(
        replace(spec_of((4, 6)), is_expert=True), coords=coords, sizes=sizes
    ).is_first_replica


def test_a_tied_embedding_on_the_last_stage_is_a_further_replica() -> None:
    tied = replace(spec_of((4, 6), Shard(0, "tp")), unit="embedding", stage=1)
    assert not localize(tied, coords={"tp": 0}, sizes={"tp": 2}).is_first_replica
    assert localize(replace(tied, stage=0), coords={"tp": 0}, sizes={"tp": 2}).is_first_replica


def test_without_model_parallelism_a_rank_has_all_of_a_parameter() -> None:
    local = LocalParam.unsharded(spec_of((4, 6)))
    assert local.box.shape == (4, 6) and local.is_first_replica
