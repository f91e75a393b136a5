r"""Gated delta rule: linear attention whose state is a matrix per head, in chunks.

    S' = exp(g_t) * S_{t-1}                      decay per head (Gated DeltaNet) or channel (KDA)
    S_t = S' + k_t (beta_t (v_t - S'^T k_t))^T   the value at the key k_t is moved towards v_t
    o_t = S_t^T q_t / sqrt(K)                    queries and keys are divided by their lengths

    delta_rule   outputs and the state at the end, from the state at the start
    span_map     the state at the end as an affine function of the state at the start, for context
                 parallelism

In a chunk of C tokens the corrections u_t = beta_t (v_t - S'^T k_t) solve one triangular system
(the WY form: Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence
Length", section 3). With D_ij the decay between tokens j <= i, d_i from the start of the chunk to
token i and e_j from token j to its end:

    (I + tril(beta K K^T * D, -1)) [U | W] = [beta V | beta d K]       all chunks at once
    U' = U - W S        S <- d_C S + (e K)^T U'       chunk after chunk, S the state before a chunk
    O = d Q S + (Q K^T * D) U'                                         all chunks at once

Every exponent is at most 0, so no decay overflows. With decays per channel D is part of the sums
over channels: the pairs of two neighbouring blocks of tokens are one product, with decays to and
from the border between the blocks.

A token that starts a document sees no earlier state: pairs of tokens across a border are 0, and so
are the paths between tokens and state that cross one. Torch's operators compute in fp32 (fp64 for
fp64), the kernels of scan_kernels.py in 16 bits on a GPU. Only the inputs are kept for the
backward, which computes the rest again. Decays per head: Yang et al. 2025, "Gated Delta Networks";
per channel: "Kimi Linear" (2025), section 3.

    B batch   S sequence   G heads of queries and keys   N heads of values (a multiple of G)
    K, V head dims of keys and values   M chunks   C tokens of a chunk   X = B * N
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nanotrain.attention.chunk_scan import delta_rule_by_triton
from nanotrain.attention.chunks import accumulate_dtype
from nanotrain.attention.package_scans import fla_delta_rule
from nanotrain.attention.scan_inputs import DeltaInputs
from nanotrain.attention.scan_kernels import kernel_for
from nanotrain.comm.autograd import eager
from nanotrain.spec.kinds.delta_net import CHUNK_SIZE

NORM_EPS = 1e-6  # added to squared lengths, as in transformers and fla
# inputs, and the state before them or None -> outputs, state after them
ScanForm = Callable[[DeltaInputs, Tensor | None], tuple[Tensor, Tensor]]
# by the name of a row of scan_kernels.py
KERNEL_FORMS: dict[str, ScanForm] = {"fla": fla_delta_rule, "triton": delta_rule_by_triton}


@eager  # a compiled graph would keep tensors that are to be computed again
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
    form = kernel_form(inputs)
    if form is not None:
        return form(inputs, initial_state)
    out, state = recomputed(_delta_rule, inputs, initial_state, chunk_size=chunk_size)
    return out, state


def kernel_form(inputs: DeltaInputs) -> ScanForm | None:
    """The kernels that compute the rule on these inputs; None for torch's operators."""
    rule = "kda" if inputs.decay.shape[-1] > 1 else "gated_delta_net"
    return KERNEL_FORMS.get(kernel_for(rule, inputs.value))


@eager
def span_map(inputs: DeltaInputs, *, chunk_size: int = CHUNK_SIZE) -> tuple[Tensor, Tensor]:
    """The state after a span as `transition @ state + offset` of the state before it.

    Returns:
        transition [B, N, K, K] and offset [B, N, K, V].
    """
    transition, offset = recomputed(_span_map, inputs, chunk_size=chunk_size)
    return transition, offset


def recomputed(
    function: Callable[..., Any], inputs: DeltaInputs, *more: Tensor | None, chunk_size: int
) -> Any:
    """Call a function that keeps only its arguments for the backward.

    Args:
        function: function of the inputs, further tensors, and the size of a chunk.
        inputs: first argument.
        more: further tensors.
        chunk_size: largest size of a chunk; a short sequence has a smaller power of 2.
    """
    # positional arguments, so that saved-tensor hooks see them
    tensors = [getattr(inputs, field.name) for field in fields(inputs)]
    num_inputs = len(tensors)
    length = inputs.key.shape[1]
    next_power = 1 << (length - 1).bit_length()
    size = min(chunk_size, next_power)

    def call(*args: Any) -> Any:
        return function(DeltaInputs(*args[:num_inputs]), *args[num_inputs:], chunk_size=size)

    return checkpoint(call, *tensors, *more, use_reentrant=False, preserve_rng_state=False)


def _delta_rule(
    inputs: DeltaInputs, initial_state: Tensor | None, *, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """The rule over all chunks; arguments and results as `delta_rule`."""
    batch, length, heads, value_dim = inputs.value.shape
    key_dim = inputs.key.shape[-1]
    chunks = _Chunks.of(inputs, chunk_size)
    updates = chunks.updates()
    if initial_state is None:
        state = updates[0].new_zeros(batch * heads, key_dim, value_dim)
    else:
        state = initial_state.to(updates[0].dtype).flatten(0, 1)
    corrections, states, final = _Scan.apply(*updates, state)
    decayed_query = chunks.query * chunks.decays_from_start
    read = decayed_query.flatten(1, 3) @ states
    pairs = chunks.pairs(chunks.query).flatten(1, 3)
    inside = pairs @ corrections
    out = read + inside
    out = out.unflatten(1, (batch, heads))
    out = rearrange(out, "m b n c v -> b (m c) n v")[:, :length]
    return out.to(inputs.value.dtype), final.unflatten(0, (batch, heads))


def _span_map(inputs: DeltaInputs, *, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Transition and offset in one call of the rule.

    The offset has columns with values and a zero state, the transition columns with an identity
    state and no values.
    """
    batch, _, heads, value_dim = inputs.value.shape
    key_dim = inputs.key.shape[-1]
    dtype = accumulate_dtype(inputs.value)
    identity = torch.eye(key_dim, dtype=dtype, device=inputs.value.device)
    state = F.pad(identity, (value_dim, 0))
    state = state.expand(batch, heads, -1, -1)
    wider_value = F.pad(inputs.value, (0, key_dim))
    wider = replace(inputs, value=wider_value)
    form = kernel_form(wider)
    if form is None:
        _, final = _delta_rule(wider, state, chunk_size=chunk_size)
    else:
        _, final = form(wider, state)
    offset, transition = final.split((value_dim, key_dim), dim=-1)
    return transition, offset


@dataclass(frozen=True)
class _Chunks:
    """Chunks of all heads, [M, B, G, N / G, C, ...]; queries and keys have 1 instead of N / G."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor  # the sum of the logarithms from the start of the chunk, at most 0
    beta: Tensor
    document: Tensor | None  # [M, B, 1, 1, C], the number of starts so far in the chunk

    @classmethod
    def of(cls, inputs: DeltaInputs, size: int) -> "_Chunks":
        """Split a sequence; the last chunk is padded with tokens that leave the state as it is."""
        dtype = accumulate_dtype(inputs.value)
        groups = inputs.key.shape[2]
        padding = -inputs.key.shape[1] % size

        def split(x: Tensor) -> Tensor:
            padded = F.pad(x, (0, 0, 0, 0, 0, padding))
            chunks = rearrange(padded, "b (m c) (g r) d -> m b g r c d", c=size, g=groups)
            return chunks.to(dtype, memory_format=torch.contiguous_format)

        document: Tensor | None = None
        if inputs.starts is not None:
            starts = inputs.starts.to(inputs.key.device, non_blocking=True)
            starts = F.pad(starts, (0, padding))
            document = rearrange(starts, "b (m c) -> m b 1 1 c", c=size).cumsum(-1)
        query = split(inputs.query)
        key = split(inputs.key)
        value = split(inputs.value)
        decay = split(inputs.decay)
        beta = split(inputs.beta)
        query = _unit_vectors(query)
        key = _unit_vectors(key)
        scale = query.shape[-1] ** -0.5
        return cls(query * scale, key, value, decay.cumsum(-2), beta, document)

    @cached_property
    def decays_from_start(self) -> Tensor:
        """[..., C, 1 or K]: decays of the state before the chunk until a token has read it."""
        decays = self.decay.exp()
        if self.document is None:
            return decays
        return decays * (self.document == 0)[..., None]

    def updates(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The arguments of `_Scan`, which advance the state chunk by chunk: U, W, e K and d_C.

        values [M, X, C, V], reads and writes [M, X, C, K], decays [M, X, 1 or K, 1].
        """
        last = self.decay[..., -1:, :]
        to_end = (last - self.decay).exp()
        if self.document is not None:
            is_of_last = self.document == self.document[..., -1:]
            to_end = to_end * is_of_last[..., None]
        value_targets = self.beta * self.value
        state_rates = self.beta * self.decays_from_start
        state_targets = state_rates * self.key
        targets = torch.cat((value_targets, state_targets), dim=-1)
        system = self.beta * self.pairs(self.key)  # the solver reads only below the diagonal
        solved = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
        value_dim = self.value.shape[-1]
        key_dim = self.key.shape[-1]
        values, reads = solved.split((value_dim, key_dim), dim=-1)
        values = values.flatten(1, 3)
        reads = reads.flatten(1, 3)
        writes = (self.key * to_end).flatten(1, 3)
        last_decays = self.decays_from_start[..., -1:, :]
        decays = last_decays.mT.flatten(1, 3)
        return values, reads, writes, decays

    def pairs(self, rows: Tensor) -> Tensor:
        """[..., C, C]: products of rows and earlier keys, decayed from key to row.

        Pairs of different documents are 0.
        """
        if self.decay.shape[-1] == 1:
            return (rows @ self.key.mT) * self._pair_decays
        pairs = _channel_pairs(rows.expand_as(self.decay), self.key, decay=self.decay)
        if self.document is None:
            return pairs
        return pairs * self._is_allowed

    @cached_property
    def _is_allowed(self) -> Tensor:
        """[C, C] or [M, B, 1, 1, C, C] bool, True for a row and an earlier key of its document."""
        size = self.decay.shape[-2]
        causal = torch.ones(size, size, dtype=torch.bool, device=self.decay.device).tril()
        if self.document is None:
            return causal
        return causal & (self.document[..., None] == self.document[..., None, :])

    @cached_property
    def _pair_decays(self) -> Tensor:
        logarithms = self.decay - self.decay.mT
        return logarithms.masked_fill(~self._is_allowed, -torch.inf).exp()


def _unit_vectors(x: Tensor) -> Tensor:
    """Vectors divided by their lengths."""
    squares = (x * x).sum(-1, keepdim=True)
    return x * torch.rsqrt(squares + NORM_EPS)


def _channel_pairs(rows: Tensor, keys: Tensor, *, decay: Tensor) -> Tensor:
    """Pairs with decays per channel: [..., C, C], 0 for j > i.

    sum_k rows[i, k] keys[j, k] exp(decay[i, k] - decay[j, k])
    """
    pairs = (rows * keys).sum(-1)[..., None, None]  # [..., blocks, size, size]
    while pairs.shape[-3] > 1:
        # two neighbouring blocks become one of twice the size
        size = pairs.shape[-1]
        earlier_decay, later_decay = _split_blocks(decay, size)
        _, later_rows = _split_blocks(rows, size)
        earlier_keys, _ = _split_blocks(keys, size)
        border = later_decay[..., :1, :]
        later = later_rows * (later_decay - border).exp()
        earlier = earlier_keys * (border - earlier_decay).exp()
        both = pairs.unflatten(-3, (-1, 2))
        first, second = both.unbind(-3)
        across = later @ earlier.mT
        above = F.pad(first, (0, size))
        below = torch.cat((across, second), dim=-1)
        pairs = torch.cat((above, below), dim=-2)
    return pairs.squeeze(-3)


def _split_blocks(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """[..., C, K] -> the earlier and the later block of every two, [..., C / 2 size, size, K]."""
    blocks = x.unflatten(-2, (-1, 2, size))
    return blocks[..., 0, :, :], blocks[..., 1, :, :]


def _order(chunks: Tensor) -> range:
    """The indices of the chunks; a dry run replaces it to compute the first chunk only."""
    return range(len(chunks))


class _Scan(torch.autograd.Function):
    """The states before every chunk, one chunk after the other.

    values [M, X, C, V], reads and writes [M, X, C, K], decays [M, X, 1 or K, 1], state [X, K, V]
    -> corrections [M, X, C, V], states [M, X, K, V], final state [X, K, V]
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """U' = U - W S and S <- d_C S + (e K)^T U' per chunk; shapes as in the class."""
        reads, writes, decays, state = inputs
        corrections = torch.empty_like(values)
        states = values.new_empty(len(values), *state.shape)
        for chunk in _order(values):
            states[chunk] = state
            correction = corrections[chunk]
            torch.baddbmm(values[chunk], reads[chunk], state, alpha=-1, out=correction)
            decayed = decays[chunk] * state
            state = torch.baddbmm(decayed, writes[chunk].mT, correction)
        ctx.save_for_backward(reads, writes, decays, corrections, states)
        return corrections, states, state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """The scan in reverse, for gradients of corrections, states and final state."""
        reads, writes, decays, corrections, states = ctx.saved_tensors
        grad_corrections = grads[0].clone()
        grad_states = grads[1]
        grad = grads[2]  # gradient of the state after a chunk
        grad_next = torch.empty_like(states)  # gradients of the states after all chunks
        for chunk in reversed(_order(states)):
            grad_next[chunk] = grad
            grad_corrections[chunk].baddbmm_(writes[chunk], grad)
            carried = torch.addcmul(grad_states[chunk], decays[chunk], grad)
            grad = torch.baddbmm(carried, reads[chunk].mT, grad_corrections[chunk], alpha=-1)
        grad_reads = -(grad_corrections @ states.mT)
        grad_writes = corrections @ grad_next.mT
        grad_decays = (grad_next * states).sum(-1, keepdim=True).sum_to_size(decays.shape)
        return grad_corrections, grad_reads, grad_writes, grad_decays, grad
