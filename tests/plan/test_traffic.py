"""Every core attention sends the bytes of its closed form; what a whole step sends is compared in
test_plan.py.
"""

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanotrain.parallel.cp import CORE_ATTENTIONS, build_core_attention
from nanotrain.parallel.dp.units import GatherOrder
from nanotrain.parallel.pp.actions import ActionKind
from nanotrain.plan.traffic import step_gathers
from nanotrain.spec.kinds.attention import key_values_over_cp
from nanotrain.spec.layer_sizes import LayerSizes
from tests.harness import run_ranks
from tests.parallel.cp.sequences import Shape, random_inputs, shard

SHAPES = [Shape(), Shape(heads=8, groups=2, head_dim=12), Shape(heads=12, groups=6, batch=1)]
OPS = ("all_gather", "reduce_scatter", "p2p", "all_to_all")


def sent_by_this_rank(ctx, comm_type, shape, dtype):
    group = ctx.group("cp")
    given = shard(random_inputs(shape, dtype=dtype), group)
    core_attention = build_core_attention(comm_type, group)
    query, key, value = (
        tensor.requires_grad_() for tensor in (given.query, given.key, given.value)
    )
    ctx.traffic.reset()
    mask = core_attention.plan_mask(None, tokens=query[:, :, 0, 0])
    out = core_attention(query, key=key, value=value, mask=mask, scores=None)
    out.backward(given.out)
    sent = {op: ctx.traffic.bytes("cp", op) for op in OPS if ctx.traffic.bytes("cp", op)}
    assert sum(sent.values()) == ctx.traffic.bytes(), "nothing else is sent"
    return sent


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("comm_type", list(CORE_ATTENTIONS))
def test_measured_bytes_are_those_of_the_closed_form(comm_type, size):
    for shape, dtype in zip(SHAPES, (torch.float32, torch.bfloat16, torch.float64), strict=True):
        heads = {"num_heads": shape.heads, "query_groups": shape.groups}
        sizes: Any = SimpleNamespace(
            **heads, head_dim=shape.head_dim, value_head_dim=shape.value_head_dim
        )
        rank = LayerSizes(
            sizes,
            batch_size=shape.batch,
            seq_length=shape.length // size,
            itemsize=dtype.itemsize,
            cp=size,
            cp_comm_type=comm_type,
        )
        sent = run_ranks(size, sent_by_this_rank, comm_type, shape, dtype, cp=size)
        operations = key_values_over_cp(rank, heads=shape.heads, groups=shape.groups)
        planned = {each.operation: each.forward + each.backward for each in operations}
        assert sent == [planned] * size, shape


def test_a_way_that_is_added_from_outside_needs_no_closed_form():
    sizes: Any = SimpleNamespace(num_heads=4, query_groups=2, head_dim=8, value_head_dim=8)
    rank = LayerSizes(sizes, batch_size=1, seq_length=8, cp=2, cp_comm_type="mine")
    assert key_values_over_cp(rank, heads=4, groups=2) == ()


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
