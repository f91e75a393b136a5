"""Pipeline stages hold every layer once, as evenly as it goes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.errors import TopologyError
from nanotrain.topology.stages import split_layers


@given(num_stages=st.integers(1, 20), more=st.integers(0, 40))
def test_every_layer_stands_in_one_stage_in_order(num_stages: int, more: int) -> None:
    stages = split_layers(num_stages + more, num_stages)

    assert [layer for stage in stages for layer in stage.layers] == list(range(num_stages + more))
    assert [stage.index for stage in stages] == list(range(num_stages))


@given(num_stages=st.integers(1, 20), more=st.integers(0, 40))
def test_no_stage_is_longer_than_another_by_more_than_a_layer(num_stages: int, more: int) -> None:
    lengths = [len(stage.layers) for stage in split_layers(num_stages + more, num_stages)]

    assert max(lengths) - min(lengths) <= 1
    assert lengths[-1] == min(lengths)  # the last stage computes the head as well


@given(num_stages=st.integers(1, 20))
def test_tokens_enter_the_first_stage_and_the_loss_leaves_the_last(num_stages: int) -> None:
    stages = split_layers(num_stages, num_stages)

    assert [stage.index for stage in stages if stage.has_embedding] == [0]
    assert [stage.index for stage in stages if stage.has_head] == [num_stages - 1]


def test_more_stages_than_layers_is_an_error_with_a_cure() -> None:
    with pytest.raises(TopologyError, match="--pipeline-model-parallel-size to at most 3"):
        split_layers(3, 4)
