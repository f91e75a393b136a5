"""All-gathers of a step: units of groups that are recomputed, blocks of memory, tied embeddings."""

from collections import Counter
from collections.abc import Sequence

import pytest

from nanotrain.parallel.dp.units import GatherOrder
from nanotrain.parallel.pp.actions import ActionKind
from nanotrain.plan.gathers import step_gathers

# embedding, five layers, final norm, head
UNITS = [(number,) for number in range(8)]
TWO, ALL = [range(1, 3), range(3, 5), range(5, 6)], [range(1, 6)]


def backward_gathers(
    groups: Sequence[range],
    *,
    ahead: int,
    units: Sequence[tuple[int, ...]] = UNITS,
    blocks: Sequence[str] = (),
) -> Counter[int]:
    """The all-gathers of one backward."""
    order = GatherOrder(filter(None, units), num_prefetched=ahead, blocks=blocks)
    return step_gathers([ActionKind.full_backward], units, order=order, groups=groups)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_without_groups_every_unit_is_gathered_once(ahead: int) -> None:
    for groups in ([], [range(i, i + 1) for i in range(1, 6)]):
        assert dict(backward_gathers(groups, ahead=ahead)) == dict.fromkeys(range(8), 1), groups


@pytest.mark.parametrize(
    ("groups", "ahead", "twice"),
    [
        # gathered to be run again, freed for the last layer of the group, gathered for its backward
        (TWO, 0, {1, 3}),
        (TWO, 1, set()),  # gathered ahead, and kept
        (ALL, 0, {1, 2, 3, 4}),
        (ALL, 1, {1, 2, 3, 4}),  # layer 4 ahead, freed for layer 1, and kept once it was run again
    ],
)
def test_the_layers_of_a_group_but_the_last_are_gathered_again(
    groups: list, ahead: int, twice: set
) -> None:
    counts = backward_gathers(groups, ahead=ahead)
    assert {unit for unit, count in counts.items() if count == 2} == twice
    assert set(counts.values()) <= {1, 2}


def test_a_block_of_memory_holds_one_unit() -> None:
    """With two blocks the third layer of a group takes the memory of the first; the last one is
    gathered again.
    """
    counts = backward_gathers(
        [range(1, 4)], ahead=1, blocks=[str(number % 2) for number in range(8)]
    )
    assert counts[3] == 2 and counts[1] == 2


def test_modules_of_another_buffer_are_left_out() -> None:
    """Experts in layers 1 and 3: gathered when the backward of layer 2 or 4 runs the group again,
    and kept.
    """
    units: list[tuple[int, ...]] = [(), (0,), (), (1,), (), ()]
    assert dict(backward_gathers([range(1, 3), range(3, 5)], ahead=0, units=units)) == {0: 1, 1: 1}


def test_a_tied_embedding_is_read_at_both_ends() -> None:
    assert backward_gathers([], ahead=1, units=[(0,), (1,), (2,), (0,)])[0] == 2
