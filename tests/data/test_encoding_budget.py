"""A tokenizer whose regular expression takes exponential time is one error."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from nanotrain.data import encoding_budget
from nanotrain.data.encoding_budget import within_budget
from nanotrain.data.tokenizer import FastTokenizer
from nanotrain.errors import DataError

ROOT = Path(__file__).parents[2]


def test_the_result_and_the_error_are_those_of_the_encoding() -> None:
    assert within_budget(lambda: 3, num_characters=1) == 3
    with pytest.raises(DataError, match="cannot be encoded: the tokenizer reports: .*by zero"):
        within_budget(lambda: 1 // 0, num_characters=1)


def test_an_exponential_pattern_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_budget, "BUDGET_S", 0.0)
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    pattern = tokenizers.Regex("(a+)+$")
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, "isolated")
    with pytest.raises(DataError, match="27 characters are not encoded after 0 s"):
        FastTokenizer(backend).encode("a" * 26 + "b")


def tokenizer_that_multiplies(times: int) -> FastTokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    backend.normalizer = tokenizers.normalizers.Replace("a", "a" * times)
    return FastTokenizer(backend)


@pytest.mark.parametrize("method", ["encode", "encode_added"])
def test_a_replacement_that_multiplies_the_text_is_an_error(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding_budget, "BUDGET_BYTES", 1 << 20)
    monkeypatch.setattr(encoding_budget, "LOOK_S", 0.0)
    # memory that grows at every look: a process that freed as much before would not grow
    looks = itertools.count(0, 1 << 21)
    monkeypatch.setattr(encoding_budget, "resident_bytes", lambda: next(looks))
    encode = getattr(tokenizer_that_multiplies(50_000), method)
    with pytest.raises(DataError, match=r"10 characters need more than 1,089,536 bytes"):
        encode("a" * 10)


def test_the_time_ends_while_the_library_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding_budget, "BUDGET_S", 0.0)
    tokenizer = tokenizer_that_multiplies(100_000)
    # a library that kept the interpreter's lock would be done before anybody looks at the time
    with pytest.raises(DataError, match="10 characters are not encoded after 0 s"):
        tokenizer.encode_added("a" * 10)


GROWN = """
from nanotrain.data.encoding_budget import resident_bytes
before = resident_bytes()
block = bytearray(1 << 27)
block[:: 1 << 12] = b"x" * (1 << 15)  # one byte per page makes the system provide it
print(resident_bytes() - before)
"""


def test_the_memory_is_that_of_this_process() -> None:
    # in a process of its own: here the library may still free what the tests above made it allocate
    done = subprocess.run(
        [sys.executable, "-c", GROWN], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert 1 << 26 < int(done.stdout) < 1 << 28


def test_tokens_with_added_ones_are_those_of_the_library() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "<s>": 2}, []))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 2)]
    )
    tokenizer = FastTokenizer(backend)
    assert tokenizer.encode_added("ab") == backend.encode("ab").ids == [2, 0, 1]
    assert tokenizer.decode([2, 0, 1]) == backend.decode([2, 0, 1])
