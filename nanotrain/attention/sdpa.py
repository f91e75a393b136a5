"""Core attention with torch's `scaled_dot_product_attention`, for full sequences on one rank.

attend         softmax attention, causal and aligned to the last key, or with a mask
SdpaKernel     the kernel of plain causal attention; it computes other calls in tiles
DenseKernel    the kernel with a dense mask
LayerKernels   the kernels of a model's layers
SDPAttention   the core attention of a group of one rank

B batch   S sequence   N query heads   G key/value heads (N is a multiple of G)   D, Dv head dims
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.attention.call import AttentionCall, AttentionKernel, TileKernel
from nanotrain.attention.chunks import ScoreOptions
from nanotrain.attention.tiles import Spans, attend_tiles


def attend(
    query: Tensor,
    *,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    repeats_heads: bool = False,
    pads_values: bool = False,
) -> Tensor:
    """Softmax attention with grouped queries.

    Args:
        query: [B, Q, N, D].
        key: [B, K, G, D].
        value: [B, K, G, Dv].
        mask: [B or 1, 1, Q, K] bool, True where a query (row) may attend to a key (column); None
            for causal, aligned to the last key. Then K > Q only on CUDA, and not inside compiled
            code.
        repeats_heads: repeat key/value heads, for kernels without grouped queries. On a CPU 16-bit
            heads are always repeated in training, because torch sums the gradients of a group in 16
            bits (measured with six queries in bf16: an error of 7.0e-3 instead of 4.1e-3).
        pads_values: pad values that are narrower than keys with zeros, for kernels of one head dim;
            always on a CPU, where torch falls back to its math kernel with unequal head dims, 2 to
            4 times slower.

    Returns:
        [B, Q, N, Dv].
    """
    query = query.transpose(1, 2)
    key = key.transpose(1, 2)
    value = value.transpose(1, 2)
    if repeats_heads or _sums_in_16_bits(query):
        key = _repeat_heads(key, query.shape[1])
        value = _repeat_heads(value, query.shape[1])
    head_dim = key.shape[-1]
    value_head_dim = value.shape[-1]
    is_padded = value_head_dim < head_dim and (pads_values or query.is_cpu)
    if is_padded:
        value = F.pad(value, (0, head_dim - value_head_dim))
    is_causal = mask is None
    bias: Any = mask
    # An `if`: in a graph for sequences of any length the lengths are symbols, and torch refuses a
    # symbol as a flag.
    if is_causal and query.shape[2] != key.shape[2]:
        # imports the compiler, which takes seconds
        from torch.nn.attention.bias import causal_lower_right

        bias = causal_lower_right(query.shape[2], key.shape[2])
        is_causal = False
    is_grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, is_causal=is_causal, enable_gqa=is_grouped
    )
    if is_padded:
        out = out[..., :value_head_dim]
    return out.transpose(1, 2)


def _sums_in_16_bits(query: Tensor) -> bool:
    """Whether torch sums the gradients of a group of heads in 16 bits."""
    return query.is_cpu and query.itemsize == 2 and torch.is_grad_enabled()


def _repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, G, K, D] -> [B, N, K, D]."""
    if x.shape[1] == num_heads:
        return x
    return x.repeat_interleave(num_heads // x.shape[1], dim=1)


def restricted(backends: Sequence[str]) -> AbstractContextManager[None]:
    """Restrict SDPA to some kernels, the first that takes a call; without any: as torch selects.

    Args:
        backends: names in `torch.nn.attention.SDPBackend`.
    """
    if not backends:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = [getattr(SDPBackend, name) for name in backends]
    context: AbstractContextManager[None] = sdpa_kernel(kernels, set_priority=len(kernels) > 1)
    return context


@dataclass(frozen=True)
class SdpaKernel:
    """`attend` for plain causal attention, tiles for other calls.

    On the CPU `attend` would need a dense mask for fewer queries than keys, so tiles compute these
    too.
    """

    # kernels of SDPA on a GPU, by their names in `SDPBackend`; none where torch selects
    backends: tuple[str, ...] = ()
    # repeat heads of key and value, for kernels without grouped queries
    repeats_heads: bool = False
    pads_values: bool = False  # pad values on GPUs, for kernels of one head dim

    def attend(self, query: Tensor, *, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention without windows or documents: [B, S, N, D] -> [B, S, N, Dv]."""
        with restricted(self.backends if query.is_cuda else ()):
            return attend(
                query,
                key=key,
                value=value,
                repeats_heads=self.repeats_heads,
                pads_values=self.pads_values,
            )

    def __call__(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        call: AttentionCall,
        scores: ScoreOptions | None,
    ) -> Tensor:
        """SDPA for plain causal calls, else tiles: [B, Q, N, D] -> [B, Q, N, Dv]."""
        if scores is None and call.is_causal and (call.queries == call.keys or not query.is_cpu):
            return self.attend(query, key=key, value=value)
        return TileKernel()(query, key=key, value=value, call=call, scores=scores)


class DenseKernel:
    """`attend` with a dense mask of all queries and keys, for few queries or as a reference.

    Args:
        backends: kernels of SDPA, as in `SdpaKernel`.
    """

    def __init__(self, *backends: str) -> None:
        self.backends = backends

    def __call__(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        call: AttentionCall,
        scores: ScoreOptions | None,
    ) -> Tensor:
        """SDPA with the mask, with score options one masked tile: [B, Q, N, D] -> [B, Q, N, Dv]."""
        if scores is None:
            with restricted(self.backends):
                return attend(query, key=key, value=value, mask=call.masked_tile.mask())
        return attend_tiles(query, key=key, value=value, plan=call.masked_tile, scores=scores)


@dataclass(frozen=True)
class LayerKernels:
    """The kernels of layers that attend to all earlier keys, and of layers with a window."""

    full: AttentionKernel = field(default_factory=SdpaKernel)
    window: AttentionKernel = field(default_factory=TileKernel)

    def of(self, window: int | None) -> AttentionKernel:
        """The kernel of a layer with this window."""
        return self.full if window is None else self.window


class SDPAttention:
    """Attention to full sequences, as a core attention."""

    def __init__(self, kernels: LayerKernels | None = None) -> None:
        self.kernels = kernels or LayerKernels()

    def plan_mask(
        self, segment_ids: Tensor | None, *, tokens: Tensor, window: int | None = None
    ) -> AttentionCall | None:
        """The call; None for plain causal attention, which compiled code can contain."""
        kernel = self.kernels.of(window)
        if segment_ids is None and window is None and isinstance(kernel, SdpaKernel):
            return None
        spans = Spans.of(segment_ids, length=tokens.shape[1], window=window)
        return AttentionCall(kernel, spans, range(tokens.shape[1]), tokens.device)

    def __call__(
        self,
        query: Tensor,
        *,
        key: Tensor,
        value: Tensor,
        mask: AttentionCall | None,
        scores: ScoreOptions | None,
    ) -> Tensor:
        """Attend: plain causal attention, or the planned call."""
        kernel = self.kernels.full
        if mask is None and scores is None and isinstance(kernel, SdpaKernel):
            return kernel.attend(query, key=key, value=value)
        if mask is None:
            length = query.shape[1]
            spans = Spans.of(None, length=length)
            mask = AttentionCall(kernel, spans, range(length), query.device)
        return mask(query, key=key, value=value, scores=scores)
