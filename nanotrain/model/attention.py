"""Causal self-attention: projections, optional norms per head, rotary positions, the core.

    B batch   S sequence   H hidden   N query heads   G key/value heads (N is a multiple of G)   D width of a head

The head counts are read off the projections' outputs, so a layer that holds some of the heads only needs no word
about it. `Context` is what all layers of a batch share and is made once per batch.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.config.config import ModelConfig, Normalization
from nanotrain.config.derive import head_dim, query_groups
from nanotrain.model.norm import build_norm
from nanotrain.model.rope import Rotation, rotate


@dataclass(frozen=True)
class Context:
    """What every attention layer of one batch needs beside the activations.

    Args:
        rotation: of the batch's positions; None without rotary positions.
        mask: [B, 1, S, S] bool, True where a query (row) may see a key (column); None for plain causal.
    """

    rotation: Rotation | None = None
    mask: Tensor | None = None


def document_mask(document_ids: Tensor) -> Tensor:
    """The causal mask that ends at document borders.

    Args:
        document_ids: [B, S] integers, equal within a document.

    Returns:
        [B, 1, S, S] bool, True where attention is allowed.
    """
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return same.tril()


class Attention(nn.Module):
    """Multi-head attention with grouped keys and values."""

    def __init__(self, model: ModelConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = head_dim(model)
        hidden, groups = model.hidden_size, query_groups(model)
        bias = model.add_bias_linear
        inner, key_width = model.num_attention_heads * self.head_dim, groups * self.head_dim

        def linear(inputs: int, outputs: int, *, bias: bool) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, dtype=dtype, device="meta")

        self.query = linear(hidden, inner, bias=bias or model.add_qkv_bias)
        self.key = linear(hidden, key_width, bias=bias or model.add_qkv_bias)
        self.value = linear(hidden, key_width, bias=bias or model.add_qkv_bias)
        self.query_norm: nn.Module | None = None
        self.key_norm: nn.Module | None = None
        if model.qk_layernorm:
            # Qwen3's are RMS norms; a LayerNorm per head is in no published family.
            kind, epsilon = Normalization.RMSNorm, model.norm_epsilon
            self.query_norm = build_norm(kind, self.head_dim, epsilon=epsilon, dtype=dtype)
            self.key_norm = build_norm(kind, self.head_dim, epsilon=epsilon, dtype=dtype)
        self.output = linear(inner, hidden, bias=bias)

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        query, key, value = (self._heads(layer(hidden)) for layer in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if context.rotation is not None:
            query, key = rotate(query, context.rotation), rotate(key, context.rotation)
        attended: Tensor = self.output(attend(query, key=key, value=value, mask=context.mask).flatten(2))
        return attended

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))


def attend(query: Tensor, *, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention of every query over the keys it may see.

    Args:
        query: [B, S, N, D].
        key, value: [B, S, G, D].
        mask: [B, 1, S, S] bool, or None for plain causal.

    Returns:
        [B, S, N, D].
    """
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    if grouped and not query.is_cuda:  # torch's own grouping is 1.4 to 1.5 times slower than repeating on the CPU
        repeats = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        grouped = False
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return out.transpose(1, 2)
