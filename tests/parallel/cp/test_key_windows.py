"""The windows of each rank, beside those of full sequences; the laws train with them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanotrain.attention.compressed import KeyWindows
from nanotrain.attention.tiles import Spans
from nanotrain.parallel.cp.key_windows import ChunkWindows
from nanotrain.parallel.cp.split import zigzag_chunks

LENGTH = 48
SEGMENTS = torch.tensor([[0] * LENGTH, [0] * 13 + [1] * 2 + [2] * 33])


@pytest.mark.parametrize("size", [2, 4, 5])
@pytest.mark.parametrize("cp", [2, 3])
@pytest.mark.parametrize("segments", [None, SEGMENTS])
def test_every_window_is_computed_by_the_rank_that_has_its_last_token(
    size: int, cp: int, segments: torch.Tensor | None
) -> None:
    device = torch.device("cpu")
    spans = Spans.of(segments, length=LENGTH)
    windows = KeyWindows.of(spans, length=LENGTH, size=size, device=device)
    length = LENGTH // (2 * cp)
    per_chunk = -(-length // size)
    slots: dict[tuple[int, int], tuple[list[int], bool]] = {}
    for index in range(cp):
        group: Any = SimpleNamespace(size=cp, index=index)
        chunks = ChunkWindows.of(windows, group, batch=2, num_series=2)
        assert chunks.num_before == 2 * size - 1
        assert chunks.tokens.tokens.shape == (4, per_chunk, size)
        for row in range(4):
            sample, chunk = row // 2, zigzag_chunks(index, cp)[row % 2]
            start = chunk * length - chunks.num_before
            for place in range(per_chunk):
                tokens = chunks.tokens.tokens[row, place] + start
                has_previous = bool(chunks.tokens.has_previous[row, place])
                slots[sample, chunk * per_chunk + place] = tokens.tolist(), has_previous
    for sample in range(2):
        row = sample % len(windows.last_tokens)
        for number, last in enumerate(windows.last_tokens[row].tolist()):
            if last >= 0:
                expected = [*range(last - size + 1, last + 1)]
                slot = slots[sample, int(chunks.order[row, number])]
                assert slot == (expected, bool(windows.has_previous[row, number]))
