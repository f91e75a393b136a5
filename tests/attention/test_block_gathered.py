"""Attention that gathers selected blocks is attention that masks the others, and computes no product
with a key of another block.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from nanotrain.attention import chunks
from nanotrain.attention.chunks import ScoreOptions
from nanotrain.attention.gathered import GATHERED_NUMEL
from tests.attention.test_block_sparse import (
    DV,
    SEGMENTS,
    B,
    D,
    E,
    G,
    N,
    S,
    attend,
    gradients,
    leaves,
)
from tests.model.mixers import assert_near


@pytest.mark.parametrize("segment_ids", [None, SEGMENTS], ids=["causal", "documents"])
def test_gathered_blocks_are_masked_blocks(
    segment_ids: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = leaves()
    found = []
    for gathers in (False, True):
        out = attend(x, segment_ids=segment_ids, gathers=gathers)
        parts = [
            attend(x, queries, segment_ids=segment_ids, gathers=gathers)
            for queries in (range(13), range(13, S))
        ]
        found.append([*gradients(x, out), *gradients(x, torch.cat(parts, dim=1))])
        # three queries at a time
        monkeypatch.setitem(GATHERED_NUMEL, "cpu", B * G * 8 * D * 3)
    assert_near(found[1], found[0], tolerance=1e-12)


def test_an_observer_sees_the_largest_logit_of_every_head() -> None:
    x = leaves()
    largest = []
    for gathers in (False, True):
        logits = torch.full((N,), -torch.inf, dtype=torch.float64)

        def observe(chunk: Any, *, first_head: int = 0, seen: Tensor = logits) -> None:
            heads = chunk.query.shape[1]
            keys = chunk.key.repeat_interleave(heads // chunk.key.shape[1], dim=1)
            mask = chunk.mask
            if mask.shape[1] > 1:
                mask = mask.repeat_interleave(heads // mask.shape[1], dim=1)
            found = (chunk.query @ keys.mT * chunk.scale).masked_fill(~mask, -torch.inf)
            part = seen[first_head : first_head + heads]
            torch.maximum(part, found.amax((0, 2, 3)), out=part)

        with torch.no_grad():
            attend(x, gathers=gathers, scores=ScoreOptions(observe=observe))
        largest.append(logits)
    torch.testing.assert_close(largest[1], largest[0], rtol=1e-12, atol=0)


def counted_flops(topk: int, length: int) -> int:
    """FLOPs of a forward and backward, without index scores."""
    x = leaves(length)
    with FlopCounterMode(display=False) as counter:
        out = attend(x, range(length), topk=topk, gathers=True)
        out.backward(torch.ones_like(out))
    return counter.get_total_flops() - 2 * B * length**2 * G * E


def test_flops_grow_with_selected_blocks_and_not_with_the_square_of_the_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch counts no FLOPs of the flash operator of CPUs
    monkeypatch.setattr(chunks, "fused_ops", lambda chunk: None)
    few, twice, longer = (counted_flops(*sizes) for sizes in ((2, 64), (4, 64), (2, 128)))
    # values are padded to the width of keys, and both to a multiple of 8
    per_block = 2 * B * 64 * 4 * N * 7 * 8
    assert DV < D <= 8 and twice - few == 2 * per_block
    assert longer == 2 * few, "of twice the queries"
