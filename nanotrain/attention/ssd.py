r"""State space duality (Mamba-2): linear attention whose state decays per head, in chunks.

    S_t = exp(g_t) S_{t-1} + dt_t x_t B_t^T          y_t = S_t C_t          g_t = A dt_t, at most 0

The inputs have the names of the gated delta rule (delta_rule.py), without correction: x is the
value, B the key, C the query, dt is beta and g the decay. In a chunk of L tokens, with u = dt x,
D_ij the decay between tokens j <= i, d_i from the start of the chunk to token i and e_j from token
j to its end:

    S <- d_L S + (e u)^T B          chunk after chunk, S the state before a chunk
    Y = d C S^T + (C B^T * D) u     all chunks at once

A token that starts a document sees no earlier state. Torch's operators compute in fp32 (fp64 for
fp64), the kernels of scan_kernels.py in 16 bits on a GPU. Only the inputs are kept
for the backward, which computes the rest again. Dao and Gu 2024, "Transformers are
SSMs", section 6.

    ssd        outputs and the state at the end, from the state at the start
    span_map   the state at the end as an affine function of the state at the start, for context
               parallelism

    batch samples   S sequence   G groups of heads with one B and C   N heads (a multiple of G)
    P head dim of x   K state dim   M chunks   L tokens of a chunk   R = N / G
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from nanotrain.attention.chunk_scan import ssd_by_triton
from nanotrain.attention.chunks import accumulate_dtype
from nanotrain.attention.delta_rule import ScanForm, recomputed
from nanotrain.attention.package_scans import fla_ssd, mamba_ssd
from nanotrain.attention.scan_inputs import DeltaInputs
from nanotrain.attention.scan_kernels import kernel_for
from nanotrain.comm.autograd import eager
from nanotrain.spec.kinds.mamba import CHUNK_SIZE

# by the name of a row of scan_kernels.py
KERNEL_FORMS: dict[str, ScanForm] = {
    "mamba_ssm": mamba_ssd,
    "fla": fla_ssd,
    "triton": ssd_by_triton,
}


@eager  # a compiled graph would keep tensors that are to be computed again
def ssd(
    inputs: DeltaInputs, initial_state: Tensor | None = None, *, chunk_size: int = CHUNK_SIZE
) -> tuple[Tensor, Tensor]:
    """Outputs and final state.

    Args:
        inputs: a sequence, or a span of one; decays per head.
        initial_state: [batch, N, P, K]; None for zeros.
        chunk_size: L.

    Returns:
        [batch, S, N, P] and [batch, N, P, K], in fp32.
    """
    kernel = kernel_for("mamba2", inputs.value, has_rate=inputs.A is not None)
    form = KERNEL_FORMS.get(kernel)
    if form is not None:
        return form(inputs, initial_state)
    y, state = recomputed(_ssd, inputs, initial_state, chunk_size=chunk_size)
    return y, state


def _ssd(
    inputs: DeltaInputs, initial_state: Tensor | None, *, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """The scan over all chunks; arguments and results as `ssd`."""
    chunks = _Chunks.of(inputs, chunk_size)
    pairs = chunks.pairs()
    decayed = chunks.u * chunks.to_end
    steps = decayed.flatten(3, 4) @ chunks.B
    steps = steps.unflatten(3, chunks.u.shape[3:5])  # [batch, M, G, R, P, K]
    state = torch.zeros_like(steps[:, 0])
    if initial_state is not None:
        state = initial_state.to(steps.dtype).view_as(state)
    states = [state]  # before each chunk
    decays = chunks.from_start[..., -1:]  # decay of the state over a chunk
    for decay, step in zip(decays.unbind(1), steps.unbind(1), strict=True):
        states.append(decay * states[-1] + step)
    before = torch.stack(states[:-1], dim=1)
    before = before.flatten(3, 4)
    read = (before @ chunks.C.mT).view_as(chunks.u)
    decayed_read = read * chunks.from_start  # first: the sum's order sets its backward's
    y = decayed_read + chunks.u @ pairs.mT
    y = rearrange(y, "b m g r p l -> b (m l) (g r) p")
    length = inputs.value.shape[1]
    return y[:, :length], states[-1].flatten(1, 2)


@dataclass(frozen=True)
class _Chunks:
    """A sequence in chunks; the last one is padded with tokens that leave the state as it is."""

    C: Tensor  # [batch, M, G, L, K]
    B: Tensor  # [batch, M, G, L, K]
    u: Tensor  # [batch, M, G, R, P, L], dt x
    decay: Tensor  # [batch, M, G, R, L], sums of g from the start of the chunk
    from_start: Tensor  # [batch, M, G, R, 1, L], decays of the state until a token reads it
    to_end: Tensor  # [batch, M, G, R, 1, L], decays of a token until the end of the chunk
    allowed: Tensor  # bool, broadcasts to [batch, M, G, R, L, L]: a token reads an earlier one

    @classmethod
    def of(cls, inputs: DeltaInputs, size: int) -> "_Chunks":
        """Split a sequence into chunks of a size."""
        dtype = accumulate_dtype(inputs.value)
        num_groups = inputs.key.shape[2]
        padding = -inputs.key.shape[1] % size

        def split(x: Tensor, into: str) -> Tensor:
            padded = F.pad(x, (0, 0, 0, 0, 0, padding)).to(dtype)
            chunks = rearrange(padded, f"b (m l) (g r) d -> {into}", l=size, g=num_groups)
            return chunks.contiguous()

        C = split(inputs.query, "b m g (r l) d")
        B = split(inputs.key, "b m g (r l) d")
        u = split(inputs.value * inputs.beta, "b m g r d l")
        decay = split(inputs.decay, "b m g (r d) l").cumsum(-1)
        from_start = decay.exp()
        last = decay[..., -1:]
        to_end = (last - decay).exp()
        allowed = torch.ones(size, size, dtype=torch.bool, device=decay.device).tril()
        if inputs.starts is not None:
            starts = F.pad(inputs.starts, (0, padding))
            starts = rearrange(starts, "b (m l) -> b m 1 1 l", l=size)
            document = starts.cumsum(-1)  # starts so far in the chunk
            is_of_first = document == 0
            is_of_last = document == document[..., -1:]
            is_same = document[..., None] == document[..., None, :]
            from_start = torch.where(is_of_first, from_start, 0.0)
            to_end = torch.where(is_of_last, to_end, 0.0)
            allowed = allowed & is_same
        return cls(C, B, u, decay, from_start[..., None, :], to_end[..., None, :], allowed)

    def pairs(self) -> Tensor:
        """[batch, M, G, R, L, L]: C B^T of allowed pairs, decayed from token to token; else 0."""
        logarithms = self.decay[..., None] - self.decay[..., None, :]
        decays = logarithms.masked_fill(~self.allowed, -torch.inf).exp()
        products = self.C @ self.B.mT
        return decays * products[:, :, :, None]


@eager
def span_map(inputs: DeltaInputs) -> tuple[Tensor, Tensor]:
    """The state after a span as `factor * state + offset` of the state before it.

    Returns:
        factor [batch, N, 1, 1] and offset [batch, N, P, K].
    """
    factor, offset = recomputed(_span_map, inputs, chunk_size=CHUNK_SIZE)
    return factor, offset


def _span_map(inputs: DeltaInputs, *, chunk_size: int) -> tuple[Tensor, Tensor]:
    """The state after a span as an affine map; arguments and results as `span_map`."""
    dtype = accumulate_dtype(inputs.value)
    decay = inputs.decay.to(dtype).cumsum(1)
    factor = decay[:, -1:].exp()
    to_end = (decay[:, -1:] - decay).exp()
    if inputs.starts is not None:
        document = inputs.starts.cumsum(1)[..., None, None]
        last_document = document[:, -1:]
        factor = torch.where(last_document == 0, factor, 0.0)
        to_end = torch.where(document == last_document, to_end, 0.0)
    x = inputs.value
    B = inputs.key.to(dtype)
    u = (x * inputs.beta).to(dtype)
    u = u * to_end
    u = rearrange(u, "b s (g r) p -> b g (r p) s", g=B.shape[2])
    offset = u @ rearrange(B, "b s g k -> b g s k")
    offset = rearrange(offset, "b g (r p) k -> b (g r) p k", p=x.shape[-1])
    return factor.transpose(1, 2), offset
