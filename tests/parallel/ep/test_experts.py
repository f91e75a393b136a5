"""The experts of a rank are one MLP per expert."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanotrain.kernels.deferred_wgrad import WgradQueue, accumulate_wgrads
from nanotrain.parallel.ep.experts import ExpertOptions, Experts

E, H, WIDTH = 3, 8, 16
COUNTS, DROPPED = [4, 0, 3], 2


def parameter(*shape: int, seed: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def build(*, is_gated: bool, **options: object) -> Experts:
    gate = parameter(E, WIDTH, H, seed=1) if is_gated else None
    up, down = parameter(E, WIDTH, H, seed=2), parameter(E, H, WIDTH, seed=3)
    return Experts(
        gate=gate, up=up, down=down, activation=F.silu if gate is None else swiglu, options=ExpertOptions(**options)
    )


def one_by_one(experts: Experts, rows: torch.Tensor) -> torch.Tensor:
    """[sum(COUNTS), H], each expert by torch's own operators."""
    outputs = []
    for expert, part in enumerate(rows.split(COUNTS)):
        inner = F.linear(part, experts.up.weight[expert])
        inner = F.silu(inner) if experts.gate is None else F.silu(F.linear(part, experts.gate.weight[expert])) * inner
        outputs.append(F.linear(inner, experts.down.weight[expert]))
    return torch.cat(outputs)


@pytest.mark.parametrize("is_gated", [True, False])
def test_experts_equal_one_mlp_per_expert_and_dropped_tokens_are_zero(is_gated: bool) -> None:
    experts = build(is_gated=is_gated, may_drop=True)
    rows = torch.randn(sum(COUNTS) + DROPPED, H)
    out = experts(rows, torch.tensor(COUNTS).cumsum(0).to(torch.int32))

    expected = one_by_one(experts, rows[: sum(COUNTS)])
    torch.testing.assert_close(out[: sum(COUNTS)], expected, rtol=1e-5, atol=1e-5)
    assert (out[sum(COUNTS) :] == 0).all()
    found = torch.autograd.grad(out.sum(), list(experts.parameters()))
    for one, other in zip(found, torch.autograd.grad(expected.sum(), list(experts.parameters())), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_deferred_weight_gradients_are_bit_equal() -> None:
    queue = WgradQueue()
    experts = build(is_gated=True, wgrad_queue=queue)
    rows, offs = torch.randn(sum(COUNTS), H), torch.tensor(COUNTS).cumsum(0).to(torch.int32)
    experts(rows, offs).sum().backward()
    expected = {name: parameter.grad for name, parameter in experts.named_parameters()}
    experts.zero_grad()
    with queue.defer():
        experts(rows, offs).sum().backward()
    assert all(parameter.grad is None for parameter in experts.parameters())
    accumulate_wgrads(queue.take())
    for name, parameter in experts.named_parameters():
        assert torch.equal(parameter.grad, expected[name])
