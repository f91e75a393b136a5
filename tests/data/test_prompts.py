"""Prompts and task rows have the tokens of transformers and lm-eval, and the values of lm-eval."""

import json
import logging
from pathlib import Path

import pytest
import transformers

from nanotrain.data.prompts import encode_pair, encode_prompt, prompt_start, prompt_tokenizer
from nanotrain.data.tokenizer import ByteTokenizer, load_tokenizer
from tests.inference.lm_eval_table import (
    RECORDED,
    lm_eval_model,
    lm_eval_scores,
    own_scores,
    scores_of,
)
from tests.inference.tiny_folders import KINDS, write_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder of every kind."""
    root = tmp_path_factory.mktemp("folders")
    return {name: write_folder(name, root / name) for name in KINDS}


@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_has_the_tokens_of_transformers(folders: dict[str, Path], name: str) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folders[name])
    ours = load_tokenizer(str(folders[name]))
    for text in ("the quick", "", " fox", "hé 日本", "the </s> dog"):
        assert encode_prompt(text, ours) == theirs(text).input_ids, text
    start = theirs.bos_token_id if theirs.bos_token_id is not None else theirs.eos_token_id
    assert prompt_start(ours) == [start]


def test_a_start_that_is_written_out_is_not_added_again(folders: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(str(folders["bos"]))
    assert encode_prompt("<s>the", tokenizer) == encode_prompt("the", tokenizer)
    assert encode_pair("", "<s>the", tokenizer=tokenizer) == encode_pair(
        "", "the", tokenizer=tokenizer
    )


@pytest.mark.parametrize("name", KINDS)
def test_log_likelihoods_are_the_recorded_ones_of_lm_eval(
    folders: dict[str, Path], name: str
) -> None:
    recorded = json.loads(RECORDED.read_text())[name]
    assert own_scores(folders[name]) == pytest.approx(recorded, abs=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_log_likelihoods_are_those_of_lm_eval_itself(folders: dict[str, Path], name: str) -> None:
    pytest.importorskip("lm_eval")
    from nanotrain.inference.lm_eval import NanotrainLM

    expected = lm_eval_scores(folders[name])
    model = NanotrainLM(str(folders[name]), batch_size=3)
    assert model.max_length == 32
    assert scores_of(model) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["bos", "qwen", "unigram"])
def test_generated_texts_are_those_of_lm_eval_itself(folders: dict[str, Path], name: str) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from nanotrain.inference.lm_eval import NanotrainLM

    theirs, ours = lm_eval_model(folders[name]), NanotrainLM(str(folders[name]))
    for context in ("the quick", "a cat sat on ", "<s>the", "the lazy dog " * 9):
        for options in ({"until": ["e"], "max_gen_toks": 8}, {"until": [], "max_new_tokens": 4}):
            request = Instance("generate_until", {}, (context, {**options}), 0)
            expected = theirs.generate_until([request], disable_tqdm=True)
            assert ours.generate_until([request]) == expected, (context, options)


def test_what_a_training_has_not_read_is_left_out_and_said(
    folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer(str(folders["bos"]))
    caplog.set_level(logging.INFO, logger="nanotrain")
    logging.getLogger("nanotrain").propagate = True
    assert prompt_tokenizer(tokenizer, is_pretrained=True) is tokenizer
    trained = prompt_tokenizer(tokenizer, is_pretrained=False)
    assert encode_prompt("the", trained) == tokenizer.encode("the")
    assert prompt_start(trained) == [tokenizer.eod] and prompt_start(tokenizer) == [tokenizer.bos]
    assert "without the special tokens of the tokenizer" in caplog.text
    for plain in (ByteTokenizer(), load_tokenizer(str(folders["gpt2"]))):
        assert prompt_tokenizer(plain, is_pretrained=False) is plain
