"""Convolutions and scans with `--invariant`: plain values, and bits that do not follow the company."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.attention.convolution import causal_conv
from nanotrain.attention.delta_rule import delta_rule
from nanotrain.attention.scan_inputs import DeltaInputs
from nanotrain.attention.ssd import ssd
from nanotrain.model.context import LayerContext
from nanotrain.model.invariant_scan import GroupedScan, use_exact_taps
from nanotrain.model.recurrence import ShortConvolution
from nanotrain.parallel.tp.invariant import UnitBlocks

BATCH, LENGTH, GROUPS, HEADS = 2, 6, 2, 4
BLOCKS = UnitBlocks(1, block_length=4, num_tokens=BATCH * LENGTH)


def scan_inputs() -> DeltaInputs:
    draw = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(BATCH, LENGTH, *shape, generator=draw)

    decay = -numbers(HEADS, 1).square()
    query, key = numbers(GROUPS, 3), numbers(GROUPS, 3)
    return DeltaInputs(query, key, numbers(HEADS, 5), decay, numbers(HEADS, 1).sigmoid())


@pytest.mark.parametrize("rule", [ssd, delta_rule])
def test_a_scan_has_the_same_bits_for_fewer_heads_and_samples(rule: Any) -> None:
    grouped = GroupedScan(lambda inputs: rule(inputs)[0])
    inputs = scan_inputs()
    together = grouped(inputs)
    torch.testing.assert_close(together, rule(inputs)[0])
    second = inputs.map(lambda x: x[1:, :, x.shape[2] // 2 :])  # sample 1, the last group
    assert torch.equal(grouped(second), together[1:, :, HEADS // 2 :])


def convolved(x: Tensor, weight: Tensor, segment_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """The outputs of a convolution with SiLU, and the gradient of its weight."""
    parameter = nn.Parameter(weight.clone())
    parameter.grad_dtype = torch.float64
    params: Any = {"weight": parameter}
    conv = ShortConvolution(params, cp=SimpleNamespace(size=1), activation=F.silu)
    context = cast(LayerContext, SimpleNamespace(segment_ids=segment_ids))
    out = use_exact_taps(conv, BLOCKS)(x, context)
    out.square().sum().mul(0.01).backward()  # sums of larger gradients would be NaN
    assert parameter.grad is not None
    return out.detach(), parameter.grad


@pytest.mark.parametrize("has_documents", [False, True])
def test_a_convolution_has_the_same_bits_for_fewer_channels_and_samples(
    has_documents: bool,
) -> None:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(BATCH, LENGTH, 10, generator=draw)
    weight = torch.randn(10, 4, generator=draw)
    ids = None
    if has_documents:
        ids = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 1, 1]])
    out, grad = convolved(x, weight, ids)
    window = F.pad(x, (0, 0, 3, 0))
    padded = None if ids is None else F.pad(ids, (3, 0), value=-1)
    plain = F.silu(causal_conv(window, weight, segment_ids=padded))
    torch.testing.assert_close(out, plain)
    parts = [
        convolved(x[i : i + 1], weight, None if ids is None else ids[i : i + 1]) for i in (0, 1)
    ]
    assert torch.equal(torch.cat([part for part, _ in parts]), out)
    assert torch.equal(parts[0][1] + parts[1][1], grad)
    few, few_grad = convolved(x[:, :, 4:], weight[4:], ids)
    assert torch.equal(few, out[:, :, 4:])
    assert torch.equal(few_grad, grad[4:])
