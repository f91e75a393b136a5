"""Plans of a relayout: each wanted element once, no byte that a rank holds, balanced sources."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from nanotrain.checkpoint.transfers import (
    PIECE_BYTES,
    NotHeld,
    Transfer,
    TransferPlan,
    plan_transfers,
    schedule_rounds,
    subtract,
)
from nanotrain.spec.boxes import Box, TensorBox
from tests.checkpoint.test_plan import covers

SIZES = {"a": 4, "b": 2}
Boxes = list[list[TensorBox]]


@st.composite
def layouts(draw: st.DrawFn, shapes: dict[str, tuple[int, ...]], num_ranks: int) -> Boxes:
    """Boxes of every rank that cover each tensor once per replica; some ranks may hold nothing."""
    boxes: Boxes = [[] for _ in range(num_ranks)]
    for name, shape in shapes.items():
        replicas = draw(st.integers(1, num_ranks))
        owners = draw(st.permutations(range(num_ranks)))
        for replica in range(replicas):
            members = owners[replica::replicas]
            for box in draw(covers(shape)):
                boxes[draw(st.sampled_from(members))].append(TensorBox(name, shape, box))
    return boxes


@st.composite
def changes(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], Boxes, Boxes]:
    """Shapes of two tensors, and the boxes of one to five ranks before and after."""
    num_ranks = draw(st.integers(1, 5))
    shape = st.lists(st.integers(1, 6), max_size=3).map(tuple)
    shapes = {"a": draw(shape), "b": draw(shape)}
    return shapes, draw(layouts(shapes, num_ranks)), draw(layouts(shapes, num_ranks))


def elements(boxes: list[TensorBox], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """How often the boxes have each element of a tensor."""
    counts = np.zeros(shape, dtype=int)
    for box in boxes:
        if box.name == name:
            counts[box.box.slices()] += 1
    return counts


def of_ranks(plan: TransferPlan) -> tuple[Transfer, ...]:
    return plan.kept + plan.sent


@given(changes())
def test_each_wanted_element_comes_once_from_a_rank_that_holds_it(
    change: tuple[dict[str, tuple[int, ...]], Boxes, Boxes],
) -> None:
    shapes, held, wanted = change
    plan = plan_transfers(held, wanted, element_bytes=SIZES)

    for transfer in of_ranks(plan):
        assert transfer.held in held[transfer.source]
        assert transfer.wanted in wanted[transfer.destination]
        assert transfer.box.intersect(transfer.held.box) == transfer.box
        assert transfer.nbytes == transfer.box.numel * SIZES[transfer.held.name]
    for rank, boxes in enumerate(wanted):
        for target in boxes:
            copied = [
                TensorBox(target.name, target.shape, transfer.box)
                for transfer in of_ranks(plan)
                if transfer.destination == rank and transfer.wanted == target
            ]
            counts = elements(copied, target.name, target.shape)
            expected = elements([target], target.name, target.shape)
            assert np.array_equal(counts, expected)


@given(changes())
def test_only_elements_that_a_rank_lacks_are_sent(
    change: tuple[dict[str, tuple[int, ...]], Boxes, Boxes],
) -> None:
    shapes, held, wanted = change
    plan = plan_transfers(held, wanted, element_bytes=SIZES)

    minimum = 0
    for before, after in zip(held, wanted, strict=True):
        for name, shape in shapes.items():
            lacked = (elements(after, name, shape) > 0) & (elements(before, name, shape) == 0)
            minimum += int(lacked.sum()) * SIZES[name]
    assert plan.sent_bytes == minimum
    assert all(transfer.source != transfer.destination for transfer in plan.sent)
    assert all(transfer.source == transfer.destination for transfer in plan.kept)
    num_ranks = len(held)
    assert sum(plan.sent_by(num_ranks)) == sum(plan.received_by(num_ranks)) == minimum


@given(changes(), st.integers(1, 64))
def test_rounds_have_every_transfer_once_and_keep_the_limit(
    change: tuple[dict[str, tuple[int, ...]], Boxes, Boxes], limit: int
) -> None:
    _, held, wanted = change
    plan = plan_transfers(held, wanted, element_bytes=SIZES)
    rounds = schedule_rounds(plan.sent, limit=limit)

    assert sorted(map(repr, plan.sent)) == sorted(repr(t) for chosen in rounds for t in chosen)
    for chosen in rounds:
        assert chosen, "no round is empty"
        for side in ("source", "destination"):
            for rank in range(len(held)):
                sizes = [t.nbytes for t in chosen if getattr(t, side) == rank]
                assert sum(sizes) <= limit or len(sizes) == 1


@given(st.data())
def test_a_box_without_another_is_the_rest_of_it(data: st.DataObject) -> None:
    shape = (5, 4)
    box, other = (
        Box.full(shape) if index else data.draw(st.sampled_from(data.draw(covers(shape))))
        for index in (0, 1)
    )
    first, second = data.draw(st.permutations([box, other]))
    rest = subtract(first, second)
    counts = elements([TensorBox("a", shape, part) for part in rest], "a", shape)
    inside = elements([TensorBox("a", shape, first)], "a", shape)
    taken = elements([TensorBox("a", shape, second)], "a", shape)
    assert np.array_equal(counts, inside * (1 - taken))


def test_replicas_share_the_sending() -> None:
    # 4 ranks hold all of 8 tensors, 4 others need them
    shape = (100, 10)
    full = [TensorBox.full(f"layers.{index}", shape) for index in range(8)]
    plan = plan_transfers(
        [full] * 4 + [[]] * 4,
        [full] * 8,
        element_bytes={box.name: 4 for box in full},
    )
    assert plan.sent_by(8) == [8 * 4000] * 4 + [0] * 4
    assert plan.received_by(8) == [0] * 4 + [8 * 4000] * 4


def test_tensors_with_the_same_boxes_have_transfers_of_full_size() -> None:
    # each of 8 tensors has the bytes of two transfers, however many are planned together
    shape = (2 * PIECE_BYTES // 400, 100)
    full = [TensorBox.full(f"layers.{index}", shape) for index in range(8)]
    plan = plan_transfers([full, []], [[], full], element_bytes={box.name: 4 for box in full})
    assert len(plan.sent) == 2 * 8
    assert max(transfer.nbytes for transfer in plan.sent) <= PIECE_BYTES


def test_the_same_layout_sends_nothing() -> None:
    boxes = [[TensorBox("a", (4,), Box((2 * rank,), (2 * rank + 2,)))] for rank in range(2)]
    plan = plan_transfers(boxes, boxes, element_bytes=SIZES)
    assert plan.sent == () and len(plan.kept) == 2
    assert schedule_rounds(plan.sent) == ()


def test_what_no_rank_holds_is_an_error_with_the_region() -> None:
    held = [[TensorBox("a", (4,), Box((0,), (3,)))], []]
    wanted = [[], [TensorBox.full("a", (4,))]]
    with pytest.raises(NotHeld, match=r"\[3:4\] of a"):
        plan_transfers(held, wanted, element_bytes=SIZES)
    with pytest.raises(NotHeld, match="no rank holds b"):
        plan_transfers(held, [[], [TensorBox.full("b", (4,))]], element_bytes=SIZES)


def test_rounds_use_all_links_at_once() -> None:
    # a ring: each of 8 ranks sends 8 pieces to the next one; two pieces fit into a round
    sent = []
    for rank in range(8):
        for index in range(8):
            box = TensorBox(f"{index}", (4,), Box.full((4,)))
            sent.append(Transfer(rank, (rank + 1) % 8, box, box, box.box, 16))
    assert [len(chosen) for chosen in schedule_rounds(sent, limit=32)] == [16] * 4
