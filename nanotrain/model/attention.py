"""Causal self-attention: projections, optional norms per head, rotary positions, the core.

    B batch   S sequence   H hidden   N query heads   G key/value heads (N is a multiple of G)   D width of a head

The head counts are read off the projections' outputs, so a layer that holds some of the heads only needs no word
about it. `Context` is what all layers of a batch share and is made once per batch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanotrain.config.config import ModelConfig, Normalization
from nanotrain.config.derive import head_dim, query_groups
from nanotrain.model.norm import build_norm
from nanotrain.model.rope import Rotation, rotate
from nanotrain.parallel.cp.attention import Core, PlainCore
from nanotrain.parallel.cp.plain import document_mask

__all__ = ["Attention", "Context", "document_mask"]

PLAIN: Core = PlainCore()


@dataclass(frozen=True)
class Context:
    """What every attention layer of one batch needs beside the activations.

    Args:
        rotation: of the batch's positions; None without rotary positions.
        mask: what the core's `plan_mask` made of the batch.
    """

    rotation: Rotation | None = None
    mask: Any = None


class Attention(nn.Module):
    """Multi-head attention with grouped keys and values.

    Args:
        model: the whole model's shape.
        dtype: of the parameters and activations.
        core: of the cp group that shares the sequences.
    """

    def __init__(self, model: ModelConfig, *, dtype: torch.dtype, core: Core = PLAIN) -> None:
        super().__init__()
        self.core = core
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
        attended = self.core(query, key=key, value=value, mask=context.mask)
        out: Tensor = self.output(attended.flatten(2))
        return out

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (-1, self.head_dim))
