"""Attention to a window and to compressed keys, beside formulas token by token in fp64."""

import pytest
import torch
from torch import Tensor

from nanotrain.attention import compressed
from nanotrain.attention.call import AttentionCall, TileKernel
from nanotrain.attention.chunks import ScoreOptions
from nanotrain.attention.compressed import (
    CompressedKeys,
    KeyWindows,
    attend_compressed,
    compress_tokens,
)
from nanotrain.attention.selection import Index, IndexerLoss
from nanotrain.attention.tiles import Spans
from nanotrain.comm.group import Group

LENGTH, HEADS, WIDTH = 23, 3, 4
# the second sample has documents of 9, 1 and 13 tokens
SEGMENTS = torch.tensor([[0] * LENGTH, [3] * 9 + [5] + [7] * 13])


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def call_of() -> AttentionCall:
    spans = Spans.of(SEGMENTS, length=LENGTH)
    return AttentionCall(TileKernel(), spans, range(LENGTH), torch.device("cpu"))


def windows_of(size: int) -> KeyWindows:
    call = call_of()
    return KeyWindows.of(call.spans, length=LENGTH, size=size, device=torch.device("cpu"))


def documents(sample: int) -> list[range]:
    """The tokens of the documents of a sample."""
    ids = SEGMENTS[sample].tolist()
    starts = [at for at in range(LENGTH) if at == 0 or ids[at] != ids[at - 1]]
    return [range(*bounds) for bounds in zip(starts, [*starts[1:], LENGTH], strict=True)]


def windows_by_hand(sample: int, size: int) -> list[tuple[range, range | None]]:
    """The tokens of every window, and of the window before it in its document."""
    found: list[tuple[range, range | None]] = []
    for tokens in documents(sample):
        for first in range(tokens.start, tokens.stop - size + 1, size):
            before = range(first - size, first) if first > tokens.start else None
            found.append((range(first, first + size), before))
    return found


@pytest.mark.parametrize("num_series", [1, 2])
def test_a_compressed_key_is_a_weighted_sum_of_the_tokens_of_its_document(num_series: int) -> None:
    size = 4
    inputs = [draw(2, LENGTH, num_series * WIDTH, seed=seed) for seed in (1, 2)]
    bias = draw(size, num_series * WIDTH, seed=3)
    windows = windows_of(size)
    keys = compress_tokens(*inputs, bias=bias, windows=windows.in_sequences, width=WIDTH)
    assert keys.shape == (2, LENGTH // size, WIDTH)
    expected, found = [], []
    for sample in range(2):
        value, gate = (each[sample] for each in inputs)
        for number, (own, before) in enumerate(windows_by_hand(sample, size)):
            values, gates = value[own, -WIDTH:], gate[own, -WIDTH:] + bias[:, -WIDTH:]
            if num_series == 2 and before is not None:
                values = torch.cat((value[before, :WIDTH], values))
                gates = torch.cat((gate[before, :WIDTH] + bias[:, :WIDTH], gates))
            expected.append((values * gates.softmax(0)).sum(0))
            found.append(keys[sample, number])
            assert windows.last_tokens[sample, number] == own[-1]
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=0, atol=1e-13)
    assert_same_gradients(torch.stack(found), torch.stack(expected), [*inputs, bias])


def assert_same_gradients(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    weights = draw(*found.shape, seed=9).detach()
    actual = torch.autograd.grad((found * weights).sum(), inputs, retain_graph=True)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 4, 128])
def test_queries_attend_to_their_window_and_to_keys_of_windows_that_ended(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a sink, in tiles of any number of queries."""
    monkeypatch.setattr(compressed, "WINDOW_ROWS", rows)
    monkeypatch.setattr(compressed, "BLOCK_SCORES", 2 * rows * HEADS * (LENGTH // 4))
    size, window = 4, 3
    query, key = draw(2, LENGTH, HEADS, WIDTH, seed=1), draw(2, LENGTH, WIDTH, seed=2)
    keys, sink = draw(2, LENGTH // size, WIDTH, seed=3), draw(HEADS, seed=4)
    found = attend_compressed(
        query,
        key=key,
        compressed=CompressedKeys(keys, windows_of(size)),
        call=call_of(),
        window=window,
        scores=ScoreOptions(sink),
    )
    rows_by_hand = []
    for sample in range(2):
        ended = [own[-1] for own, _ in windows_by_hand(sample, size)]
        for tokens in documents(sample):
            for at in tokens:
                near = key[sample, max(tokens.start, at - window) : at + 1]
                numbers = [i for i, last in enumerate(ended) if tokens.start <= last <= at]
                seen = torch.cat((near, keys[sample, numbers]))
                scores = query[sample, at] @ seen.T * WIDTH**-0.5
                weights = torch.cat((scores, sink[:, None]), dim=1).softmax(-1)[:, :-1]
                rows_by_hand.append(weights @ seen)
    expected = torch.stack(rows_by_hand).view_as(found)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    assert_same_gradients(found, expected, [query, key, keys, sink])


@pytest.mark.parametrize("is_sparse", [False, True])
def test_an_index_selects_keys_and_learns_from_the_attention_to_them(is_sparse: bool) -> None:
    size, topk, num_heads, width = 2, 3, 5, 6
    number = LENGTH // size
    query, key = draw(2, LENGTH, HEADS, WIDTH, seed=1), draw(2, LENGTH, WIDTH, seed=2)
    keys = draw(2, number, WIDTH, seed=3)
    tensors = [
        draw(2, LENGTH, num_heads, width, seed=4),
        draw(2, number, width, seed=5),
        draw(2, LENGTH, num_heads, seed=6),
    ]
    sums = torch.zeros(2, dtype=torch.float64)
    loss = IndexerLoss(0.7, is_sparse, Group.single_rank("tp"), sums)
    windows = windows_of(size)
    found = attend_compressed(
        query,
        key=key,
        compressed=CompressedKeys(keys, windows, Index(*tensors, topk, loss=loss)),
        call=call_of(),
        window=1,
        scores=None,
    )
    products = torch.einsum("bqie,bte->bqit", tensors[0], tensors[1]).relu()
    scores = torch.einsum("bqi,bqit->bqt", tensors[2], products) * (num_heads * width) ** -0.5
    divergence, rows_by_hand = torch.zeros((), dtype=torch.float64), []
    for sample in range(2):
        ended = [own[-1] for own, _ in windows_by_hand(sample, size)]
        for tokens in documents(sample):
            for at in tokens:
                seen = [i for i, last in enumerate(ended) if tokens.start <= last <= at]
                best = sorted(seen, key=lambda i: -scores[sample, at, i].item())[:topk]
                near = key[sample, max(tokens.start, at - 1) : at + 1]
                all_keys = torch.cat((near, keys[sample, best]))
                weights = (query[sample, at] @ all_keys.T * WIDTH**-0.5).softmax(-1)
                rows_by_hand.append(weights @ all_keys)
                learned = best if is_sparse else seen
                if learned:
                    of_heads = query[sample, at] @ keys[sample, learned].T * WIDTH**-0.5
                    target = of_heads.softmax(-1).mean(0).detach()
                    log_probs = scores[sample, at, learned].log_softmax(-1)
                    divergence = divergence + (target * (target.log() - log_probs)).sum()
    expected = torch.stack(rows_by_hand).view_as(found)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(sums[0], divergence.detach(), rtol=1e-12, atol=0)
    assert sums[1] == 2 * LENGTH
    wanted = torch.autograd.grad(0.7 * divergence, tensors)
    actual = torch.autograd.grad(found.sum(), tensors)
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
