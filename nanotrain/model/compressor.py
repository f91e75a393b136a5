"""Compressed keys of windows of tokens, and an index of them (DeepSeek-V4, section 2.3).

    rotate_last         rotary positions of the last channels of a head
    ProjectedTokens     what tokens are to their compressed keys
    Compressor          their projections, and the keys
    CompressedIndexer   an index of compressed keys, with compressed keys of its own
    windows_of          the windows of a microbatch

Over cp a rank computes the keys of its own tokens (parallel/cp/key_windows.py).

    B batch   S sequence   H hidden   T compressed keys   D channels of a key
    I index heads   E width of an index head   R rotary channels
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanotrain.attention.compressed import (
    KeyWindows,
    WindowTokens,
    compress_tokens,
    take_tokens,
)
from nanotrain.attention.selection import Index
from nanotrain.comm.autograd import concat_along
from nanotrain.config.model import ModelConfig
from nanotrain.model.context import AttentionInputs, ModelParallel, split_heads
from nanotrain.model.norm import build_norm
from nanotrain.model.parameters import Parameters
from nanotrain.model.rope import Rotary
from nanotrain.parallel.cp.key_windows import ChunkWindows, join_keys, with_tokens_before
from nanotrain.parallel.cp.selected import plan_calls
from nanotrain.parallel.tp.layers import SEQUENCE, ColumnParallelLinear, column_parallel


def rotate_last(x: Tensor, rotary: Rotary, *, back: bool = False) -> Tensor:
    """Rotate the last channels of every head, of which neighbours are a pair.

    Args:
        x: [B, S, N, D].
        rotary: cosines and sines of the S positions.
        back: whether to rotate by the negative angles.
    """
    cos = rotary.cos
    sin = rotary.sin
    num_rotated = 2 * cos.shape[-1]
    rest, rotated = x.split((x.shape[-1] - num_rotated, num_rotated), dim=-1)
    first, second = rotated.unflatten(-1, (-1, 2)).unbind(-1)
    if back:
        pairs = (first * cos + second * sin, second * cos - first * sin)
    else:
        pairs = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((rest, torch.stack(pairs, dim=-1).flatten(-2)), dim=-1)


@dataclass(frozen=True)
class ProjectedTokens:
    """The tensors from which compressed keys are computed, for all tokens so far."""

    value: Tensor  # [B, S, D or 2 D]
    gate: Tensor  # the same shape
    inputs: AttentionInputs  # rotary tables and mask of the tokens


def read_new_tokens(
    value: Tensor, gate: Tensor, *, inputs: AttentionInputs, name: str
) -> ProjectedTokens:
    """The tokens of a microbatch, before which there are none."""
    return ProjectedTokens(value, gate, inputs)


class Compressor(nn.Module):
    """Projections of tokens to compressed keys.

    Args:
        model_config: kind and epsilon of the norm.
        params: value, gate, position_bias, norm.
        parallel: replicated over tp.
        width: channels of a compressed key.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel, width: int
    ) -> None:
        super().__init__()
        self.width = width
        self.cp = parallel.cp
        self.position_bias = params["position_bias"]
        replicated = partial(ColumnParallelLinear, tensor_parallel=parallel.tp.unsharded)
        self.value = replicated(*params.linear("value"))
        self.gate = replicated(*params.linear("gate"))
        self.norm = build_norm(model_config, params.submodule("norm"))

    def forward(self, tokens: ProjectedTokens, windows: KeyWindows) -> Tensor:
        """The compressed keys [B, T, width] of the windows of full sequences."""
        rotary = tokens.inputs.rotary
        assert rotary is not None, "a rule demands rotary positions"
        if self.cp.size > 1:
            return self._compress_over_cp(tokens, windows, rotary=rotary)
        return self._compress(
            tokens.value, tokens.gate, windows=windows.in_sequences, rotary=rotary
        )

    def _compress(
        self, value: Tensor, gate: Tensor, *, windows: WindowTokens, rotary: Rotary
    ) -> Tensor:
        """The compressed keys [B, T, width] of windows of tokens [B, S, ...]."""
        summed = compress_tokens(
            value, gate, bias=self.position_bias, windows=windows, width=self.width
        )
        keys = self.norm(summed)[:, :, None]
        return rotate_last(keys, first_token_tables(rotary, windows))[:, :, 0]

    def _compress_over_cp(
        self, tokens: ProjectedTokens, windows: KeyWindows, *, rotary: Rotary
    ) -> Tensor:
        """The compressed keys [B, T, width] of full sequences from the tokens of all cp ranks.

        A window can begin on another rank: its tokens are received, with their rotary tables.
        """
        batch = len(tokens.value)
        num_series = tokens.value.shape[-1] // self.width
        chunks = ChunkWindows.of(windows, self.cp, batch=batch, num_series=num_series)
        tables = rotary_tables(rotary, batch=batch)[:, :, 0]
        joined = torch.cat((tokens.value, tokens.gate, tables), dim=-1)
        rows = with_tokens_before(joined, self.cp, count=chunks.num_before)
        projected = tokens.value.shape[-1]
        num_pairs = rotary.cos.shape[-1]
        value, gate, cos, sin = rows.split((projected, projected, num_pairs, num_pairs), dim=-1)
        row_tables = Rotary(cos[:, :, None], sin[:, :, None])
        keys = self._compress(value, gate, windows=chunks.tokens, rotary=row_tables)
        return join_keys(keys, chunks, group=self.cp)


def rotary_tables(rotary: Rotary, *, batch: int) -> Tensor:
    """Cosines and sines of every sequence, [B, S, 1, R]."""
    tables = torch.cat((rotary.cos, rotary.sin), dim=-1)
    return tables.expand(batch, -1, -1, -1)


def first_token_tables(rotary: Rotary, windows: WindowTokens) -> Rotary:
    """The tables of the first token of each window."""
    cos = rotary.cos
    sin = rotary.sin
    if cos.dim() == 3:  # of the same positions in all sequences
        cos = cos[None]
        sin = sin[None]
    first = windows.tokens[..., 0]
    return Rotary(take_tokens(cos, first), take_tokens(sin, first))


class CompressedIndexer(Compressor):
    """An index of compressed keys, which has compressed keys of its own.

    Args:
        model_config: sizes, kind and epsilon of the norm.
        params: parameters of `Compressor`, query and head_weight.
        parallel: replicated over tp; under sequence parallelism each rank projects its tokens.
    """

    def __init__(
        self, model_config: ModelConfig, params: Parameters, *, parallel: ModelParallel
    ) -> None:
        assert model_config.dsa is not None, "sparse_attention_type is compressed"
        dsa = model_config.dsa
        super().__init__(model_config, params, parallel=parallel, width=dsa.head_dim)
        self.topk = dsa.topk
        self.tensor_parallel = parallel.tp
        replicated = parallel.tp.unsharded
        self.query = ColumnParallelLinear(*params.linear("query"), tensor_parallel=replicated)
        self.head_weight = ColumnParallelLinear(
            *params.linear("head_weight"), tensor_parallel=replicated
        )

    def project(self, hidden: Tensor, compressed_query: Tensor) -> tuple[Tensor, ...]:
        """Index queries, weights of index heads, values and gates of S tokens.

        Args:
            hidden: [B, S or S/tp, H].
            compressed_query: [B, S or S/tp, q_lora_rank].
        """
        hidden = hidden.detach()
        query = self.query(compressed_query.detach())
        projected = (query, *column_parallel(hidden, (self.head_weight, self.value, self.gate)))
        if self.tensor_parallel.sequence_parallel:
            return self._gather_sequence(*projected)
        return projected

    def index(self, query: Tensor, *, key: Tensor, weight: Tensor, rotary: Rotary | None) -> Index:
        """The index of queries [B, S, I E] and compressed index keys [B, T, E]."""
        assert rotary is not None, "a rule demands rotary positions"
        query = rotate_last(split_heads(query, self.width), rotary)
        return Index(query, key, weight, self.topk)

    def _gather_sequence(self, *projected: Tensor) -> tuple[Tensor, ...]:
        """[B, S/tp, ...] -> [B, S, ...]; the ranks compute equal gradients of all tokens."""
        widths = [x.shape[-1] for x in projected]
        packed = torch.cat(projected, dim=-1)
        gathered = concat_along(packed, self.tensor_parallel.group, dim=SEQUENCE)
        return tuple(x.contiguous() for x in gathered.split(widths, dim=-1))


def windows_of(mask: Any, x: Tensor, *, size: int) -> KeyWindows:
    """The windows of full sequences of a microbatch, planned once for all layers.

    Args:
        mask: plan of the attention.
        x: [B, S / cp, ...].
        size: tokens of a window.
    """
    call = plan_calls(mask, x)[0]
    plans = call.kernel_plans
    name = f"windows of {size}"
    if name not in plans:
        length = call.spans.first_keys.shape[1]
        plans[name] = KeyWindows.of(call.spans, length=length, size=size, device=x.device)
    windows: KeyWindows = plans[name]
    return windows
