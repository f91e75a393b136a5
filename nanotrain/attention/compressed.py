"""Attention to the keys of a window and to compressed keys (DeepSeek-V4, section 2.3).

    tokens            0 1 2 3 | 4 5 6 7 | 8 9 ..      windows of m tokens of a segment
    compressed keys         0         1               at the position of their first token

A query attends to its own key, to the window of keys before it, and to the compressed keys of the
windows that end at or before its position, all of them or those that an index selects. Every key is
its value too.

    KeyWindows          the windows of full sequences; WindowTokens, their tokens
    compress_tokens     weighted sums of the tokens of each window
    CompressedTiles     tiles of both kinds of keys, which are one tensor, one kind after the other
    CompressedKeys      the keys, and an index of them
    attend_compressed   attention of the queries of a call

A window has a weight per token and channel: the softmax over its tokens of a gate and a bias by the
place in the window. With two series of values a window also reads those of the window before it.

    B batch   S sequence   T windows   m tokens of a window   N heads   D head dim
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanotrain.attention.call import AttentionCall
from nanotrain.attention.chunks import ScoreOptions
from nanotrain.attention.gathered import split_rows
from nanotrain.attention.selection import AttachGradients, Index
from nanotrain.attention.sparse import MaskedSelection, unpack_bits
from nanotrain.attention.tiles import Spans, Tile, TilePlan, attend_tiles, on_device
from nanotrain.precision.dtypes import as_fp32
from nanotrain.spec.kinds.compressed import WINDOW_ROWS
from nanotrain.spec.kinds.dsa import BLOCK_SCORES


@dataclass(frozen=True)
class KeyWindows:
    """The windows of tokens in full sequences; they begin where segments begin."""

    size: int  # m
    length: int  # S
    last_tokens: np.ndarray  # [B or 1, T] int64, ascending; -1 after the last window
    has_previous: np.ndarray  # [B or 1, T] bool, whether a window of the same segment is before it
    device: torch.device

    @classmethod
    def of(cls, spans: Spans, *, length: int, size: int, device: torch.device) -> "KeyWindows":
        """The windows of segments.

        Args:
            spans: first keys of the segments.
            length: S.
            size: tokens of a window.
            device: device of the tokens.
        """
        starts = _segment_starts(spans)[:, :length]
        offsets = np.arange(length) - starts
        is_last = (offsets + 1) % size == 0
        last_tokens = np.full((len(starts), length // size), -1)
        has_previous = np.zeros(last_tokens.shape, dtype=bool)
        for row, is_last_of_row in enumerate(is_last):
            found = np.flatnonzero(is_last_of_row)
            last_tokens[row, : len(found)] = found
            has_previous[row, : len(found)] = offsets[row, found] >= size
        return cls(size, length, last_tokens, has_previous, device)

    @property
    def number(self) -> int:
        """T."""
        return self.last_tokens.shape[1]

    def number_before(self, stop: int) -> int:
        """The most windows that end before a position in any of the sequences."""
        is_before = (self.last_tokens >= 0) & (self.last_tokens < stop)
        return int(is_before.sum(1).max(initial=0))

    @cached_property
    def last(self) -> Tensor:
        """`last_tokens` on the device."""
        return on_device(self.last_tokens, self.device)

    @cached_property
    def in_sequences(self) -> "WindowTokens":
        """The tokens of the windows in full sequences; the first ones after the last window."""
        first = on_device(np.maximum(self.last_tokens - self.size + 1, 0), self.device)
        tokens = first[..., None] + torch.arange(self.size, device=self.device)
        return WindowTokens(tokens, on_device(self.has_previous, self.device))


@dataclass(frozen=True)
class WindowTokens:
    """The tokens of windows, on the device."""

    tokens: Tensor  # [B or 1, T, m] int64
    has_previous: Tensor  # [B or 1, T] bool, whether a window of its segment is before it


def _segment_starts(spans: Spans) -> np.ndarray:
    """[B or 1, S] int64, the first tokens of segments."""
    return spans.first_keys if spans.starts is None else spans.starts


def take_tokens(x: Tensor, tokens: Tensor) -> Tensor:
    """Rows of [B, S, ...] at tokens [B or 1, ...] int64."""
    if len(tokens) == 1:
        return x[:, tokens[0]]
    samples = torch.arange(len(x), device=x.device)
    return x[samples.view(-1, *[1] * (tokens.dim() - 1)), tokens]


def compress_tokens(
    value: Tensor, gate: Tensor, *, bias: Tensor, windows: WindowTokens, width: int
) -> Tensor:
    """The weighted sum of the tokens of each window, [B, T, D].

    Only its inputs are kept for the backward.

    Args:
        value: [B, S, D], or [B, S, 2 D] of two series: for the window after a token's own, and
            for its own.
        gate: the same shape.
        bias: [m, D] or [m, 2 D], of gates.
        windows: the windows.
        width: D.
    """
    out: Tensor = _CompressTokens.apply(value, gate, bias, windows, width)
    return out


class _CompressTokens(torch.autograd.Function):
    """`_compress`, computed again in the backward."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, gate: Tensor, bias: Tensor, windows: WindowTokens, width: int
    ) -> Tensor:
        ctx.windows = windows
        ctx.width = width
        ctx.save_for_backward(value, gate, bias)
        return _compress(value, gate, bias=bias, windows=windows, width=width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of values, gates and bias, by autograd through a second forward."""
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            value, gate, bias = inputs
            out = _compress(value, gate, bias=bias, windows=ctx.windows, width=ctx.width)
        return *torch.autograd.grad(out, inputs, grads), None, None


def _compress(
    value: Tensor, gate: Tensor, *, bias: Tensor, windows: WindowTokens, width: int
) -> Tensor:
    """The sums of windows; arguments as of `compress_tokens`."""
    own_values = take_tokens(value[..., -width:], windows.tokens)
    own_gates = _gates(gate[..., -width:], bias[:, -width:], tokens=windows.tokens)
    if value.shape[-1] == width:
        return _weighted_sum(own_values, own_gates)
    size = windows.tokens.shape[-1]
    before = (windows.tokens - size).clamp(min=0)
    values = take_tokens(value[..., :width], before)
    gates = _gates(gate[..., :width], bias[:, :width], tokens=before)
    has_none = ~windows.has_previous[..., None, None]
    gates = gates.masked_fill(has_none, -torch.inf)
    return _weighted_sum(torch.cat((values, own_values), 2), torch.cat((gates, own_gates), 2))


def _gates(gate: Tensor, bias: Tensor, *, tokens: Tensor) -> Tensor:
    """[B, T, m, D] fp32, gates of windows with the bias of their tokens."""
    return as_fp32(take_tokens(gate, tokens)) + as_fp32(bias)


def _weighted_sum(values: Tensor, gates: Tensor) -> Tensor:
    """[B, T, tokens, D] twice -> [B, T, D], with softmax weights over the tokens."""
    weights = gates.softmax(2).to(values.dtype)
    return (values * weights).sum(2)


@dataclass(frozen=True)
class CompressedTiles(TilePlan):
    """Tiles of the keys of tokens, and of the compressed keys that follow them."""

    starts: Tensor | None = None  # [B or 1, S] int64, first tokens of segments
    windows: KeyWindows | None = None  # None: there are no compressed keys
    # by the first query of a tile of compressed keys that an index selects: [B, queries, keys / 8]
    bits: dict[int, Tensor] = field(default_factory=dict)

    @property
    def mask_tensors(self) -> tuple[Tensor, ...]:
        """The selected keys of each tile."""
        return tuple(self.bits.values())

    def with_mask_tensors(self, tensors: Sequence[Tensor]) -> "CompressedTiles":
        """This plan with other selected keys, one tensor per tile, or none."""
        starts = [tile.queries.start for tile in self.compressed_tiles]
        return replace(self, bits=dict(zip(starts, tensors, strict=False)))

    @property
    def compressed_tiles(self) -> list[Tile]:
        """The tiles of compressed keys."""
        return [tile for tile in self.tiles if not tile.is_first]

    def mask(self, tile: Tile | None = None) -> Tensor:
        """[B or 1, 1, queries, keys] bool, True where a query attends to a key."""
        tile = tile or self.tiles[0]
        if tile.is_first:
            return super().mask(tile)
        mask = self.ends_before(tile)
        if tile.queries.start in self.bits:
            number = tile.keys.stop - tile.keys.start
            mask = mask & unpack_bits(self.bits[tile.queries.start], number=number)
        return mask[:, None]

    def ends_before(self, tile: Tile) -> Tensor:
        """[B or 1, queries, keys] bool, whether the window of a key ends at or before a query.

        It also has to end in the query's segment.
        """
        assert self.windows is not None and self.starts is not None, "there are compressed keys"
        queries = self.queries[tile.queries]
        number = tile.keys.stop - tile.keys.start
        last = self.windows.last[:, None, :number]
        starts = self.starts[:, queries, None]
        return (last <= queries[:, None]) & (last >= starts)


def plan_compressed(
    call: AttentionCall, windows: KeyWindows | None, *, first: int, window: int, heads: int
) -> CompressedTiles:
    """The tiles of a call.

    Args:
        call: queries, and the keys of all tokens up to the last of them.
        windows: the windows of tokens that are compressed; None for none.
        first: position of the first key, which may be before the sequence.
        window: earlier keys of tokens that a query attends to.
        heads: heads whose scores are computed at once, of all sequences.
    """
    stop = call.queries.stop
    positions = np.arange(stop)
    starts = _segment_starts(call.spans)
    first_keys = np.maximum(starts[:, :stop], positions - window)
    tiles = []
    for rows in split_rows(len(call.queries), WINDOW_ROWS):
        first_query = call.queries.start + rows.start - first
        keys = slice(max(0, first_query - window), first_query + rows.stop - rows.start)
        tiles.append(Tile(slice(None), rows, keys, is_masked=True))
    num_tokens = stop - first
    number = 0 if windows is None else windows.number
    if windows is not None:
        for rows in split_rows(len(call.queries), BLOCK_SCORES // max(1, heads * number)):
            num_before = windows.number_before(call.queries.start + rows.stop)
            keys = slice(num_tokens, num_tokens + num_before)
            if num_before:
                tiles.append(Tile(slice(None), rows, keys, is_masked=True, is_first=False))
    device = call.device
    # compressed keys are numbered after all tokens, in the same way on all ranks
    length = starts.shape[1]
    token_positions = torch.arange(first, stop, device=device)
    numbers = torch.arange(length, length + number, device=device)
    return CompressedTiles(
        tuple(tiles),
        torch.arange(call.queries.start, stop, device=device),
        torch.cat((token_positions, numbers)),
        on_device(first_keys, device),
        starts=on_device(starts, device),
        windows=windows,
    )


@dataclass(frozen=True)
class CompressedKeys:
    """The compressed keys of full sequences, and the index that selects among them."""

    keys: Tensor  # [B, T, D], of all heads
    windows: KeyWindows
    index: Index | None = None  # None: a query attends to all compressed keys before it


def attend_compressed(
    query: Tensor,
    *,
    key: Tensor,
    compressed: CompressedKeys | None,
    call: AttentionCall,
    window: int,
    scores: ScoreOptions | None,
) -> Tensor:
    """Softmax attention to a window and to compressed keys, with the loss of the index.

    Args:
        query: [B, Q, N, D], N heads of this rank.
        key: [B, K, D], of all heads, of the last tokens up to the last query.
        compressed: compressed keys of full sequences; None for none.
        call: the queries, and the tokens up to the last of them.
        window: earlier keys of tokens that a query attends to.
        scores: options besides mask and scale; None for none.

    Returns:
        [B, Q, N, D].
    """
    batch, _, heads, _ = query.shape
    first = call.queries.stop - key.shape[1]
    if compressed is None:
        plan = plan_compressed(call, None, first=first, window=window, heads=batch * heads)
        return _attend_tiles(query, key, plan=plan, scores=scores)
    index = compressed.index
    if index is not None:
        heads = max(heads, index.query.shape[2])
    plan = plan_compressed(
        call, compressed.windows, first=first, window=window, heads=batch * heads
    )
    gradients: list[Tensor] = []
    if index is not None:
        selection = MaskedSelection.of(index, scores)
        plan = _select_keys(selection, plan, query=query.detach(), compressed=compressed)
        gradients = selection.gradients()
    keys = torch.cat((key, compressed.keys), dim=1)
    out = _attend_tiles(query, keys, plan=plan, scores=scores)
    if torch.is_grad_enabled() and index is not None:
        out = AttachGradients.apply(out, *index.tensors, *gradients)
    return out


def _attend_tiles(
    query: Tensor, keys: Tensor, *, plan: CompressedTiles, scores: ScoreOptions | None
) -> Tensor:
    """Attention to keys [B, K, D] of all heads, which are their values too."""
    keys_of_heads = keys[:, :, None]
    return attend_tiles(query, key=keys_of_heads, value=keys_of_heads, plan=plan, scores=scores)


@torch.no_grad()
def _select_keys(
    selection: MaskedSelection, plan: CompressedTiles, *, query: Tensor, compressed: CompressedKeys
) -> CompressedTiles:
    """The plan with the selected compressed keys; query as of `attend_compressed`."""
    index = selection.index
    selects_all = index.topk >= compressed.windows.number
    if selects_all and index.loss is None:
        return plan
    key = compressed.keys.detach()[:, :, None]
    for tile in plan.compressed_tiles:
        may_attend = plan.ends_before(tile).expand(len(query), -1, -1)
        selection.add(tile.queries, may_attend, query=query, key=key)
    return plan if selects_all else replace(plan, bits=selection.bits)
