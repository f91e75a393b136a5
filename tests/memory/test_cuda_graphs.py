"""Parts of blocks that are captured: slots, shapes, gradients, and when a part runs eagerly."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanotrain.kernels.linear import GradView, attach
from nanotrain.memory import cuda_graphs
from nanotrain.memory.cuda_graphs import capture_parts
from tests.fake_graphs import FakeGraphPool


@dataclass(frozen=True)
class Inputs:
    """The context of a block."""

    full: Any = None
    windowed: Any = None
    query_scale: Tensor | None = None
    sequence_positions: Tensor | None = None
    dropout: Any = None
    aux_loss_scale: float = 0.0
    is_padding: bool = False


class Block(nn.Module):
    """x + scale * weight * x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.attention = nn.Identity()
        self.mlp = nn.Identity()
        self.calls = 0

    def forward(self, x: Tensor, context: Inputs) -> Tensor:
        self.calls += 1
        product = x * self.weight
        return x + product if context.query_scale is None else x + product * context.query_scale


@pytest.fixture
def pools(monkeypatch) -> list[FakeGraphPool]:
    """The pools of a test, in place of CUDA's."""
    made: list[FakeGraphPool] = []

    def make() -> FakeGraphPool:
        made.append(FakeGraphPool())
        return made[-1]

    monkeypatch.setattr(cuda_graphs, "GraphPool", make)
    return made


def graphed(num_blocks: int = 1, num_eager: int = 1) -> list[Block]:
    """Blocks with graphs, before their first pass."""
    blocks = [Block() for _ in range(num_blocks)]
    capture_parts(blocks, (), num_eager=num_eager)
    return blocks


def warmed_up(num_blocks: int = 1) -> list[Block]:
    """Blocks with graphs, after the eager pass."""
    blocks = graphed(num_blocks)
    _, out = run(blocks, 1.0)
    out.sum().backward()
    for block in blocks:
        block.weight.grad = None
    return blocks


def run(blocks: list[Block], value: float, context: Inputs = Inputs(), size: int = 2) -> tuple:
    """Input and output of blocks."""
    x = torch.full((size, 2), value, requires_grad=True)
    out = x
    for block in blocks:
        out = block(out, context)
    return x, out


def test_every_microbatch_in_flight_has_its_graphs(pools):
    blocks = graphed(2)
    expected = torch.tensor([9.0, 16.0])
    for _ in range(2):  # the first pass is eager
        passes = [run(blocks, value) for value in (1.0, 2.0, 4.0)]
        for (x, out), value in zip(passes, (1.0, 2.0, 4.0), strict=True):
            assert torch.equal(out, (value * expected).expand(2, 2))
            out.sum().backward()
            assert torch.equal(x.grad, expected.expand(2, 2))
    # a forward and a backward of two blocks, of three microbatches in flight
    assert len(pools[0].graphs) == 2 * 2 * 3
    assert [block.calls for block in blocks] == [6, 6]


def test_gradients_of_parameters_accumulate(pools):
    (block,) = warmed_up()
    for value in (1.0, 2.0, 4.0):
        _, out = run([block], value)
        out.sum().backward()
    assert torch.equal(block.weight.grad, torch.tensor([14.0, 14.0]))


def test_passes_are_counted_by_their_backwards(pools):
    (block,) = graphed(num_eager=2)
    outputs = [run([block], 1.0)[1] for _ in range(3)]
    for out in outputs:
        assert pools[0].graphs == []
        out.sum().backward()
    run([block], 1.0)
    assert len(pools[0].graphs) == 2


def test_a_part_without_a_backward_is_eager(pools):
    (block,) = warmed_up()
    block.weight.requires_grad_(False)
    block(torch.ones(2, 2), Inputs())
    assert pools[0].graphs == []
    x, out = run([block], 1.0)
    out.sum().backward()
    assert torch.equal(x.grad, torch.tensor([3.0, 4.0]).expand(2, 2)) and len(pools[0].graphs) == 2


def test_gradients_are_added_where_they_stay_and_begin_at_zero(pools):
    (block,) = warmed_up()
    memory, written = torch.full((2,), 7.0), []

    def start_write():
        written.append("start")
        return memory, len(written) > 1

    view = GradView(torch.float32, start_write, mark_ready=lambda: None, memory=memory)
    attach(view, block.weight)
    for value in (1.0, 2.0):
        _, out = run([block], value)
        out.sum().backward()
    assert block.weight.grad is None and memory.tolist() == [6.0, 6.0]
    assert block.weight.grad_view is view and written == ["start", "start"]


def test_a_backward_outside_of_a_step_is_an_error(pools):
    (block,) = warmed_up()
    view = GradView(torch.float32, lambda: None, mark_ready=lambda: None, memory=torch.zeros(2))
    attach(view, block.weight)
    _, out = run([block], 1.0)
    with pytest.raises(RuntimeError, match="outside of a training step"):
        out.sum().backward()


def test_passes_without_gradients_and_padding_are_eager(pools):
    (block,) = warmed_up()
    with torch.no_grad():
        run([block], 1.0)
    run([block], 1.0, Inputs(is_padding=True))
    assert block.calls == 3 and pools[0].graphs == []


def test_another_shape_is_another_capture_unless_one_is_in_flight(pools, caplog):
    (block,) = warmed_up()
    _, waiting = run([block], 1.0)
    _, other = run([block], 1.0, size=3)
    assert len(pools[0].graphs) == 2 and "runs eagerly" in caplog.text
    waiting.sum().backward()
    _, other = run([block], 3.0, size=3)
    assert torch.equal(other, torch.tensor([9.0, 12.0]).expand(3, 2))
    assert len(pools[0].graphs) == 4


def test_tensors_of_the_context_are_copied_once_per_microbatch(pools):
    blocks = warmed_up(2)
    for scale in (1.0, 2.0, 3.0):
        context = Inputs(query_scale=torch.tensor(scale))
        x, out = run(blocks, 1.0, context)
        factors = 1 + scale * torch.tensor([2.0, 3.0])
        assert torch.equal(out, (factors * factors).expand(2, 2))
        out.sum().backward()
        assert torch.equal(x.grad, (factors * factors).expand(2, 2))


def test_a_context_that_the_host_plans_is_not_captured(pools, caplog):
    (block,) = warmed_up()
    for _ in range(2):
        run([block], 1.0, Inputs(full=object()))
    assert pools[0].graphs == [] and "a object is made for every microbatch" in caplog.text


def test_a_forward_of_a_slot_waits_for_its_backward(pools):
    (block,) = warmed_up()
    _, out = run([block], 1.0)
    slot = block.forward._slots[0]
    with pytest.raises(AssertionError):
        slot.forward()
    out.sum().backward()
    with pytest.raises(AssertionError):
        slot.backward([torch.ones(2, 2)])


def test_the_ends_of_a_stage_are_copies(pools):
    blocks = warmed_up(2)
    x, out = run(blocks, 1.0)
    out.sum().backward()
    grad = x.grad
    _, other = run(blocks, 5.0)  # takes the slot again, while the first output may still be sent
    (2 * other).sum().backward()
    assert torch.equal(out, torch.tensor([9.0, 16.0]).expand(2, 2))
    assert torch.equal(grad, torch.tensor([9.0, 16.0]).expand(2, 2))


def test_returned_gradients_are_copies(pools):
    """Gradients of two blocks have one memory in their graphs."""
    blocks = warmed_up(2)
    _, out = run(blocks, 1.0)
    out.sum().backward()
    first, second = (block.weight.grad.clone() for block in blocks)
    assert torch.equal(first, torch.tensor([6.0, 8.0]))
    assert torch.equal(second, torch.tensor([6.0, 8.0]))
    slots = [block.forward._slots[0] for block in blocks]
    shared = {slot._returned[slot.params[0]].data_ptr() for slot in slots}
    assert len(shared) == 1
    assert not shared & {block.weight.grad.data_ptr() for block in blocks}
    slots[0].is_in_flight = True
    _, returned = slots[0].backward([torch.ones(2, 2)])
    assert returned.data_ptr() not in shared
