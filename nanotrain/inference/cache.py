"""The cache of generation: each new token is one forward pass of length 1.

    prompts       . . a b c      rows end together: shorter prompts are padded on the left
                  d e f g h
    position ids  0 0 0 1 2      positions in the prompt; padding is masked
                  0 1 2 3 4

While a cache is open, every layer with state between tokens (`CachedLayer`) uses a function of the
cache in place of its own. The core attention stores its keys and values and attends to all of them.
It is the same core attention with more keys than queries, so grouped queries, multi-head latent
attention (whose keys and values are stored after the up-projection), windows and chunks need no
further code, and logits equal those without a cache up to rounding. Recurrent layers keep their
state; padding is a separate document.

    B prompts   S new tokens   T tokens so far   G key/value heads   D width of a head
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from nanotrain.attention.call import AttentionCall
from nanotrain.attention.sdpa import DenseKernel
from nanotrain.attention.tiles import Spans, first_of_chunks
from nanotrain.model.context import CachedLayer
from nanotrain.model.transformer import Stage
from nanotrain.spec.shape import Source


class KVCache:
    """The cache of a batch of prompts, as a context manager; inside the block the model uses this
    cache only.

    Args:
        stage: a model in one stage, on one rank.
        lengths: tokens of each prompt.
        capacity: tokens that each row may have in the end.
    """

    def __init__(self, stage: Stage, lengths: Sequence[int], *, capacity: int) -> None:
        self._stage = stage
        self._capacity = capacity
        self._padding = np.array([max(lengths) - length for length in lengths])[:, None]  # [B, 1]
        self._num_read = 0  # T before the forward pass
        self._num_new = 0  # S of the forward pass
        # by whether layers have a window: the attention of this forward pass
        self._calls: dict[bool, AttentionCall] = {}
        # the attention of layers whose keys and values later layers read
        self._attention_of: dict[Source, _CachedAttention] = {}
        self._layers = [module for module in stage.modules() if isinstance(module, CachedLayer)]
        # the functions that the layers use next: of the cache, or their own while it is open
        self._functions = [layer.cached_function(self) for layer in self._layers]

    def __enter__(self) -> Self:
        self._swap_functions()
        return self

    def __exit__(self, *error: object) -> None:
        self._swap_functions()

    def _swap_functions(self) -> None:
        pairs = zip(self._layers, self._functions, strict=True)
        self._functions = [layer.swap_function(function) for layer, function in pairs]

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Read new tokens [B, S] int64, padded on the left; the logits of the last, [B, V]."""
        self._num_new = tokens.shape[1]
        assert self._num_read + self._num_new <= self._capacity, (
            "more tokens than the cache was made for"
        )
        positions = np.arange(self._num_read, self._num_read + self._num_new)
        position_ids = torch.from_numpy(np.maximum(positions - self._padding, 0)).to(tokens.device)
        self._calls.clear()
        last = self._stage.logits(tokens, last_only=True, position_ids=position_ids)[:, 0]
        self._num_read += self._num_new
        return last

    def call(self, has_window: bool, device: torch.device) -> AttentionCall:
        """The call of the new tokens' attention to all tokens so far, within the window.

        Padding is masked, except that a padding token attends to itself.
        """
        if has_window not in self._calls:
            queries = np.arange(self._num_read + self._num_new)
            first = self._first_keys(queries, has_window=has_window)
            new = range(self._num_read, len(queries))
            self._calls[has_window] = AttentionCall(
                DenseKernel(), Spans(np.minimum(first, queries)), new, device
            )
        return self._calls[has_window]

    def _first_keys(self, queries: np.ndarray, *, has_window: bool) -> np.ndarray:
        """[B, 1] or [B, queries], the first key that every query attends to."""
        model_config = self._stage.model_config
        first = self._padding
        if has_window and model_config.window_size is not None:
            first = np.maximum(first, queries - model_config.window_size)
        if has_window and model_config.attention_chunk_size is not None:
            first = first_of_chunks(queries, first, size=model_config.attention_chunk_size)
        return first

    def attend(
        self,
        core_attention: Callable[..., Tensor],
        *,
        has_window: bool,
        keeps: Iterable[Source] = (),
        reads: Source | None = None,
    ) -> "_CachedAttention | _SharedAttention":
        """The core attention of a layer to all tokens so far, with its own or earlier keys."""
        if reads is not None:
            return _SharedAttention(core_attention, self._attention_of[reads])
        attention = _CachedAttention(self, core_attention, has_window=has_window)
        for source in keeps:
            self._attention_of[source] = attention
        return attention

    def segment_ids(self, device: torch.device, *, before: int) -> Tensor:
        """[B, before + S], of the last tokens and the new ones: 1, or 0 for padding."""
        positions = np.arange(self._num_read - before, self._num_read + self._num_new)
        return torch.from_numpy((positions >= self._padding).astype(np.int64)).to(device)

    def store(self, buffer: Tensor | None, new: Tensor) -> tuple[Tensor, Tensor]:
        """Append [B, S, G, D] to a buffer [B, capacity, G, D]; returns it and its filled part.

        A buffer of None is allocated.
        """
        if buffer is None:
            buffer = new.new_empty(new.shape[0], self._capacity, *new.shape[2:])
        stop = self._num_read + self._num_new
        buffer[:, self._num_read : stop] = new
        return buffer, buffer[:, :stop]


class _CachedAttention:
    """The core attention of one layer, with the keys and values of all tokens so far."""

    def __init__(self, cache: KVCache, core: Callable[..., Tensor], *, has_window: bool) -> None:
        self._cache = cache
        self._core = core
        self._has_window = has_window
        self._key_buffer: Tensor | None = None
        self._value_buffer: Tensor | None = None
        # of all tokens so far, once the layer has run
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def __call__(
        self, query: Tensor, *, key: Tensor, value: Tensor, mask: object, **options: Any
    ) -> Tensor:
        self._key_buffer, self._keys = self._cache.store(self._key_buffer, key)
        self._value_buffer, self._values = self._cache.store(self._value_buffer, value)
        return self.attend(self._core, query, **options)

    def attend(self, core: Callable[..., Tensor], query: Tensor, **options: Any) -> Tensor:
        """Attend to the keys and values of all tokens so far, with a core attention."""
        longer = self._cache.call(self._has_window, query.device)
        return core(query, key=self._keys, value=self._values, mask=longer, **options)


class _SharedAttention:
    """The core attention of a layer, with the keys and values that an earlier layer has stored."""

    def __init__(self, core: Callable[..., Tensor], source: _CachedAttention) -> None:
        self._core = core
        self._source = source

    def __call__(
        self, query: Tensor, *, key: Tensor, value: Tensor, mask: object, **options: Any
    ) -> Tensor:
        return self._source.attend(self._core, query, **options)
