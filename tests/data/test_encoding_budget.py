"""A tokenizer whose regular expression takes exponential time is one error."""

import pytest
import tokenizers

from nanotrain.data import encoding_budget
from nanotrain.data.encoding_budget import within_budget
from nanotrain.data.tokenizer import FastTokenizer
from nanotrain.errors import DataError


def test_the_result_and_the_error_are_those_of_the_encoding() -> None:
    assert within_budget(lambda: 3, num_characters=1) == 3
    with pytest.raises(ZeroDivisionError):
        within_budget(lambda: 1 // 0, num_characters=1)


def test_an_exponential_pattern_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_budget, "BUDGET_S", 0.3)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    pattern = tokenizers.Regex("(a+)+$")
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, "isolated")
    with pytest.raises(DataError, match="27 characters are not encoded after 0 s"):
        FastTokenizer(backend).encode("a" * 26 + "b")
