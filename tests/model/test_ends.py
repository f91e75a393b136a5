"""The embedding and the head, on one rank."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from nanotrain.model.transformer import Stage
from tests.model.building import GPT2, LLAMA, VOCAB, build, random_batch, randomize


def whole_model(**settings: object) -> Stage:
    return randomize(build(replace(LLAMA, **settings)))


def test_an_embedding_looks_up_words_and_adds_learned_positions() -> None:
    embedding = randomize(build(GPT2)).embedding
    assert embedding is not None
    tokens = random_batch().tokens
    positions = torch.arange(tokens.shape[1])
    expected = embedding.word.weight[tokens] + embedding.position.weight[positions]
    torch.testing.assert_close(embedding(tokens), expected)
    shifted = positions[None] + 3
    expected = embedding.word.weight[tokens] + embedding.position.weight[shifted[0]]
    torch.testing.assert_close(embedding(tokens, shifted), expected)


def test_word_embeddings_are_scaled_and_normalized_where_the_model_says_so() -> None:
    embedding = whole_model(embedding_l2_norm=True).embedding
    assert embedding is not None
    tokens = random_batch().tokens
    words = embedding.word.weight[tokens]
    mean_square = words.square().mean(-1, keepdim=True)
    torch.testing.assert_close(
        embedding(tokens), words * torch.rsqrt(mean_square + LLAMA.norm_epsilon)
    )


@pytest.mark.parametrize("is_untied", [True, False])
def test_logits_are_products_with_the_head_or_with_the_word_embedding(is_untied: bool) -> None:
    model = whole_model(untie_embeddings_and_output_weights=is_untied)
    assert model.head is not None and model.embedding is not None
    hidden = torch.randn(2, 5, LLAMA.hidden_size)
    weight = model.head.weight if is_untied else model.embedding.word.weight
    assert model.head.reads_shared is not is_untied
    tied = None if is_untied else weight
    logits = model.head.logits(hidden, tied=tied)
    assert logits.shape == (2, 5, VOCAB)
    torch.testing.assert_close(logits, F.linear(hidden, weight[:VOCAB]))


def test_a_tied_head_without_the_word_embedding_is_refused() -> None:
    model = whole_model(untie_embeddings_and_output_weights=False)
    assert model.head is not None
    with pytest.raises(AssertionError, match="word embedding"):
        model.head.logits(torch.zeros(1, 1, LLAMA.hidden_size), tied=None)
