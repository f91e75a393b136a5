"""Multi-head latent attention: queries, keys and values are made from narrow latents, positions from channels apart.

    hidden --+-- query_down -- query_latent_norm -- query_up ---> query   per head: D plain + R rotary channels
             |                                                            (or hidden -- query, without a latent)
             +-- kv_down --+-- kv_latent_norm -- kv_up ---------> key     per head: D plain ..
                           |                                --+-> value   per head: Dv
                           +-- rotate -----------------------> key        .. + R rotary channels, one for all heads

Over tp the heads are cut, so query_up, kv_up and output are; the latents belong to all heads, so every rank holds the
down projections and norms whole. They stand before `enter`: what passes between the ranks is as narrow as a latent,
and its gradient comes back summed. With sequence parallelism each rank makes the latents of its own tokens only.

DeepSeek-V2 (2024), section 2.1. Rotary channels are paired as everywhere here (`rope.py`), i with i + R/2, where
DeepSeek's files pair neighbours; reordering the rows of query_up and kv_down that make them turns one into the other.

    B batch   S sequence   H hidden   N heads   D, R, Dv widths   Lq, Lkv widths of the latents
"""

from functools import partial

import torch
from torch import Tensor, nn

from nanotrain.config.config import ModelConfig
from nanotrain.config.derive import head_dim
from nanotrain.model.attention import Context
from nanotrain.model.meta import column_linear, row_linear
from nanotrain.model.norm import build_norm
from nanotrain.model.parallel import ModelParallel
from nanotrain.model.rope import rotate
from nanotrain.parallel.tp.layers import ColumnParallelLinear, column_parallel

ALONE = ModelParallel.single_rank()


class LatentAttention(nn.Module):
    """Stands where `Attention` stands, on the meta device.

    Args:
        model_config: the whole model's shape.
        dtype: of the parameters and activations.
        parallel: the tp group shares the heads, the core's group the sequences.
    """

    def __init__(self, model_config: ModelConfig, *, dtype: torch.dtype, parallel: ModelParallel = ALONE) -> None:
        super().__init__()
        self.core_attention, self.tensor_parallel = parallel.core_attention, parallel.tp
        hidden, heads, mla = model_config.hidden_size, model_config.num_attention_heads, model_config.mla
        latent = mla.kv_lora_rank
        self.query_widths = (mla.qk_head_dim, mla.qk_pos_emb_head_dim)
        self.key_value_widths = (mla.qk_head_dim, mla.v_head_dim)
        self.latent_widths = (latent, mla.qk_pos_emb_head_dim)
        column = partial(column_linear, bias=False, dtype=dtype)
        cut = partial(column, tensor_parallel=parallel.tp)
        whole = partial(column, tensor_parallel=parallel.tp.unsharded)
        norm = partial(
            build_norm,
            model_config.normalization,
            epsilon=model_config.norm_epsilon,
            dtype=dtype,
        )
        query_width = heads * head_dim(model_config)
        self.query: ColumnParallelLinear | None = None
        if mla.q_lora_rank is None:
            self.query = cut(hidden, query_width)
        else:
            self.query_down = whole(hidden, mla.q_lora_rank)
            self.query_latent_norm = norm(mla.q_lora_rank)
            self.query_up = cut(mla.q_lora_rank, query_width)
        self.kv_down = whole(hidden, sum(self.latent_widths))
        self.kv_latent_norm = norm(latent)
        self.kv_up = cut(latent, heads * sum(self.key_value_widths))
        self.output = row_linear(heads * mla.v_head_dim, hidden, bias=False, dtype=dtype, tensor_parallel=parallel.tp)

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        """[B, S or S/tp, H] -> the same shape."""
        assert context.rotation is not None, "latent attention has rotary positions, which validation makes sure of"
        query, compressed = self._query_and_latent(hidden)
        latent, shared = compressed.split(self.latent_widths, dim=-1)
        (key_value,) = column_parallel(self.kv_latent_norm(latent), (self.kv_up,))
        plain, turned = query.unflatten(-1, (-1, sum(self.query_widths))).split(self.query_widths, dim=-1)
        query = torch.cat((plain, rotate(turned, context.rotation)), dim=-1)
        plain, value = key_value.unflatten(-1, (-1, sum(self.key_value_widths))).split(self.key_value_widths, dim=-1)
        shared = rotate(self.tensor_parallel.enter(shared)[:, :, None], context.rotation)
        key = torch.cat((plain, shared.expand(-1, -1, plain.shape[2], -1)), dim=-1)
        attended = self.core_attention(query, key=key, value=value, mask=context.mask)
        out: Tensor = self.output(attended.flatten(2))
        return out

    def _query_and_latent(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[B, S, N/tp * (D + R)], entered, and [B, S or S/tp, Lkv + R], not yet."""
        if self.query is not None:
            (query,) = column_parallel(hidden, (self.query,))
            (compressed,) = column_parallel(hidden, (self.kv_down,))
            return query, compressed
        narrow, compressed = column_parallel(hidden, (self.query_down, self.kv_down))
        (query,) = column_parallel(self.query_latent_norm(narrow), (self.query_up,))
        return query, compressed
