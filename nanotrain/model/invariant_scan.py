"""Mamba-2 and gated DeltaNet whose results do not depend on the layout, in any bit (`--invariant`).

    scans           one call per sample and group of heads, all of one shape
    convolutions    taps in order, in fp32; gradients of their weights are exact sums over tokens
    A_log, dt_bias, D and the weight of the norm
                    exact sums over tokens
    softplus, SiLU, sigmoid
                    in whole vectors

The states and the tokens before a chunk are not passed between ranks: cp is 1.

    B batch   S sequence   K kernel size   D channels   N heads   P head dim of values
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.attention.scan_inputs import DeltaInputs
from nanotrain.kernels.exact_sums import in_one_form, token_sum
from nanotrain.model.context import LayerContext
from nanotrain.model.delta_net import GatedDeltaNet
from nanotrain.model.invariant_elements import InWholeVectors, normalized_rows, per_token
from nanotrain.model.mamba import Mamba2
from nanotrain.model.recurrence import ScanFunctions, ShortConvolution
from nanotrain.parallel.tp.invariant import UnitBlocks

SCANNED = ("query", "key", "value", "decay", "beta")  # tensors per token and head


class _InOneForm(torch.autograd.Function):
    """Make a tensor and its gradient contiguous from an aligned address on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """x, or a copy of it that is contiguous and aligned."""
        return in_one_form(x).view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """The gradient, or a copy of it that is contiguous and aligned."""
        return in_one_form(grads[0])


@dataclass(frozen=True)
class GroupedScan:
    """A scan that is called for one sample and one group of heads at a time.

    Args:
        scan: inputs -> outputs [B, S, N, P].
    """

    scan: Callable[[DeltaInputs], Tensor]

    def __call__(self, inputs: DeltaInputs) -> Tensor:
        """The outputs [B, S, N, P] of all samples and heads."""
        outputs = []
        for sample in _samples_of(inputs):
            groups = [_InOneForm.apply(self.scan(group)) for group in _groups_of(sample)]
            outputs.append(torch.cat(groups, dim=2))
        return torch.cat(outputs)


def _samples_of(inputs: DeltaInputs) -> list[DeltaInputs]:
    """The inputs of every sample."""
    parts = {name: getattr(inputs, name).split(1) for name in SCANNED}
    samples = []
    for index in range(len(inputs.value)):
        starts = None if inputs.starts is None else inputs.starts[index : index + 1]
        tensors = {name: by_sample[index] for name, by_sample in parts.items()}
        samples.append(DeltaInputs(**tensors, starts=starts))
    return samples


def _groups_of(sample: DeltaInputs) -> list[DeltaInputs]:
    """The inputs of every group of heads of a sample."""
    num_groups = sample.key.shape[2]
    parts = {name: getattr(sample, name).chunk(num_groups, dim=2) for name in SCANNED}
    groups = []
    for index in range(num_groups):
        tensors = {name: _InOneForm.apply(by_group[index]) for name, by_group in parts.items()}
        groups.append(DeltaInputs(**tensors, starts=sample.starts))
    return groups


class _Convolution(torch.autograd.Function):
    """A depthwise causal convolution in fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        window: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        masks: Tensor | None,
        num_tokens: int,
    ) -> Tensor:
        """window [B, K - 1 + S, D], weight [D, K], masks [K, B, S, 1] or None -> [B, S, D]."""
        ctx.save_for_backward(window, weight, masks)
        ctx.num_tokens = num_tokens
        total = None if bias is None else bias.float()
        taps = weight.float().unbind(1)
        for tokens, tap in zip(
            _taps_of(window.float(), masks, num_taps=len(taps)), taps, strict=True
        ):
            term = tokens * tap
            total = term if total is None else total + term
        assert total is not None, "a kernel has at least one weight"
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the window, and of weight and bias in fp64."""
        window, weight, masks = ctx.saved_tensors
        (grad,) = grads
        length = grad.shape[1]
        taps = weight.float().unbind(1)
        grad_window = torch.zeros_like(window, dtype=torch.float32)
        for k, tap in enumerate(taps):
            term = grad * tap
            if masks is not None:
                term = term.masked_fill(~masks[k], 0.0)
            grad_window[:, k : k + length] += term
        sums = []
        for tokens in _taps_of(window.float(), masks, num_taps=len(taps)):
            sums.append(token_sum(grad * tokens, num_addends=ctx.num_tokens))
        grad_bias = None
        if ctx.needs_input_grad[2]:
            grad_bias = token_sum(grad, num_addends=ctx.num_tokens)
        return grad_window.to(window.dtype), torch.stack(sums, dim=1), grad_bias, None, None


def _taps_of(window: Tensor, masks: Tensor | None, *, num_taps: int) -> list[Tensor]:
    """The tokens [B, S, D] that every tap reads; tokens of other documents are zeros."""
    length = window.shape[1] - num_taps + 1
    taps = []
    for k in range(num_taps):
        tokens = window[:, k : k + length]
        taps.append(tokens if masks is None else tokens.masked_fill(~masks[k], 0.0))
    return taps


def use_exact_taps(conv: ShortConvolution, blocks: UnitBlocks) -> Callable[..., Tensor]:
    """The invariant forward of a convolution."""
    activation = None if conv.activation is None else InWholeVectors(conv.activation)

    def forward(x: Tensor, context: LayerContext) -> Tensor:
        window, segment_ids = conv.window(x, context.segment_ids)
        num_taps = conv.num_before + 1
        masks = None
        if segment_ids is not None:
            own = segment_ids[:, conv.num_before :]
            taps = [segment_ids[:, k : k + own.shape[1]] == own for k in range(num_taps)]
            masks = torch.stack(taps)[..., None]
        out = _Convolution.apply(window, conv.weight, conv.bias, masks, blocks.num_tokens)
        out = out.to(x.dtype)
        return out if activation is None else activation(out)

    return forward


def scan_functions(blocks: UnitBlocks) -> ScanFunctions:
    """The elementwise functions of a layer, in whole vectors and with exact sums over tokens."""
    return ScanFunctions(
        softplus=InWholeVectors(F.softplus),
        exp=InWholeVectors(torch.exp),
        silu=InWholeVectors(F.silu),
        sigmoid=InWholeVectors(torch.sigmoid),
        per_token=partial(per_token, blocks=blocks),
        normalize_rows=normalized_rows,
    )


def use_grouped_scan(layer: Mamba2 | GatedDeltaNet, blocks: UnitBlocks) -> Callable[..., Tensor]:
    """Change a layer to scan one group at a time; returns its forward."""
    assert not layer.value_conv.communicates, "states are not passed between ranks"
    layer.scan = GroupedScan(layer.scan)
    layer.functions = scan_functions(blocks)
    if isinstance(layer, GatedDeltaNet):
        layer.activation = InWholeVectors(layer.activation)
    forward: Callable[..., Tensor] = layer.forward
    return forward
