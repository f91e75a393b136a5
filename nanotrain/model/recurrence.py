"""Parts of layers that read tokens in order, with context parallelism and in generation.

ShortConvolution   a causal convolution of every channel, which sees the tokens before each chunk
CachedScan         in generation: a scan that goes on from the state after the tokens so far

B batch   L local tokens   R rows: chunks of sequences   C tokens of a chunk   D channels   K kernel size
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanotrain.attention.convolution import causal_conv
from nanotrain.comm.group import Group
from nanotrain.model.context import LayerContext, TokenCache
from nanotrain.model.parameters import Parameters
from nanotrain.parallel.cp.chunks import chunk_rows, chunk_segments, join_rows, previous_tails
from nanotrain.parallel.tp.layers import ColumnParallelLinear, column_parallel

Window = tuple[Tensor, Tensor | None]  # tokens after those before them, and their segment ids


class ShortConvolution(nn.Module):
    """A causal convolution of every channel by itself, and an activation.

    Args:
        params: weight [D, K], and bias [D] where declared.
        cp: ranks that share a sequence.
        activation: function of the outputs; None for none.
    """

    def __init__(
        self, params: Parameters, *, cp: Group, activation: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.cp, self.activation = (
            params["weight"],
            params.get("bias"),
            cp,
            activation,
        )
        self.extend = partial(_after_chunk_before, count=self.weight.shape[1] - 1, cp=cp)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, L, D] -> [B, L, D]."""
        window, segment_ids = self.extend(x, context.segment_ids)
        out = join_rows(
            causal_conv(window, self.weight, bias=self.bias, segment_ids=segment_ids), self.cp
        )
        return out if self.activation is None else self.activation(out)

    def cached(self, cache: TokenCache) -> dict[str, Callable[..., Any]]:
        """In generation the tokens before are those of the last call."""
        return {"extend": _CachedTokens(cache, count=self.weight.shape[1] - 1)}


def _after_chunk_before(x: Tensor, segment_ids: Tensor | None, *, count: int, cp: Group) -> Window:
    """[B, L, D] and the segment ids [B, S] of full sequences -> [R, count + C, D], [R, count + C]."""
    rows = chunk_rows(x, cp)
    segments = None if segment_ids is None else chunk_segments(segment_ids, cp, before=count)
    return torch.cat((previous_tails(rows, cp, count=count), rows), dim=1), segments


class _CachedTokens:
    """The tokens after those of the last call."""

    def __init__(self, cache: TokenCache, *, count: int) -> None:
        self._cache, self._count = cache, count
        self._before: Tensor | None = None

    def __call__(self, x: Tensor, segment_ids: Tensor | None) -> Window:
        before = (
            x.new_zeros(x.shape[0], self._count, x.shape[2])
            if self._before is None
            else self._before
        )
        window = torch.cat((before, x), dim=1)
        self._before = window[:, -self._count :]
        return window, self._cache.segment_ids(x.device, before=self._count)


def project_inputs(
    hidden: Tensor,
    wide: tuple[ColumnParallelLinear, ...],
    *,
    narrow: tuple[ColumnParallelLinear, ...],
) -> tuple[Tensor, ...]:
    """Projections of one input; where the wide ones are in fp8, the narrow ones have products of
    their own.
    """
    if wide[0].fp8 is None:
        return column_parallel(hidden, wide + narrow)
    return column_parallel(hidden, wide) + column_parallel(hidden, narrow)


class CachedScan:
    """A scan with the state after the tokens so far.

    Args:
        cache: the cache of the prompts.
        scan: inputs with a field `starts`, and the state before them or None -> outputs, and the
            state after them.
    """

    def __init__(
        self, cache: TokenCache, scan: Callable[[Any, Tensor | None], tuple[Tensor, Tensor]]
    ) -> None:
        self._cache, self._scan = cache, scan
        self._state: Tensor | None = None

    def __call__(self, inputs: Any) -> Tensor:
        segments = self._cache.segment_ids(inputs.value.device, before=1)
        out, self._state = self._scan(
            replace(inputs, starts=segments[:, 1:] != segments[:, :-1]), self._state
        )
        return out
