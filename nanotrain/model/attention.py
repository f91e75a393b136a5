"""Causal self-attention: projections, optional norms per head, rotary positions, the core.

    B batch   S sequence   H hidden   N query heads   G key/value heads (N is a multiple of G)   D width of a head

The head counts are read off the projections' outputs, so a layer that holds some of the heads only needs no word
about it. `Context` is what all layers of a batch share and is made once per batch.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanotrain.comm.group import Group
from nanotrain.config.config import ModelConfig, Normalization
from nanotrain.config.derive import head_dim, query_groups
from nanotrain.model.meta import column_linear, meta_parameter, row_linear
from nanotrain.model.norm import build_norm
from nanotrain.model.parallel import ModelParallel
from nanotrain.model.rope import Rotation, rotate
from nanotrain.model.router import MoEContext
from nanotrain.parallel.tp.layers import ColumnParallelLinear, ReplicatedHeadsLinear, column_parallel

ALONE = ModelParallel.single_rank()


@dataclass(frozen=True)
class Context:
    """What the layers of one batch need beside the activations.

    Args:
        rotation: of the batch's positions; None without rotary positions.
        mask: what the core's `plan_mask` made of the batch.
        moe: what routers need to know of the batch.
    """

    rotation: Rotation | None = None
    mask: Any = None
    moe: MoEContext = MoEContext()


class Attention(nn.Module):
    """Multi-head attention with grouped keys and values.

    Args:
        model_config: the whole model's shape.
        dtype: of the parameters and activations.
        parallel: the tp group shares the heads, the core's group the sequences.
    """

    def __init__(self, model_config: ModelConfig, *, dtype: torch.dtype, parallel: ModelParallel = ALONE) -> None:
        super().__init__()
        self.core_attention = parallel.core_attention
        self.head_dim = head_dim(model_config)
        self.query_norm: nn.Module | None = None
        self.key_norm: nn.Module | None = None
        has_bias = model_config.add_bias_linear or model_config.add_qkv_bias
        column = partial(column_linear, bias=has_bias, dtype=dtype, tensor_parallel=parallel.tp)
        self.key: ColumnParallelLinear
        self.value: ColumnParallelLinear
        hidden, inner = model_config.hidden_size, model_config.num_attention_heads * self.head_dim
        key_width, rows = query_groups(model_config) * self.head_dim, shared_rows(model_config, parallel.tp.group)
        self.query = column(hidden, inner)
        if rows is None:
            self.key, self.value = column(hidden, key_width), column(hidden, key_width)
        else:
            self.key, self.value = (
                ReplicatedHeadsLinear(
                    meta_parameter(key_width, hidden, dtype=dtype),
                    meta_parameter(key_width, dtype=dtype) if has_bias else None,
                    rows=rows,
                    tensor_parallel=parallel.tp,
                )
                for _ in range(2)
            )
        if model_config.qk_layernorm:
            # Qwen3's are RMS norms; a LayerNorm per head is in no published family.
            norm = partial(build_norm, epsilon=model_config.norm_epsilon, dtype=dtype)
            self.query_norm = norm(Normalization.RMSNorm, self.head_dim)
            self.key_norm = norm(Normalization.RMSNorm, self.head_dim)
        self.output = row_linear(
            inner, hidden, bias=model_config.add_bias_linear, dtype=dtype, tensor_parallel=parallel.tp
        )

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        projections = column_parallel(hidden, (self.query, self.key, self.value))
        query, key, value = (projected.unflatten(-1, (-1, self.head_dim)) for projected in projections)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if context.rotation is not None:
            query, key = rotate(query, context.rotation), rotate(key, context.rotation)
        attended = self.core_attention(query, key=key, value=value, mask=context.mask)
        out: Tensor = self.output(attended.flatten(2))
        return out


def shared_rows(model_config: ModelConfig, group: Group) -> slice | None:
    """The rows of the key and value weights that a rank computes where heads are fewer than tp ranks.

    Several ranks then need the same head: each holds all of these (small) weights and computes the one its query heads
    belong to. None where every rank has heads of its own and the weights are cut.

    >>> shared_rows(ModelConfig(hidden_size=64, num_attention_heads=8, num_query_groups=2), Group.single_rank("tp"))
    """
    groups, width = query_groups(model_config), head_dim(model_config)
    if groups % group.size == 0:
        return None
    head = group.index * groups // group.size
    return slice(head * width, (head + 1) * width)
