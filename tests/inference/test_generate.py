"""Sampling: deterministic by seed, within the positions of the model."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from nanotrain.config.model import MoEConfig
from nanotrain.data.tokenizer import ByteTokenizer
from nanotrain.errors import DataError
from nanotrain.inference.cache import KVCache
from nanotrain.inference.generate import (
    Generation,
    Sampling,
    TextStream,
    encode_prompts,
    generate,
    print_texts,
    sample_token,
    stream_texts,
)
from tests.model.building import GPT2, LLAMA, VOCAB, build, randomize


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return randomize(build(LLAMA))


def test_text_depends_on_the_seed(model: torch.nn.Module) -> None:
    texts = [
        generate(model, [1, 2, 3], num_tokens=20, sampling=Sampling(seed=seed))
        for seed in (0, 0, 1)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == 20
    assert all(0 <= token < VOCAB for token in texts[0])


def test_each_prompt_of_a_batch_has_the_next_seed(model: torch.nn.Module) -> None:
    generation = Generation(model, [[1, 2], [1, 2]], num_tokens=12, sampling=Sampling(seed=3))
    steps = [generation.step() for _ in range(12)]
    for row in (0, 1):
        expected = generate(model, [1, 2], num_tokens=12, sampling=Sampling(seed=3 + row))
        assert [step[row] for step in steps] == expected


def test_temperature_zero_is_greedy(model: torch.nn.Module) -> None:
    tokens = [5, 6]
    for token in generate(model, tokens, num_tokens=8, sampling=Sampling(temperature=0)):
        assert token == model.logits(torch.tensor([tokens]))[0, -1].argmax()
        tokens.append(token)


def test_a_temperature_divides_the_logits() -> None:
    draw, logits = torch.Generator().manual_seed(1), torch.tensor([0.0, 1.0])
    counts = [
        sum(sample_token(logits, Sampling(t), generator=draw) for _ in range(300))
        for t in (0.1, 1.0, 10.0)
    ]
    # of 300, 219 and 157 are expected
    assert counts[0] == 300 and 190 < counts[1] < 250 and 130 < counts[2] < 185


def test_top_k_of_one_is_greedy(model: torch.nn.Module) -> None:
    greedy = generate(model, [9], num_tokens=8, sampling=Sampling(temperature=0))
    assert generate(model, [9], num_tokens=8, sampling=Sampling(top_k=1, seed=4)) == greedy


def test_top_k_leaves_out_all_others(model: torch.nn.Module) -> None:
    allowed = set(model.logits(torch.tensor([[7]]))[0, -1].topk(3).indices.tolist())
    sampled = {
        generate(model, [7], num_tokens=1, sampling=Sampling(top_k=3, seed=seed))[0]
        for seed in range(60)
    }
    assert sampled == allowed


def test_the_stop_token_ends_the_text(model: torch.nn.Module) -> None:
    free = generate(model, [1], num_tokens=30, sampling=Sampling(seed=2))
    stop = free[10]
    stopped = generate(model, [1], num_tokens=30, sampling=Sampling(seed=2, stop=stop))
    assert stopped == free[: free.index(stop) + 1]


@pytest.mark.parametrize("config", [LLAMA, GPT2])
def test_text_longer_than_the_positions_goes_on_in_a_window(config: object) -> None:
    model = randomize(build(config))
    prompt = [token % VOCAB for token in range(60)]
    text = generate(model, prompt, num_tokens=10, sampling=Sampling(temperature=0))
    window = (prompt + text)[-65:-1]
    assert text[-1] == model.logits(torch.tensor([window]))[0, -1].argmax()


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    draw = torch.Generator().manual_seed(1)
    for top_p, allowed in (
        (0.4, {0}),
        (0.5, {0}),
        (0.6, {0, 1}),
        (0.9, {0, 1, 2}),
        (1.0, {0, 1, 2, 3}),
    ):
        sampled = {sample_token(logits, Sampling(top_p=top_p), generator=draw) for _ in range(200)}
        assert sampled == allowed, top_p


def test_prompts_that_end_leave_the_others_as_they_are(model: torch.nn.Module) -> None:
    prompts, greedy = [[1, 2, 3], [4]], Sampling(temperature=0)
    single = [
        generate(model, prompt, num_tokens=12, sampling=greedy, use_cache=False)
        for prompt in prompts
    ]
    stop = next(token for token in single[0] if token not in single[1])
    generation = Generation(
        model, prompts, num_tokens=12, sampling=Sampling(temperature=0, stop=stop)
    )
    steps = [generation.step() for _ in range(12)]
    assert [step[0] for step in steps if 0 in step] == single[0][: single[0].index(stop) + 1]
    assert [step[1] for step in steps] == single[1]


def test_the_cache_changes_no_text_also_where_it_ends(model: torch.nn.Module) -> None:
    for prompt in ([1, 2, 3], list(range(60))):
        texts = [
            generate(model, prompt, num_tokens=10, use_cache=use_cache)
            for use_cache in (True, False)
        ]
        assert texts[0] == texts[1]


def test_a_long_prompt_that_ends_leaves_no_more_positions_to_the_others(
    model: torch.nn.Module,
) -> None:
    prompts, greedy = [list(range(60)), [4]], Sampling(temperature=0)
    (stop,) = generate(model, prompts[0], num_tokens=1, sampling=greedy)
    expected = generate(model, prompts[1], num_tokens=8, sampling=greedy, use_cache=False)
    assert stop not in expected
    generation = Generation(
        model, prompts, num_tokens=8, sampling=Sampling(temperature=0, stop=stop)
    )
    steps = [generation.step() for _ in range(8)]  # the cache has 64 positions
    assert [step[1] for step in steps] == expected and [len(step) for step in steps] == [2] + [
        1
    ] * 7


def test_experts_with_a_capacity_have_no_cache(model: torch.nn.Module) -> None:
    """Their outputs depend on the number of tokens that are read together."""
    moe = MoEConfig(num_experts=4, ffn_hidden_size=16, expert_capacity_factor=0.5)
    dropping = randomize(build(replace(LLAMA, moe=moe)))
    with patch.object(KVCache, "logits", side_effect=AssertionError):
        assert len(generate(dropping, [7, 8], num_tokens=2)) == 2
        with pytest.raises(AssertionError):
            generate(model, [7, 8], num_tokens=2)


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
    assert "".join(pieces_of("one#two", "##")) == "one#two", (
        "the beginning of a stop string is shown in the end"
    )
    for stops in (("b", "ab"), ("ab", "b")):  # both end with one token: the earlier one counts
        assert "".join(pieces_of("xaab", *stops)) == "xa"


def test_a_prompt_that_is_too_long_is_named() -> None:
    assert encode_prompts(["ab", ""], BYTES, max_tokens=2) == [[97, 98], [256]]
    with pytest.raises(
        DataError, match=r"prompt 2 of 2 has 5 tokens.*2 positions.*at least 3 tokens"
    ):
        encode_prompts(["ab", "abcde"], BYTES, max_tokens=2)


def test_an_empty_prompt_needs_a_token_before_a_document() -> None:
    class WordTokenizer(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            return [len(word) for word in text.split()]

    assert encode_prompts(["one three"], WordTokenizer(eod=None), max_tokens=2) == [[3, 5]]
    for prompt in ("", " "):
        with pytest.raises(
            DataError, match="an empty prompt has no tokens: .*; give a prompt with text"
        ):
            encode_prompts(["one", prompt], WordTokenizer(eod=None), max_tokens=2)


def test_texts_of_a_batch_are_those_of_single_prompts(capsys) -> None:
    model, prompts = randomize(build(LLAMA)), [[3, 4, 5], [6], [7, 8]]
    single = []
    for row, prompt in enumerate(prompts):
        generation = Generation(
            model, [prompt], num_tokens=9, sampling=Sampling(seed=5 + row, top_p=0.9)
        )
        single.append("".join(piece for _, piece in stream_texts(generation, BYTES, num_tokens=9)))
    together = Generation(model, prompts, num_tokens=9, sampling=Sampling(seed=5, top_p=0.9))
    print_texts(["a", "b", "c"], stream_texts(together, BYTES, num_tokens=9))
    assert capsys.readouterr().out == "\n\n".join(map(str.__add__, "abc", single)) + "\n"


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_a_repetition_penalty_is_that_of_transformers(
    model: torch.nn.Module, penalty: float
) -> None:
    """Of every token so far, whatever the sign of its logit."""
    text = [1, 5, 5, 9, 30]
    logits = torch.linspace(-2.0, 40.0, VOCAB)
    assert (logits[text] < 0).any() and (logits[text] > 0).any()
    sampling = Sampling(repetition_penalty=penalty)
    generation = Generation(model, [[7], text], num_tokens=1, sampling=sampling)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor([text]), logits.clone()[None])[0]
    torch.testing.assert_close(generation._penalize(logits, 1), expected)


@settings(deadline=None, max_examples=60)
@given(
    text=st.text("ab#é", max_size=12),
    stops=st.lists(st.text("ab#é", min_size=1, max_size=3), max_size=3),
)
def test_what_is_shown_is_all_that_cannot_change_and_ends_at_the_first_stop_string(
    text: str, stops: list[str]
) -> None:
    stream, shown = TextStream(BYTES, stops), ""
    data = text.encode()
    for end in range(1, len(data) + 1):
        shown += stream.add(data[end - 1])
        before = data[:end].decode(errors="ignore")
        found = [before.find(stop) for stop in stops if stop in before]
        if found:
            assert stream.is_ended and shown + stream.finish() == before[: min(found)]
            return
        begun = [stop[:size] for stop in stops for size in range(1, len(stop))]
        held = max((len(part) for part in begun if before.endswith(part)), default=0)
        whole = data[:end].decode(errors="replace").rstrip("\ufffd") == before
        if len(before.encode()) == end:
            assert shown == before[: len(before) - held] and whole
        assert not stream.is_ended and before.startswith(shown)
    assert shown + stream.finish() == text
