"""Task files: their forms, few-shot examples, rows, scores, and one error for what is no task."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanotrain.data.tasks import TaskDataset, encode_pair, read_task, row_length
from nanotrain.data.tokenizer import ByteTokenizer
from nanotrain.errors import DataError

CHOICE = {"query": "2 + 2 =", "choices": ["4", "five"], "gold": 0}
SCHEMA = {"context_options": ["The cat", "The pen"], "continuation": "sleeps", "gold": 0}
CLOZE = {"context": "She opened the", "continuation": "door"}


def task_of(folder: Path, *questions: dict[str, Any], **options: Any):
    file = folder / "task.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in questions))
    return read_task("task", file, tokenizer=ByteTokenizer(), **options)


def texts(task) -> list[str]:
    return [bytes(row.tokens).decode() for row in task.rows]


def test_the_rows_of_every_form(tmp_path: Path) -> None:
    task = task_of(tmp_path, CHOICE, SCHEMA, CLOZE | {"delimiter": ": "})
    assert texts(task) == [
        *("2 + 2 = 4", "2 + 2 = five"),
        *("The cat sleeps", "The pen sleeps"),
        "She opened the: door",
    ]
    assert [row.num_scored for row in task.rows] == [2, 5, 7, 7, 6]


def test_examples_are_the_first_other_questions(tmp_path: Path) -> None:
    task = task_of(tmp_path, CHOICE, SCHEMA, CLOZE, num_fewshot=1)
    assert texts(task)[0] == "The cat sleeps\n\n2 + 2 = 4"
    assert texts(task)[-1] == "2 + 2 = 4\n\nShe opened the door"
    limited = task_of(tmp_path, CHOICE, SCHEMA, CLOZE, num_fewshot=2, limit=1)
    assert texts(limited)[0] == "The cat sleeps\n\nShe opened the door\n\n2 + 2 = 4"


def render(messages) -> str:
    turns = [f"[{message['role']}] {message['content']};" for message in messages]
    return "".join(turns) + "[assistant] "


def test_questions_and_examples_are_turns_of_a_conversation(tmp_path: Path) -> None:
    questions = [CHOICE, SCHEMA, CLOZE | {"delimiter": ": "}]
    assert texts(task_of(tmp_path, *questions, chat=render)) == [
        *("[user] 2 + 2 =;[assistant] 4", "[user] 2 + 2 =;[assistant] five"),
        *("[user] The cat;[assistant] sleeps", "[user] The pen;[assistant] sleeps"),
        "[user] She opened the;[assistant] door",
    ]
    task = task_of(tmp_path, *questions, chat=render, num_fewshot=1)
    assert texts(task)[0] == "[user] The cat;[assistant] sleeps;[user] 2 + 2 =;[assistant] 4"
    assert texts(task)[-1] == "[user] 2 + 2 =;[assistant] 4;[user] She opened the;[assistant] door"


def test_blanks_belong_to_the_answer_and_an_empty_context_is_the_end_of_a_document() -> None:
    tokenizer = ByteTokenizer()
    assert encode_pair("a ", "b", tokenizer=tokenizer) == ([97], [32, 98])
    assert encode_pair("", "b", tokenizer=tokenizer) == ([256], [98])


class PairTokenizer(ByteTokenizer):
    """Two bytes per token, so that a token can reach over the border of context and continuation."""

    def encode(self, text: str) -> list[int]:
        return [hash(text[start : start + 2]) for start in range(0, len(text), 2)]


def test_a_continuation_has_a_token_where_one_reaches_over_its_border() -> None:
    assert [len(part) for part in encode_pair("abc", "d", tokenizer=PairTokenizer())] == [1, 1]
    assert [len(part) for part in encode_pair("abc", "de", tokenizer=PairTokenizer())] == [2, 1]


def test_the_score_counts_answers_by_sum_by_byte_and_by_greedy_tokens(tmp_path: Path) -> None:
    task = task_of(tmp_path, CHOICE, SCHEMA, CLOZE)
    # the sum prefers the first answer (1 byte), the mean per byte the second one (4 bytes)
    score = task.score([-2.0, -3.0, -1.0, -0.5, -4.0], [0, 0, 0, 0, 5])
    assert (score.questions, score.accuracy, score.accuracy_per_byte) == (3, 2 / 3, 1 / 3)
    assert score.bits_per_byte == pytest.approx((2 + 1 + 4) / math.log(2) / (1 + 6 + 4))
    assert task.score([-2.0, -3.0, -1.0, -0.5, -4.0], [0, 0, 0, 0, 4]).accuracy == 1 / 3, (
        "one token was not greedy"
    )
    assert score.chance == (1 / 2 + 1 / 2 + 0) / 3, "nobody guesses the words of a cloze question"


def test_samples_hold_rows_of_one_length_whose_answers_are_unmasked(tmp_path: Path) -> None:
    task = task_of(tmp_path, CHOICE, SCHEMA, CLOZE)
    length = row_length(task, 128, multiple=4)
    assert length == 32  # the longest row has 18 inputs
    dataset = TaskDataset(task, seq_length=128, row_length=length)
    assert dataset.samples_per_epoch == 2
    seen = []
    for sample in (dataset[0], dataset[1], dataset[2]):
        assert sample.tokens.shape == sample.labels.shape == sample.loss_mask.shape == (128,)
        for row in range(4):
            part = slice(row * length, (row + 1) * length)
            seen.append(
                bytes(
                    sample.labels[part][sample.loss_mask[part] > 0].astype(np.uint8).tolist()
                ).decode()
            )
    assert seen == [" 4", " five", " sleeps", " sleeps", " door", *[""] * 7]


def test_of_a_longer_row_the_end_is_kept(tmp_path: Path) -> None:
    task = task_of(tmp_path, CLOZE | {"context": "x" * 100})
    sample = TaskDataset(task, seq_length=8, row_length=8)[0]
    assert (
        bytes(sample.tokens.astype(np.uint8).tolist()) == b"xxxx doo"
        and sample.loss_mask.sum() == 5
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 questions"),
        (b"{", "Expecting"),
        (b"[1]\n", "line 1 is a list"),
        (b'{"query": "a"}\n', "line 1 has the fields"),
        (b'{"query": "a", "choices": ["b"], "gold": 0}\n', "choices has 1 items"),
        (b'{"query": "a", "choices": ["b", 3], "gold": 0}\n', "choices is 3"),
        (b'{"query": "a", "choices": ["b", "c"], "gold": 2}\n', "gold is 2"),
        (b'{"query": "a", "choices": ["b", "c"]}\n', "gold is None"),
        (b'{"context": "a", "continuation": "\\ud800"}\n', "no valid text"),
    ],
)
def test_what_is_no_task_is_one_error(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "task.jsonl"
    file.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_task("task", file, tokenizer=ByteTokenizer())


def test_a_task_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.jsonl"
    query = {"query": "x" * 1000, "choices": ["a"] * 64, "gold": 0}
    file.write_text(json.dumps(query))
    monkeypatch.setattr("nanotrain.data.tasks.MAX_TASK_TOKENS", 64_000)
    with pytest.raises(DataError, match="task a has more than 64,000 tokens"):
        read_task("a", file, tokenizer=ByteTokenizer())
    file.write_text(json.dumps(query | {"query": "x" * (1 << 20)}))
    with pytest.raises(DataError, match="line 1 has 1,048,.* bytes, at most 1,048,576 are read"):
        read_task("a", file, tokenizer=ByteTokenizer())
