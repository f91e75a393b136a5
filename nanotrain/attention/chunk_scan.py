"""Scans by the Triton kernels of this project: Mamba-2, gated delta rule and KDA, in 16 bits.

    delta_rule_by_triton   outputs and final state, as `delta_rule`
    ssd_by_triton          outputs and final state, as `ssd`

Kernels are in kernels/triton_chunk_scan.py and triton_chunk_scan_backward.py: two launches forward
and six backward (two and five without corrections of values). Only the inputs are kept for the
backward.

    B batch   S sequence   M chunks   C tokens of a chunk   G heads of queries and keys
    N heads of values   K, V head dims of keys and values
"""

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nanotrain.attention.scan_inputs import DeltaInputs


def delta_rule_by_triton(
    inputs: DeltaInputs, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs in the dtype of the values, and final state [B, N, K, V] in fp32."""
    return _scan(inputs, initial_state, corrects=True, dtype=inputs.value.dtype)


def ssd_by_triton(inputs: DeltaInputs, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs in fp32, and final state [B, N, V, K] in fp32."""
    if initial_state is not None:
        initial_state = initial_state.mT  # the kernels have states [K, V]
    out, final = _scan(inputs, initial_state, corrects=False, dtype=torch.float32)
    return out, final.mT


def _scan(
    inputs: DeltaInputs, initial_state: Tensor | None, *, corrects: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Call the kernels with numbered documents."""
    if initial_state is not None:
        initial_state = initial_state.float().contiguous()
    documents: Tensor | None = None
    if inputs.starts is not None:
        starts = inputs.starts.to(inputs.value.device, non_blocking=True)
        documents = starts.cumsum(1, dtype=torch.int32)
    query = inputs.query.contiguous()
    key = inputs.key.contiguous()
    value = inputs.value.contiguous()
    decay = inputs.decay.float().contiguous()
    rate = inputs.beta[..., 0]
    rate = rate.float().contiguous()
    tensors = (query, key, value, decay, rate)
    out, final = _ChunkScan.apply(*tensors, initial_state, documents, corrects, dtype)
    return out, final


class _ChunkScan(torch.autograd.Function):
    """Query, key, value, decay, rate, initial state -> outputs and final state.

    Cumulative decays are kept in place of the decays of single tokens.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        """Two launches; shapes as in triton_scan_inputs.Inputs."""
        query, key, value, decay, rate, initial_state, documents, corrects, dtype = args
        kernels = _kernels()
        sums = kernels.empty_sums(decay)
        inputs = kernels.Inputs(query, key, value, sums, rate, documents)
        sizes = kernels.scan_sizes(inputs, corrects=corrects)
        ctx.sizes = sizes
        ctx.save_for_backward(*inputs, initial_state)
        prepared = kernels.prepare(inputs, ctx.sizes, decay=decay)
        out, final = kernels.walk(
            inputs, prepared, initial=initial_state, sizes=ctx.sizes, dtype=dtype
        )
        return out, final

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """The forward again, and its gradients."""
        *tensors, initial_state = ctx.saved_tensors
        grad_out, grad_final = grads
        inputs = _kernels().Inputs(*tensors)
        if grad_out is None:
            grad_out = torch.zeros_like(inputs.value)
        if grad_final is not None:
            grad_final = grad_final.contiguous()
        found, grad_initial = _backward_kernels().scan_backward(
            inputs,
            initial_state,
            sizes=ctx.sizes,
            grad_out=grad_out.contiguous(),
            grad_final=grad_final,
        )
        groups = inputs.key.shape[2]
        query = _sum_heads(found.query, groups)
        key = _sum_heads(found.key, groups)
        grads = (query, key, found.value, found.decay, found.rate, grad_initial)
        return *grads, None, None, None


def _sum_heads(grad: Tensor, groups: int) -> Tensor:
    """[B, S, N, K] -> [B, S, G, K]: the sum over the heads of values of each group."""
    if grad.shape[2] == groups:
        return grad
    by_group = grad.unflatten(2, (groups, -1))
    return by_group.sum(3)


@cache
def _kernels() -> ModuleType:
    """The forward kernels; importing Triton costs a CPU run 0.3 s."""
    from nanotrain.kernels import triton_chunk_scan

    return triton_chunk_scan


@cache
def _backward_kernels() -> ModuleType:
    from nanotrain.kernels import triton_chunk_scan_backward

    return triton_chunk_scan_backward
