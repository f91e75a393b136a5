"""Pipeline stages hold every layer once, as evenly as it goes."""

from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.spec.stages import balanced_lengths, split_layers


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


@given(
    stages=st.integers(2, 10),
    more=st.integers(0, 30),
    first=st.integers(1, 9),
    last=st.integers(1, 9),
)
def test_the_ends_have_the_lengths_that_were_asked_for(
    stages: int, more: int, first: int, last: int
) -> None:
    between = stages - 2
    total = first + last + (between + more if between else 0)
    lengths = [len(stage.layers) for stage in split_layers(total, stages, first=first, last=last)]

    assert (lengths[0], lengths[-1], sum(lengths)) == (first, last, total)
    assert not lengths[1:-1] or max(lengths[1:-1]) - min(lengths[1:-1]) <= 1


def test_ends_that_count_as_layers_leave_a_single_stage_all_layers() -> None:
    assert [len(stage.layers) for stage in split_layers(4, 1, counted_ends=(1, 1))] == [4]


@given(
    stages=st.integers(2, 10),
    more=st.integers(0, 30),
    length=st.integers(1, 9),
    is_first=st.booleans(),
)
def test_one_end_alone_may_be_given(stages: int, more: int, length: int, is_first: bool) -> None:
    total = length + stages - 1 + more
    split = split_layers(
        total, stages, first=length if is_first else None, last=None if is_first else length
    )

    assert len(split[0 if is_first else -1].layers) == length
    assert [layer for stage in split for layer in stage.layers] == list(range(total))


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "ends", "lengths"),
    [
        (34, 4, {"last": 4}, [15, 2, 15, 2]),
        (16, 8, {"first": 2, "last": 2}, [1, 3, 3, 1, 1, 3, 3, 1]),
        (13, 6, {"first": 4}, [2, 3, 2, 2, 2, 2]),
        (12, 4, {"first": 4, "last": 8}, [2, 4, 2, 4]),
    ],
)
def test_virtual_stages_share_the_layers_of_their_rank(
    num_layers, num_stages, ends, lengths
) -> None:
    stages = split_layers(num_layers, num_stages, **ends, stages_per_rank=2)
    assert [len(stage.layers) for stage in stages] == lengths
    assert [layer for stage in stages for layer in stage.layers] == list(range(num_layers))


@given(costs=st.lists(st.integers(1, 9), min_size=2, max_size=9), data=st.data())
def test_balanced_stages_have_the_least_maximum_of_all_splits(
    costs: list[int], data: st.DataObject
) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))

    def most(ends: tuple[int, ...]) -> int:
        return max(sum(costs[start:end]) for start, end in pairwise((0, *ends, len(costs))))

    lengths = balanced_lengths(tuple(costs), num_stages)

    assert len(lengths) == num_stages and min(lengths) >= 1 and sum(lengths) == len(costs)
    expected = min(map(most, combinations(range(1, len(costs)), num_stages - 1)))
    assert most(tuple(accumulate(lengths))[:-1]) == expected
