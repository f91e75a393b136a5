"""The all-gathers of one backward, where layers are recomputed in groups; measured bytes are in tests/laws."""

import pytest

from nanotrain.train.plans.gathers import BackwardGathers

# embedding, five layers, final norm, head
UNITS = [(number,) for number in range(8)]
TWO, ALL = [range(1, 3), range(3, 5), range(5, 6)], [range(1, 6)]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_without_groups_every_unit_is_gathered_once(ahead: int) -> None:
    for groups in ([], [range(i, i + 1) for i in range(1, 6)]):
        counts = BackwardGathers(UNITS, num_prefetched=ahead).run(groups)
        assert dict(counts) == dict.fromkeys(range(8), 1)


@pytest.mark.parametrize(
    ("groups", "ahead", "twice"),
    [
        (TWO, 0, {1, 3}),  # gathered to be run again, freed for the last layer of the group, gathered for its backward
        (TWO, 1, set()),  # gathered ahead, and kept
        (ALL, 0, {1, 2, 3, 4}),
        (ALL, 1, {1, 2, 3, 4}),  # layer 4 ahead, freed for layer 1, and kept once it was run again
    ],
)
def test_the_layers_of_a_group_but_the_last_are_gathered_again(groups: list, ahead: int, twice: set) -> None:
    counts = BackwardGathers(UNITS, num_prefetched=ahead).run(groups)
    assert {unit for unit, count in counts.items() if count == 2} == twice
    assert set(counts.values()) <= {1, 2}


def test_a_block_of_memory_holds_one_unit() -> None:
    """With two blocks the third layer of a group takes the memory of the first; the last one is gathered again."""
    blocks = [str(number % 2) for number in range(8)]
    counts = BackwardGathers(UNITS, num_prefetched=1, blocks=blocks).run([range(1, 4)])
    assert counts[3] == 2 and counts[1] == 2


def test_modules_of_another_buffer_are_left_out() -> None:
    """Experts in layers 1 and 3: gathered when the backward of layer 2 or 4 runs the group again, and kept."""
    units = [(), (0,), (), (1,), (), ()]
    counts = BackwardGathers(units, num_prefetched=0).run([range(1, 3), range(3, 5)])
    assert dict(counts) == {0: 1, 1: 1}


def test_a_tied_embedding_is_read_at_both_ends() -> None:
    assert BackwardGathers([(0,), (1,), (2,), (0,)], num_prefetched=1).run([])[0] == 2
