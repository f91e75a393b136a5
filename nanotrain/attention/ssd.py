r"""State space duality (Mamba-2): linear attention whose state decays per head, computed in chunks
by matrix products.

    S_t = exp(g_t) S_{t-1} + beta_t v_t k_t^T          o_t = S_t q_t

In the words of Mamba-2: v is x, k is B, q is C, beta the step Delta and g = A Delta, at most 0. The
inputs are those of the gated delta rule (delta_rule.py), without its correction. In a chunk of C
tokens, with u = beta v, D_ij the decay between tokens j <= i, d_i from the start of the chunk to
token i and e_j from token j to its end:

    S <- d_C S + (e u)^T K          chunk after chunk, S the state before a chunk
    O = d Q S^T + (Q K^T * D) u     all chunks at once

A token that starts a document sees no earlier state. Computed in fp32 (fp64 for fp64). Only the
inputs are kept for the backward, which computes the rest again. Dao and Gu 2024, "Transformers are
SSMs", section 6.

    ssd        outputs and the state at the end, from the state at the start
    span_map   the state at the end as an affine function of the state at the start, for context parallelism

    B batch   S sequence   G groups of heads with one query and key   N heads (a multiple of G)   K, V head dims
    M chunks   C tokens of a chunk   R = N / G
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from nanotrain.attention.chunks import accumulate_dtype
from nanotrain.attention.delta_rule import DeltaInputs, recomputed
from nanotrain.comm.autograd import eager
from nanotrain.spec.kinds.mamba import CHUNK_SIZE


@eager  # a compiled graph would keep what is computed again
def ssd(
    inputs: DeltaInputs, initial_state: Tensor | None = None, *, chunk_size: int = CHUNK_SIZE
) -> tuple[Tensor, Tensor]:
    """Outputs and final state.

    Args:
        inputs: a sequence, or a span of one; decays per head.
        initial_state: [B, N, V, K]; None for zeros.
        chunk_size: C.

    Returns:
        [B, S, N, V] and [B, N, V, K], in fp32.
    """
    out, state = recomputed(_ssd, inputs, initial_state, chunk_size=chunk_size)
    return out, state


def _ssd(
    inputs: DeltaInputs, initial_state: Tensor | None, *, chunk_size: int
) -> tuple[Tensor, Tensor]:
    length, groups, dtype = inputs.key.shape[1], inputs.key.shape[2], accumulate_dtype(inputs.value)
    padding = -length % chunk_size  # tokens that leave the state as it is

    def split(x: Tensor, into: str) -> Tensor:
        padded = F.pad(x, (0, 0, 0, 0, 0, padding)).to(dtype)
        return rearrange(padded, f"b (m c) (g r) d -> {into}", c=chunk_size, g=groups).contiguous()

    query, key = (split(x, "b m g (r c) d") for x in (inputs.query, inputs.key))
    updates = split(inputs.value * inputs.beta, "b m g r d c")
    decay = split(inputs.decay, "b m g (r d) c").cumsum(-1)
    from_start, to_end = decay.exp(), (decay[..., -1:] - decay).exp()
    allowed = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=decay.device).tril()
    if inputs.starts is not None:  # the number of starts so far in the chunk
        document = rearrange(
            F.pad(inputs.starts, (0, padding)), "b (m c) -> b m 1 1 c", c=chunk_size
        ).cumsum(-1)
        from_start, to_end = from_start * (document == 0), to_end * (document == document[..., -1:])
        allowed = allowed & (document[..., None] == document[..., None, :])
    pairs = (decay[..., None] - decay[..., None, :]).masked_fill(~allowed, -torch.inf).exp()
    pairs = pairs * (query @ key.mT)[:, :, :, None]
    # [B, M, G, R, V, K]
    steps = ((updates * to_end[..., None, :]).flatten(3, 4) @ key).view(*updates.shape[:-1], -1)
    state = (
        torch.zeros_like(steps[:, 0])
        if initial_state is None
        else initial_state.to(dtype).view_as(steps[:, 0])
    )
    states = [state]
    for factor, step in zip(from_start[..., -1:, None].unbind(1), steps.unbind(1), strict=True):
        states.append(factor * states[-1] + step)
    read = (torch.stack(states[:-1], dim=1).flatten(3, 4) @ query.mT).view_as(updates) * from_start[
        ..., None, :
    ]
    out = rearrange(read + updates @ pairs.mT, "b m g r v c -> b (m c) (g r) v")[:, :length]
    return out, states[-1].flatten(1, 2)


@eager
def span_map(inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    """The state after a span as `factor * state + offset` of the state before it: [B, N, 1, 1], [B,
    N, V, K].
    """
    factor, offset = recomputed(_span_map, inputs, chunk_size=CHUNK_SIZE)
    return factor, offset


def _span_map(inputs: DeltaInputs, *, chunk_size: int) -> tuple[Tensor, Tensor]:
    dtype = accumulate_dtype(inputs.value)
    decay = inputs.decay.to(dtype).cumsum(1)
    factor, to_end = decay[:, -1:].exp(), (decay[:, -1:] - decay).exp()
    if inputs.starts is not None:
        document = inputs.starts.cumsum(1)[..., None, None]
        factor, to_end = factor * (document[:, -1:] == 0), to_end * (document == document[:, -1:])
    updates = (inputs.value * inputs.beta).to(dtype) * to_end
    updates = rearrange(updates, "b s (g r) v -> b g (r v) s", g=inputs.key.shape[2])
    offset = updates @ rearrange(inputs.key.to(dtype), "b s g k -> b g s k")
    return factor.transpose(1, 2), rearrange(
        offset, "b g (r v) k -> b (g r) v k", v=inputs.value.shape[-1]
    )
