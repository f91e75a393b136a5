"""The experts of a rank are one MLP per expert."""

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nanotrain.kernels import grouped
from nanotrain.kernels.deferred_wgrad import WgradQueue, accumulate_wgrads
from nanotrain.parallel.ep.experts import ExpertOptions, Experts, add_expert_bias
from tests.kernels.writing_network import step, wrap

E, H, WIDTH = 3, 8, 16
COUNTS, DROPPED = [4, 0, 3], 2


def parameter(*shape: int, seed: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def build(*, is_gated: bool, width: int = WIDTH, **options: object) -> Experts:
    gate = parameter(E, width, H, seed=1) if is_gated else None
    up, down = parameter(E, width, H, seed=2), parameter(E, H, width, seed=3)
    linears = {"up": (up, None), "down": (down, None)} | (
        {} if gate is None else {"gate": (gate, None)}
    )
    return Experts(
        linears, activation=F.silu if gate is None else swiglu, options=ExpertOptions(**options)
    )


def one_by_one(experts: Experts, rows: torch.Tensor) -> torch.Tensor:
    """[sum(COUNTS), H], each expert by torch's own operators."""
    outputs = []
    for expert, part in enumerate(rows.split(COUNTS)):
        inner = F.linear(part, experts.up.weight[expert])
        inner = (
            F.silu(inner)
            if experts.gate is None
            else F.silu(F.linear(part, experts.gate.weight[expert])) * inner
        )
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
    actual = torch.autograd.grad(out.sum(), list(experts.parameters()))
    for value, reference in zip(
        actual, torch.autograd.grad(expected.sum(), list(experts.parameters())), strict=True
    ):
        torch.testing.assert_close(value, reference, rtol=1e-4, atol=1e-4)


def test_biases_are_added_to_the_tokens_of_their_expert_and_to_no_dropped_token() -> None:
    rows, bias = torch.randn(sum(COUNTS) + DROPPED, H), parameter(E, H, seed=5)
    offs = torch.tensor(COUNTS).cumsum(0).to(torch.int32)
    given = torch.cat((bias.repeat_interleave(torch.tensor(COUNTS), 0), torch.zeros(DROPPED, H)))
    out_grad = torch.randn_like(rows)
    (expected,) = torch.autograd.grad(given, bias, out_grad)
    for adds in (True, False):  # one rank of etp adds them, all have their gradient
        out = add_expert_bias(rows, bias, offs=offs, adds=adds)
        assert torch.equal(out, rows + given if adds else rows)
        torch.testing.assert_close(torch.autograd.grad(out, bias, out_grad)[0], expected)


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


class Mixture(nn.Module):
    """Experts behind an embedding, with a dropped token and other counts in each microbatch.

    The last expert has `num_last` tokens.
    """

    def __init__(self, width: int, queue: WgradQueue | None) -> None:
        super().__init__()
        self.head = parameter(20, H, seed=4)
        self.num_last = 2
        self.experts = build(is_gated=True, width=width, may_drop=True, wgrad_queue=queue)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = F.embedding(tokens.flatten(), self.head)
        end = len(rows) - 1
        offs = torch.tensor([int(tokens[0, 0]) % 4, end - self.num_last, end], dtype=torch.int32)
        return self.experts(rows, offs).float().square().sum()


@pytest.mark.parametrize("is_deferred", [False, True], ids=["at once", "deferred"])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads"])
@pytest.mark.parametrize(
    ("width", "dtype"), [(11, torch.float32), (16, torch.float32), (16, torch.bfloat16)]
)
def test_written_weight_gradients_are_those_that_autograd_returns(
    width: int, dtype: torch.dtype, strategy: str, is_deferred: bool
) -> None:
    results = []
    for writes in (False, True):
        queue = WgradQueue() if is_deferred else None
        network = Mixture(width, queue)
        parallel = wrap(network, writes=writes, dtype=dtype, strategy=strategy)
        # the second step overwrites what the first left behind
        step(network, parallel, queue=queue)
        network.num_last = 0
        with patch.object(grouped, "accumulate_each", wraps=grouped.accumulate_each) as written:
            results.append(step(network, parallel, queue=queue))
        # one grouped product of all experts (aligned rows, fp32) is added
        is_grouped = width % 4 == 0 and dtype is torch.float32
        assert written.call_count == (0 if is_grouped or not writes else 2 * 3), (
            "microbatches and weights"
        )
    tolerance = 1e-6 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(
        results[1], results[0], rtol=tolerance, atol=tolerance * results[0].abs().max().item()
    )
    assert results[0].any() and (results[0] == 0).any(), "an expert has no tokens"
