"""Streamed pieces join to the text, end before a stop string, and never show half a character."""

import pytest

from nanotrain.data.tokenizer import ByteTokenizer
from nanotrain.errors import DataError
from nanotrain.inference.generate import Generation, Sampling
from nanotrain.inference.text import TextStream, encode_prompts, print_texts, stream_texts
from tests.model.building import LLAMA, build, randomize

BYTES = ByteTokenizer()


def pieces_of(text: str, *stops: str) -> list[str]:
    stream = TextStream(BYTES, stops)
    pieces = []
    for token in text.encode():
        pieces.append(stream.add(token))
        if stream.is_ended:
            break
    return [*pieces, stream.finish()]


def test_a_character_is_shown_once_it_is_complete() -> None:
    assert pieces_of("aé🙂") == ["a", "", "é", "", "", "", "🙂", ""]


def test_a_text_ends_before_the_first_stop_string() -> None:
    assert pieces_of("one##two", "##", "tw") == ["o", "n", "e", "", "", ""]
    assert "".join(pieces_of("one#two", "##")) == "one#two", "the beginning of a stop string is shown in the end"


def test_a_prompt_that_is_too_long_is_named() -> None:
    assert encode_prompts(["ab", ""], BYTES, max_tokens=2) == [[97, 98], [256]]
    with pytest.raises(DataError, match=r"prompt 2 of 2 has 5 tokens.*2 positions.*at least 3 tokens"):
        encode_prompts(["ab", "abcde"], BYTES, max_tokens=2)


def test_an_empty_prompt_needs_a_token_before_a_document() -> None:
    class WordTokenizer(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [len(word) for word in text.split()]

    assert encode_prompts(["one three"], WordTokenizer(eod=None), max_tokens=2) == [[3, 5]]
    for prompt in ("", " "):
        with pytest.raises(DataError, match="an empty prompt has no tokens: .*; give a prompt with text"):
            encode_prompts(["one", prompt], WordTokenizer(eod=None), max_tokens=2)


def test_texts_of_a_batch_are_those_of_single_prompts(capsys) -> None:
    model, prompts = randomize(build(LLAMA)), [[3, 4, 5], [6], [7, 8]]
    single = []
    for row, prompt in enumerate(prompts):
        generation = Generation(model, [prompt], num_tokens=9, sampling=Sampling(seed=5 + row, top_p=0.9))
        single.append("".join(piece for _, piece in stream_texts(generation, BYTES, num_tokens=9)))
    together = Generation(model, prompts, num_tokens=9, sampling=Sampling(seed=5, top_p=0.9))
    print_texts(["a", "b", "c"], stream_texts(together, BYTES, num_tokens=9))
    assert capsys.readouterr().out == "\n\n".join(map(str.__add__, "abc", single)) + "\n"
