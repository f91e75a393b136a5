"""Parts of recurrent layers, with context parallelism and in generation.

ScanFunctions      the elementwise functions of a layer around its scan
ShortConvolution   a depthwise causal convolution; it reads the tokens before each chunk
CachedScan         a scan for generation, which starts from the state of the previous call
project_inputs     several projections of one input

B batch   L local tokens   R rows: chunks of sequences   C tokens of a chunk
D channels   K kernel size
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.attention.convolution import short_convolution
from nanotrain.comm.group import Group
from nanotrain.model.context import LayerContext, TokenCache
from nanotrain.model.parameters import Parameters
from nanotrain.parallel.cp.chunks import chunk_rows, chunk_segments, join_rows, previous_tails
from nanotrain.parallel.tp.layers import ColumnParallelLinear, column_parallel

# tokens preceded by the K - 1 tokens before them, and their segment ids
Window = tuple[Tensor, Tensor | None]


def _broadcast(weight: Tensor, x: Tensor) -> Tensor:
    """A weight of the last dim of x, which operators broadcast over tokens."""
    return weight


def _normalize_rows(x: Tensor, eps: float) -> Tensor:
    """[..., D] divided by the root of the mean square of every row."""
    return F.rms_norm(x, x.shape[-1:], eps=eps)


@dataclass(frozen=True)
class ScanFunctions:
    """The elementwise functions of a layer around its scan, chosen when the layer is built."""

    softplus: Callable[[Tensor], Tensor] = F.softplus
    exp: Callable[[Tensor], Tensor] = torch.exp
    silu: Callable[[Tensor], Tensor] = F.silu
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
    # a weight [D] for x [..., D]
    per_token: Callable[[Tensor, Tensor], Tensor] = _broadcast
    normalize_rows: Callable[[Tensor, float], Tensor] = _normalize_rows


class ShortConvolution(nn.Module):
    """A depthwise causal convolution, and an activation.

    Args:
        params: weight [D, K], and bias [D] where declared.
        cp: ranks that share a sequence.
        activation: function of the outputs; None for none.
    """

    def __init__(
        self, params: Parameters, *, cp: Group, activation: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.weight = params["weight"]
        self.bias = params.get("bias")
        self.cp = cp
        self.communicates = cp.size > 1
        self.activation = activation
        self.num_before = self.weight.shape[1] - 1  # earlier tokens that an output reads
        self.window: Callable[..., Window] = partial(
            _window_over_cp, num_before=self.num_before, cp=cp
        )

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, L, D] -> [B, L, D]."""
        window, segment_ids = self.window(x, context.segment_ids)
        rows = short_convolution(
            window,
            self.weight,
            bias=self.bias,
            segment_ids=segment_ids,
            activation=self.activation,
        )
        return join_rows(rows, self.cp)

    def cached_function(self, cache: TokenCache) -> Callable[..., Any]:
        """The window whose earlier tokens come from the previous call."""
        return _CachedWindow(cache, num_before=self.num_before)

    def swap_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Use another window; returns the one used until now."""
        before = self.window
        self.window = function
        return before


def _window_over_cp(x: Tensor, segment_ids: Tensor | None, *, num_before: int, cp: Group) -> Window:
    """The window of every chunk, whose earlier tokens may be on another cp rank.

    [B, L, D] and the segment ids [B, S] of full sequences -> [R, K - 1 + C, D], [R, K - 1 + C].
    """
    rows = chunk_rows(x, cp)
    window = torch.cat((previous_tails(rows, cp, count=num_before), rows), dim=1)
    if segment_ids is None:
        return window, None
    return window, chunk_segments(segment_ids, cp, before=num_before)


class _CachedWindow:
    """The window of a generation: new tokens, preceded by the last tokens of the previous call."""

    def __init__(self, cache: TokenCache, *, num_before: int) -> None:
        self._cache = cache
        self._num_before = num_before
        self._before: Tensor | None = None

    def __call__(self, x: Tensor, segment_ids: Tensor | None) -> Window:
        before = self._before
        if before is None:
            before = x.new_zeros(x.shape[0], self._num_before, x.shape[2])
        window = torch.cat((before, x), dim=1)
        self._before = window[:, -self._num_before :]
        return window, self._cache.segment_ids(x.device, before=self._num_before)


def project_inputs(
    hidden: Tensor,
    wide: tuple[ColumnParallelLinear, ...],
    *,
    narrow: tuple[ColumnParallelLinear, ...],
) -> tuple[Tensor, ...]:
    """Projections of one input; projections with few outputs stay out of fp8."""
    if wide[0].fp8 is None:
        return column_parallel(hidden, wide + narrow)
    return column_parallel(hidden, wide) + column_parallel(hidden, narrow)


class CachedScan:
    """A scan that starts from the state after the previous call.

    Args:
        cache: the cache of the prompts.
        scan: inputs with a field `starts`, and the state before them or None -> outputs and the
            state after them.
    """

    def __init__(
        self, cache: TokenCache, scan: Callable[[Any, Tensor | None], tuple[Tensor, Tensor]]
    ) -> None:
        self._cache = cache
        self._scan = scan
        self._state: Tensor | None = None

    def __call__(self, inputs: Any) -> Tensor:
        segments = self._cache.segment_ids(inputs.value.device, before=1)
        starts = segments[:, 1:] != segments[:, :-1]
        out, self._state = self._scan(replace(inputs, starts=starts), self._state)
        return out
