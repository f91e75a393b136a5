"""Scans by the kernels of other packages, for 16-bit tensors on a GPU.

    fla_delta_rule   gated delta rule and KDA: fla (flash-linear-attention)
    fla_ssd          scan of Mamba-2: simple_gla of fla, whose keys are repeated for every head
    mamba_ssd        scan of Mamba-2: mamba_chunk_scan_combined of mamba_ssm

fla packs documents, with cumulative lengths from the host; mamba_ssm numbers them on the device.
The initial and final states of rows are those of context parallelism. mamba_ssm has no decay per
token apart from its step, so it takes only inputs with the rate A.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from nanotrain.attention.chunks import accumulate_dtype
from nanotrain.attention.scan_inputs import DeltaInputs, PackedDocuments
from nanotrain.attention.tiles import on_device

MAMBA_CHUNK = 256  # tokens of a chunk, the default of mamba_ssm

PackageRule = Callable[..., tuple[Tensor, Tensor]]


def fla_delta_rule(inputs: DeltaInputs, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs and final state, as `delta_rule`."""
    rule: PackageRule
    if inputs.decay.shape[-1] > 1:
        rule = import_module("fla.ops.kda").chunk_kda
        decay = inputs.decay
    else:
        rule = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        decay = inputs.decay[..., 0]
    rule = partial(rule, use_qk_l2norm_in_kernel=True)
    tensors = (inputs.query, inputs.key, inputs.value, decay, inputs.beta[..., 0])
    return _run_packed(rule, tensors, starts=inputs.starts, initial_state=initial_state)


def fla_ssd(inputs: DeltaInputs, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs in fp32 and final state, as `ssd`; values are dt x."""
    rule: PackageRule = import_module("fla.ops.simple_gla").chunk_simple_gla
    rule = partial(rule, scale=1.0)
    heads = inputs.value.shape[2]
    repeats = heads // inputs.key.shape[2]
    query = inputs.query.repeat_interleave(repeats, dim=2)
    key = inputs.key.repeat_interleave(repeats, dim=2)
    value = inputs.value * inputs.beta
    value = value.to(inputs.value.dtype)
    tensors = (query, key, value, inputs.decay[..., 0])
    if initial_state is not None:
        initial_state = initial_state.mT  # its states are [K, V]
    out, final = _run_packed(rule, tensors, starts=inputs.starts, initial_state=initial_state)
    return out.to(accumulate_dtype(out)), final.mT


def mamba_ssd(inputs: DeltaInputs, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs in fp32 and final state, as `ssd`."""
    scan: Any = import_module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    documents: Tensor | None = None
    if inputs.starts is not None:
        starts = inputs.starts.to(inputs.value.device, non_blocking=True)
        documents = starts.cumsum(1, dtype=torch.int32)  # 0 continues the initial state
    out, final = scan(
        inputs.value,
        inputs.beta[..., 0],
        inputs.A,
        inputs.key,
        inputs.query,
        MAMBA_CHUNK,
        initial_states=initial_state,
        seq_idx=documents,
        return_final_states=True,
    )
    return out.to(accumulate_dtype(out)), final


def _run_packed(
    rule: PackageRule,
    tensors: tuple[Tensor, ...],
    *,
    starts: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """A rule of fla, with documents packed into one row.

    Args:
        rule: function of fla.
        tensors: queries, keys, values and others, [B, S, heads, ...].
        starts: [B, S] bool, the first token of every document; None for one document per row.
        initial_state: [B, N, K, V] before the rows; None for zeros.
    """
    rule = partial(rule, output_final_state=True)
    if starts is None:
        return rule(*tensors, initial_state=initial_state)
    _, key, value = tensors[:3]
    device = key.device
    documents = PackedDocuments.of(starts.cpu().numpy())
    heads, value_dim = value.shape[2:]
    shape = (documents.number, heads, key.shape[3], value_dim)
    states = key.new_zeros(shape, dtype=accumulate_dtype(key))
    if initial_state is not None:
        continues = on_device(documents.continues, device)
        kept = initial_state * continues[:, None, None, None]
        first = on_device(documents.first, device)
        states = states.index_copy(0, first, kept)
    packed = []
    for tensor in tensors:
        rows = tensor.flatten(0, 1)
        packed.append(rows[None])
    bounds = on_device(documents.bounds, device)
    host_bounds = torch.from_numpy(documents.bounds)
    out, final = rule(*packed, initial_state=states, cu_seqlens=bounds, cu_seqlens_cpu=host_bounds)
    last = on_device(documents.last, device)
    return out.view_as(value), final[last]
