r"""Gated delta rule: linear attention whose state is a matrix per head, computed in chunks by
matrix products.

    S' = exp(g_t) * S_{t-1}                              decay, per head (Gated DeltaNet) or per key channel (KDA)
    S_t = S' + k_t (beta_t (v_t - S'^T k_t))^T           the value at the key k_t is corrected towards v_t
    o_t = S_t^T q_t / sqrt(K)                            queries and keys are divided by their lengths

    DeltaInputs      query, key, value, gates and borders of documents
    delta_rule       outputs and the state at the end, from the state at the start
    span_map         the state at the end as an affine function of the state at the start, for context parallelism
    fla_delta_rule   the same by the kernels of the fla package, for 16-bit tensors on a GPU where it is installed

In a chunk of C tokens the corrections u_t = beta_t (v_t - S'^T k_t) solve one triangular system
(the WY form: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence
Length", section 3). With D_ij the decay between tokens j <= i, d_i from the start of the chunk to
token i and e_j from token j to its end:

    (I + tril(beta K K^T * D, -1)) [U | W] = [beta V | beta d K]       all chunks at once
    U' = U - W S        S <- d_C S + (e K)^T U'                        chunk after chunk, S the state before a chunk
    O = d Q S + (Q K^T * D) U'                                         all chunks at once

Every exponent is at most 0, so no decay overflows. With decays per channel D is part of the sums
over channels: the pairs of two neighbouring blocks of tokens are one product, with decays to and
from the border between the blocks.

A token that starts a document sees no earlier state: pairs across a border and the paths between
tokens and state that cross one are 0. Computed in fp32 (fp64 for fp64). Only the inputs are kept
for the backward, which computes the rest again. Decays per head: Yang et al. 2025, "Gated Delta
Networks"; per channel: "Kimi Linear" (2025), section 3.

    B batch   S sequence   G heads of queries and keys   N heads of values (a multiple of G)   K, V head dims
    M chunks   C tokens of a chunk   X = B * N
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nanotrain.attention.chunks import accumulate_dtype
from nanotrain.attention.tiles import on_device
from nanotrain.comm.autograd import eager
from nanotrain.spec.kinds.delta_net import CHUNK_SIZE

NORM_EPS = 1e-6  # added to squared lengths, as in transformers and fla


@dataclass(frozen=True)
class DeltaInputs:
    """Inputs of the gated delta rule."""

    query: Tensor  # [B, S, G, K]
    key: Tensor  # [B, S, G, K]
    value: Tensor  # [B, S, N, V]
    decay: Tensor  # [B, S, N, 1 or K], logarithms of the factors, at most 0
    beta: Tensor  # [B, S, N, 1], the step of the correction
    # [B, S] bool on any device, the first token of every document; None: one document
    starts: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Change every tensor."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: function(x) for name, x in values.items() if x is not None})


@eager  # a compiled graph would keep what is computed again
def delta_rule(
    inputs: DeltaInputs, initial_state: Tensor | None = None, *, chunk_size: int = CHUNK_SIZE
) -> tuple[Tensor, Tensor]:
    """Outputs and final state.

    Args:
        inputs: a sequence, or a span of one.
        initial_state: [B, N, K, V]; None for zeros.
        chunk_size: C, a power of 2 for decays per channel.

    Returns:
        [B, S, N, V] in the dtype of the values, and [B, N, K, V] in fp32.
    """
    if fla_takes(inputs):
        return fla_delta_rule(inputs, initial_state)
    out, state = recomputed(_delta_rule, inputs, initial_state, chunk_size=chunk_size)
    return out, state


@eager
def span_map(inputs: DeltaInputs, *, chunk_size: int = CHUNK_SIZE) -> tuple[Tensor, Tensor]:
    """The state after a span as `transition @ state + offset` of the state before it: [B, N, K, K],
    [B, N, K, V].
    """
    transition, offset = recomputed(_span_map, inputs, chunk_size=chunk_size)
    return transition, offset


def recomputed(
    function: Callable[..., Any], inputs: DeltaInputs, *more: Tensor | None, chunk_size: int
) -> Any:
    """Call a function that keeps its tensors alone; they are positional, so that saved-tensor hooks
    see them.
    """
    tensors = [getattr(inputs, field.name) for field in fields(inputs)]
    size, count = min(chunk_size, 1 << (inputs.key.shape[1] - 1).bit_length()), len(tensors)

    def call(*args: Any) -> Any:
        return function(DeltaInputs(*args[:count]), *args[count:], chunk_size=size)

    return checkpoint(call, *tensors, *more, use_reentrant=False, preserve_rng_state=False)


def _delta_rule(
    inputs: DeltaInputs, initial_state: Tensor | None, *, chunk_size: int
) -> tuple[Tensor, Tensor]:
    chunks = _Chunks.of(inputs, chunk_size)
    updates = chunks.updates()
    batch, heads = inputs.value.shape[0], inputs.value.shape[2]
    sizes = inputs.key.shape[-1], inputs.value.shape[-1]
    state = updates[0].new_zeros(batch * heads, *sizes)
    if initial_state is not None:
        state = initial_state.to(state.dtype).flatten(0, 1)
    corrections, states, final = _Scan.apply(*updates, state)
    read = (chunks.query * chunks.decays_from_start).flatten(1, 3) @ states
    out = read + chunks.pairs(chunks.query).flatten(1, 3) @ corrections
    out = rearrange(out.unflatten(1, (batch, heads)), "m b n c v -> b (m c) n v")[
        :, : inputs.value.shape[1]
    ]
    return out.to(inputs.value.dtype), final.unflatten(0, (batch, heads))


def _span_map(inputs: DeltaInputs, *, chunk_size: int) -> tuple[Tensor, Tensor]:
    """The rule with the identity as the state, without values, beside that with the values, from
    zeros.
    """
    size, width = inputs.key.shape[-1], inputs.value.shape[-1]
    identity = torch.eye(size, dtype=accumulate_dtype(inputs.value), device=inputs.value.device)
    state = F.pad(identity, (width, 0)).expand(len(inputs.value), inputs.value.shape[2], -1, -1)
    wider = replace(inputs, value=F.pad(inputs.value, (0, size)))
    _, final = (
        fla_delta_rule(wider, state)
        if fla_takes(wider)
        else _delta_rule(wider, state, chunk_size=chunk_size)
    )
    offset, transition = final.split((width, size), dim=-1)
    return transition, offset


@cache
def has_fla() -> bool:
    """Whether the fla package (flash-linear-attention) is installed."""
    return find_spec("fla") is not None


def fla_takes(inputs: DeltaInputs) -> bool:
    """Whether the kernels of fla compute these inputs: 16-bit tensors on a GPU."""
    return inputs.value.is_cuda and inputs.value.itemsize == 2 and has_fla()


def fla_delta_rule(inputs: DeltaInputs, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The kernels of fla; documents are packed, with cumulative lengths from the host."""
    by_channel, device = inputs.decay.shape[-1] > 1, inputs.value.device
    module, name = (
        ("kda", "chunk_kda") if by_channel else ("gated_delta_rule", "chunk_gated_delta_rule")
    )
    rule: Callable[..., tuple[Tensor, Tensor]] = getattr(import_module(f"fla.ops.{module}"), name)
    options: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    decay = inputs.decay if by_channel else inputs.decay[..., 0]
    tensors = (inputs.query, inputs.key, inputs.value, decay, inputs.beta[..., 0])
    if inputs.starts is None:
        return rule(*tensors, initial_state=initial_state, **options)
    starts = inputs.starts.cpu().numpy()
    rows = np.arange(len(starts)) * starts.shape[1]
    lengths = np.union1d(np.flatnonzero(starts), [*rows, starts.size])
    # documents; the one before the first of the next row is the last of a row
    first = np.searchsorted(lengths, rows)
    last = np.append(first[1:], len(lengths) - 1) - 1
    key, value = inputs.key, inputs.value
    shape = (len(lengths) - 1, value.shape[2], key.shape[3], value.shape[3])
    states = key.new_zeros(shape, dtype=accumulate_dtype(key))
    if initial_state is not None:
        continues = on_device(~starts[:, 0], device)[:, None, None, None]
        states = states.index_copy(0, on_device(first, device), initial_state * continues)
    options |= {
        "cu_seqlens": on_device(lengths, device),
        "cu_seqlens_cpu": torch.from_numpy(lengths),
    }
    out, final = rule(*(x.flatten(0, 1)[None] for x in tensors), initial_state=states, **options)
    return out.view_as(value), final[on_device(last, device)]


@dataclass(frozen=True)
class _Chunks:
    """Chunks of all heads, [M, B, G, N / G, C, ...]; queries and keys have a size of 1 instead of N
    / G.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor  # the sum of the logarithms from the start of the chunk, at most 0
    beta: Tensor
    document: Tensor | None  # [M, B, 1, 1, C], the number of starts so far in the chunk

    @classmethod
    def of(cls, inputs: DeltaInputs, size: int) -> "_Chunks":
        """Split a sequence; the last chunk is padded with tokens that leave the state as it is."""
        dtype, groups, padding = (
            accumulate_dtype(inputs.value),
            inputs.key.shape[2],
            -inputs.key.shape[1] % size,
        )

        def split(x: Tensor) -> Tensor:
            padded = F.pad(x, (0, 0, 0, 0, 0, padding))
            chunks = rearrange(padded, "b (m c) (g r) d -> m b g r c d", c=size, g=groups)
            return chunks.to(dtype, memory_format=torch.contiguous_format)

        starts = inputs.starts
        if starts is not None:
            starts = starts.to(inputs.key.device, non_blocking=True)
            starts = rearrange(F.pad(starts, (0, padding)), "b (m c) -> m b 1 1 c", c=size).cumsum(
                -1
            )
        query, key, value, decay, beta = map(
            split, (inputs.query, inputs.key, inputs.value, inputs.decay, inputs.beta)
        )
        query, key = (
            x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPS) for x in (query, key)
        )
        return cls(query * query.shape[-1] ** -0.5, key, value, decay.cumsum(-2), beta, starts)

    @cached_property
    def decays_from_start(self) -> Tensor:
        """[..., C, 1 or K]: of the state before the chunk, until a token has read it."""
        decays = self.decay.exp()
        return decays if self.document is None else decays * (self.document == 0)[..., None]

    def updates(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What each chunk does to the state, as arguments of `_Scan`."""
        to_end = (self.decay[..., -1:, :] - self.decay).exp()
        if self.document is not None:
            to_end = to_end * (self.document == self.document[..., -1:])[..., None]
        targets = (self.beta * self.value, self.beta * self.decays_from_start * self.key)
        system = self.beta * self.pairs(self.key)  # the solver reads what is below its diagonal
        solved = torch.linalg.solve_triangular(
            system, torch.cat(targets, -1), upper=False, unitriangular=True
        )
        values, reads = solved.split((self.value.shape[-1], self.key.shape[-1]), dim=-1)
        whole = self.decays_from_start[..., -1:, :].mT
        values, reads, writes, decays = (
            x.flatten(1, 3) for x in (values, reads, self.key * to_end, whole)
        )
        return values, reads, writes, decays

    def pairs(self, rows: Tensor) -> Tensor:
        """[..., C, C]: products of rows and earlier keys of their documents, decayed from key to
        row; else 0.
        """
        if self.decay.shape[-1] == 1:
            return (rows @ self.key.mT) * self._pair_decays
        pairs = _channel_pairs(rows.expand_as(self.decay), self.key, decay=self.decay)
        return pairs if self.document is None else pairs * self._is_allowed

    @cached_property
    def _is_allowed(self) -> Tensor:
        """[C, C] or [M, B, 1, 1, C, C] bool, True for a row and an earlier key of its document."""
        size = self.decay.shape[-2]
        causal = torch.ones(size, size, dtype=torch.bool, device=self.decay.device).tril()
        return (
            causal
            if self.document is None
            else causal & (self.document[..., None] == self.document[..., None, :])
        )

    @cached_property
    def _pair_decays(self) -> Tensor:
        return (self.decay - self.decay.mT).masked_fill(~self._is_allowed, -torch.inf).exp()


def _channel_pairs(rows: Tensor, keys: Tensor, *, decay: Tensor) -> Tensor:
    """sum_k rows[i, k] keys[j, k] exp(decay[i, k] - decay[j, k]) for j <= i, else 0: [..., C, C]."""
    pairs = (rows * keys).sum(-1)[..., None, None]  # [..., blocks, size, size]
    while pairs.shape[-3] > 1:
        size = pairs.shape[-1]
        decays, later, earlier = (x.unflatten(-2, (-1, 2, size)) for x in (decay, rows, keys))
        border = decays[..., 1, :1, :]
        later = later[..., 1, :, :] * (decays[..., 1, :, :] - border).exp()
        earlier = earlier[..., 0, :, :] * (border - decays[..., 0, :, :]).exp()
        first, second = pairs.unflatten(-3, (-1, 2)).unbind(-3)
        below = torch.cat((later @ earlier.mT, second), dim=-1)
        pairs = torch.cat((F.pad(first, (0, size)), below), dim=-2)
    return pairs.squeeze(-3)


def _order(chunks: Tensor) -> range:
    """Numbers of the chunks; a dry run computes the first only."""
    return range(len(chunks))


class _Scan(torch.autograd.Function):
    """The states before every chunk, one chunk after the other.

    values [M, X, C, V], reads and writes [M, X, C, K], decays [M, X, 1 or K, 1], state [X, K, V]
    -> corrections [M, X, C, V], states [M, X, K, V], final state [X, K, V]
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        reads, writes, decays, state = inputs
        corrections, states = torch.empty_like(values), values.new_empty(len(values), *state.shape)
        for chunk in _order(values):
            states[chunk] = state
            torch.baddbmm(values[chunk], reads[chunk], state, alpha=-1, out=corrections[chunk])
            state = torch.baddbmm(decays[chunk] * state, writes[chunk].mT, corrections[chunk])
        ctx.save_for_backward(reads, writes, decays, corrections, states)
        return corrections, states, state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        reads, writes, decays, corrections, states = ctx.saved_tensors
        of_corrections, of_states, grad = grads[0].clone(), grads[1], grads[2]
        of_next = torch.empty_like(states)  # gradients of the states after the chunks
        for chunk in reversed(_order(states)):
            of_next[chunk] = grad
            of_corrections[chunk].baddbmm_(writes[chunk], grad)
            carried = torch.addcmul(of_states[chunk], decays[chunk], grad)
            grad = torch.baddbmm(carried, reads[chunk].mT, of_corrections[chunk], alpha=-1)
        of_reads, of_writes = -(of_corrections @ states.mT), corrections @ of_next.mT
        of_decays = (of_next * states).sum(-1, keepdim=True).sum_to_size(decays.shape)
        return of_corrections, of_reads, of_writes, of_decays, grad
