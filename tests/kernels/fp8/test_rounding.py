"""Random words are functions of seed, sample, position, layer, product and channel."""

import torch

from nanotrain.kernels.fp8.rounding import (
    LayerKey,
    RoundedFor,
    RoundingWords,
    element_words,
    numbered_words,
    row_words,
)

CPU = torch.device("cpu")


def tokens(samples: list[int], positions: torch.Tensor, seed: int = 1) -> torch.Tensor:
    words = RoundingWords()
    words.start(seed, sample_ids=torch.tensor(samples), positions=positions)
    assert words.tokens is not None
    return words.tokens


def test_a_shard_has_the_words_of_the_whole() -> None:
    """Samples over dp, positions over cp, channels over tp."""
    whole = tokens([4, 9], torch.arange(8))
    assert torch.equal(tokens([9], torch.arange(8)), whole[1:])
    assert torch.equal(tokens([4, 9], torch.tensor([0, 1, 6, 7])), whole[:, [0, 1, 6, 7]])
    key = LayerKey.of("layers.0.mlp.up.weight", first_channel=0)
    rows = row_words(16, whole, device=CPU)
    words = element_words(rows, key=key, rounded_for=RoundedFor.DGRAD).expand(12)
    shard = LayerKey.of("layers.0.mlp.up.weight", first_channel=8)
    assert torch.equal(
        element_words(rows, key=shard, rounded_for=RoundedFor.DGRAD).expand(4), words[:, 8:]
    )


def test_other_numbers_have_other_words() -> None:
    positions = torch.arange(64)
    first = tokens([0], positions)
    others = [tokens([1], positions), tokens([0], positions + 64), tokens([0], positions, seed=2)]
    rows = first.flatten()
    key = LayerKey.of("a", first_channel=0)
    words = element_words(rows, key=key, rounded_for=RoundedFor.DGRAD).expand(64)
    assert words.unique().numel() == words.numel()
    assert words.min() >= 0 and words.max() < 2**32
    for other in others:
        assert not torch.equal(other, first)
    for name, rounded_for in (("a", RoundedFor.WGRAD), ("b", RoundedFor.DGRAD)):
        other_key = LayerKey.of(name, first_channel=0)
        others_words = element_words(rows, key=other_key, rounded_for=rounded_for)
        assert (others_words.expand(64) != words).all()


def test_rows_that_are_no_tokens_are_numbered() -> None:
    whole = tokens([4, 9], torch.arange(8))
    numbered = row_words(5, whole, device=CPU)
    assert torch.equal(numbered, numbered_words(5, whole, device=CPU))
    assert not torch.equal(numbered, numbered_words(5, whole + 1, device=CPU))
    assert numbered_words(3, None, device=CPU).unique().numel() == 3
