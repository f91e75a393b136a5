"""Experts by token blocks: the numbers of plain experts, and bits that do not follow the company."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from nanotrain.comm.group import Group
from nanotrain.kernels.router_logits import router_logits
from nanotrain.model.invariant_experts import (
    AppendSlots,
    InvariantExperts,
    blocked_logits,
    plan_slots,
    use_token_blocks,
)
from nanotrain.parallel.ep.experts import Experts
from nanotrain.parallel.tp.invariant import UnitBlocks

NUM_EXPERTS, HIDDEN, WIDTH, BLOCK = 3, 20, 12, 4
BLOCKS = UnitBlocks(1, BLOCK, num_tokens=64, num_expert_blocks=2)
ETP = Group.single_rank("etp")


def build_experts(dtype: torch.dtype) -> Experts:
    draw = torch.Generator().manual_seed(1)
    shapes = dict.fromkeys(("gate", "up"), (NUM_EXPERTS, WIDTH, HIDDEN))
    shapes["down"] = (NUM_EXPERTS, HIDDEN, WIDTH)
    linears = {}
    for name, shape in shapes.items():
        weight = nn.Parameter(torch.randn(shape, generator=draw).to(dtype))
        weight.grad_dtype = torch.float64
        linears[name] = (weight, None)
    return Experts(linears, activation=lambda gate, up: gate * up)


def outputs_of(
    experts: Experts, x: Tensor, slots: list[int], chosen: list[int]
) -> tuple[Tensor, list[Tensor]]:
    """The outputs of tokens at these slots by the experts that they chose, and gradients."""
    order = sorted(range(len(slots)), key=lambda token: chosen[token])
    ends = [sum(expert <= number for expert in chosen) for number in range(NUM_EXPERTS)]
    tokens = AppendSlots(0)(x[None])[0]
    rows = tokens[[slots[token] for token in order]]
    out = InvariantExperts(experts, BLOCKS, ETP)(rows, torch.tensor(ends, dtype=torch.int32))
    result = torch.empty_like(out)
    result[order] = out
    experts.zero_grad()
    out.mean(1).sum().mul(0.01).backward()
    return result.detach(), [p.grad for p in experts.parameters() if p.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    experts = build_experts(dtype)
    x = torch.randn(16, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)
    slots = list(range(16))
    chosen = [(7 * slot) % NUM_EXPERTS for slot in slots]
    together, grads = outputs_of(experts, x, slots, chosen)
    totals = [torch.zeros_like(grad) for grad in grads]
    for block in (range(8, 16), range(8)):  # two ranks, of which the second one comes first
        outputs, parts = outputs_of(experts, x, list(block), [chosen[slot] for slot in block])
        assert torch.equal(outputs, together[block.start : block.stop])
        totals = [total + part for total, part in zip(totals, parts, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(totals, grads, strict=True))


def test_experts_compute_what_plain_experts_do() -> None:
    experts = build_experts(torch.float32)
    x = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(3))
    chosen = [0, 0, 0, 2, 2, 2, 2, 2]  # expert 1 has no tokens
    out, _ = outputs_of(experts, x, list(range(8)), chosen)
    plain = experts(x, torch.tensor([3, 3, 8], dtype=torch.int32))
    torch.testing.assert_close(out, plain)


def test_a_dispatcher_that_sends_no_slots_is_named() -> None:
    layer = nn.Module()
    layer.dispatcher = SimpleNamespace()
    with pytest.raises(AssertionError, match="SimpleNamespace sends no slots"):
        use_token_blocks(layer, BLOCKS)


def test_slots_are_planned_without_tokens() -> None:
    plan = plan_slots(torch.zeros(0, dtype=torch.int32), torch.zeros(3), block_length=4)
    assert plan.rows.tolist() == []
    assert plan.counts == [0, 0, 0]


def test_blocked_logits_are_those_of_the_router() -> None:
    draw = torch.Generator().manual_seed(4)
    hidden = torch.randn(2, 8, HIDDEN, generator=draw)
    weight = torch.randn(NUM_EXPERTS, HIDDEN, generator=draw)
    logits = blocked_logits(hidden, weight, blocks=BLOCKS)
    torch.testing.assert_close(logits, router_logits(hidden, weight))
    part = blocked_logits(hidden[1:, 4:], weight, blocks=BLOCKS)
    assert torch.equal(part, logits[1:, 4:])
