"""Which units are all-gathered and freed when."""

import pytest

from nanotrain.parallel.dp.units import GatherChange, GatherOrder

UNITS = [(3,), (2,), (1,), (0,)]


def forward_all(order: GatherOrder, *, is_loss: bool = False) -> list[tuple[int, ...]]:
    """The all-gathers of one forward, per unit."""
    started = []
    for index in range(len(order.units)):
        started.append(order.before_forward(index).started)
        order.after_forward(index, has_backward=True, is_loss=is_loss)
    return started


def backward_all(order: GatherOrder) -> list[tuple[int, ...]]:
    """The all-gathers of one backward, per unit."""
    return [order.before_backward(index).started for index in reversed(range(len(order.units)))]


@pytest.mark.parametrize(
    ("ahead", "of_forward", "of_backward"),
    [
        (0, [(3,), (2,), (1,), (0,)], [(0,), (1,), (2,), (3,)]),
        (1, [(3, 2), (1,), (0,), ()], [(0, 1), (2,), (3,), ()]),
        (2, [(3, 2, 1), (0,), (), ()], [(0, 2, 1), (3,), (), ()]),
    ],
)
def test_a_unit_is_gathered_before_it_runs_and_those_ahead_start_after_it(
    ahead: int, of_forward: list[tuple[int, ...]], of_backward: list[tuple[int, ...]]
) -> None:
    order = GatherOrder(UNITS, num_prefetched=ahead)
    assert forward_all(order) == of_forward and order.free() == GatherChange(())
    assert backward_all(order) == of_backward
    assert order.free().freed


def test_the_unit_of_the_loss_is_kept_for_its_backward_and_a_lookup_is_not_gathered_for_its_own() -> (
    None
):
    order = GatherOrder(UNITS, num_prefetched=0, lookups=[0])
    forward_all(order, is_loss=True)
    assert order.free() == GatherChange(()), "the backward begins"
    assert backward_all(order) == [(), (1,), (2,), ()]
    forward_all(order, is_loss=True)
    assert order.before_forward(0) == GatherChange(freed=(0,), started=(3,)), (
        "another forward is next"
    )
    forward_all(order, is_loss=True)
    assert order.begin_step().freed == (0,)
    assert (
        not GatherOrder(UNITS, num_prefetched=1, reshards=False, lookups=[0])
        .after_forward(0, has_backward=True)
        .freed
    )


def test_without_resharding_a_unit_is_kept_until_its_last_backward() -> None:
    order = GatherOrder(UNITS, num_prefetched=0, reshards=False)
    assert forward_all(order) == [(3,), (2,), (1,), (0,)] and forward_all(order) == [()] * 4
    assert backward_all(order) == [()] * 4 and order.free() == GatherChange(())
    assert backward_all(order) == [()] * 4 and order.free().freed == (3,)
    forward_all(order)
    assert len(order.begin_step().freed) == 4, "a forward without a backward"


def test_a_forward_without_a_backward_keeps_no_unit() -> None:
    order = GatherOrder(UNITS, num_prefetched=0, reshards=False)
    order.before_forward(0)
    assert order.after_forward(0, has_backward=False).freed == (3,)


def test_a_bucket_of_two_units_is_kept_between_neighbours() -> None:
    order = GatherOrder([(1, 0), (0,)], num_prefetched=0)
    assert order.before_forward(0).started == (1, 0)
    assert order.before_forward(1) == GatherChange(freed=(1,))


def test_while_all_are_gathered_nothing_is_started_or_freed() -> None:
    order = GatherOrder(UNITS, num_prefetched=1, reshards=False)
    order.before_forward(0)
    assert sorted(order.gather_all()) == [0, 1, 2, 3]
    assert forward_all(order) == backward_all(order) == [()] * 4 and order.free() == GatherChange(
        ()
    )
    assert sorted(order.free_all().freed) == [0, 1, 2, 3]


def test_a_unit_that_runs_again_takes_the_block_of_one_that_comes_later() -> None:
    order = GatherOrder(UNITS, num_prefetched=1, blocks=["odd", "even", "odd", "even"])
    assert order.before_backward(2).started == (1, 2)
    assert order.before_recomputation(0) == GatherChange(freed=(1, 2), started=(3,))
    assert order.before_recomputation(1) == GatherChange(freed=(3,), started=(2,))
    apart = GatherOrder(UNITS, num_prefetched=1)
    apart.before_backward(2)
    assert apart.before_recomputation(0) == GatherChange(freed=(2,), started=(3,)), (
        "that of the waiting backward stays"
    )
