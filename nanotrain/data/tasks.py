"""Tasks from local JSONL files: the log-likelihoods of continuations are compared.

One line per question, in one of the three forms of the CORE tasks (Li et al. 2024, "DataComp-LM",
appendix G):

    multiple choice   {"query": "Water boils at", "choices": ["100 C", "50 C"], "gold": 0}
    schema            {"context_options": ["The cat", "The pen"], "continuation": "sleeps",
                       "gold": 0}
    cloze             {"context": "She opened the", "continuation": "door"}

A cloze question is right if the continuation is sampled greedily. An optional "delimiter" stands
between a context and its continuation; a blank if it is not set. In a conversation (`--chat`)
contexts are messages of a user and continuations are replies, without a delimiter, as in lm-eval.

    read_task       a file -> Task
    TaskDataset     the rows of a task, several to one sample of training's length
    Task.score      log-likelihoods of the rows -> TaskScore

    L tokens per row   S tokens per sample, a multiple of L
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanotrain.data.batch import Sample
from nanotrain.data.prompts import encode_pair as encode_pair
from nanotrain.data.tokenizer import Tokenizer
from nanotrain.errors import DataError
from nanotrain.untrusted import (
    list_of,
    object_of,
    parse_json,
    read_file,
    text_of,
    unreadable,
    whole_number,
)

MAX_TASK_BYTES = 1 << 28  # HellaSwag has 10 MB
MAX_CHOICES = 64
MAX_QUESTION_BYTES = 1 << 20
MAX_QUESTION_TEXT = 1 << 22  # characters of all its contexts and continuations
MAX_TASK_TOKENS = 1 << 26  # MMLU with 5 examples has 4e7; 8 bytes each
FORMS = (
    '"query", "choices", "gold"',
    '"context_options", "continuation", "gold"',
    '"context", "continuation"',
)


# the text of messages up to a reply, such as `ChatTemplate.prompt`
ChatPrompt = Callable[[Sequence[dict[str, Any]]], str]


@dataclass(frozen=True)
class Question:
    """Contexts and the continuations that follow them."""

    # (context, continuation): several to compare, or one if it is a cloze question
    pairs: tuple[tuple[str, str], ...]
    gold: int  # index of the right pair
    # UTF-8 bytes of the continuations without the delimiter, as lm-eval counts them
    num_bytes: tuple[int, ...]
    is_cloze: bool = False  # right if every token of the continuation is the most likely one
    delimiter: str = ""  # between a context and its continuation

    @property
    def text(self) -> str:
        """The context with the right continuation, as an example for other questions."""
        return self.delimiter.join(self.pairs[self.gold])

    @property
    def chance(self) -> float:
        """The probability that a guess is right."""
        return 0.0 if self.is_cloze else 1 / len(self.pairs)

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The right pair as messages of a conversation."""
        context, continuation = self.pairs[self.gold]
        return [_user(context), {"role": "assistant", "content": continuation}]

    def prompts(
        self, examples: "Sequence[Question]", chat: ChatPrompt | None
    ) -> list[tuple[str, str]]:
        """The contexts with the examples before them, and their continuations.

        Args:
            examples: questions with their right continuations.
            chat: makes a conversation of contexts and continuations; None for plain text.
        """
        if chat is None:
            before = "".join(f"{example.text}\n\n" for example in examples)
            return [(before + context, self.delimiter + end) for context, end in self.pairs]
        turns: list[dict[str, Any]] = []
        for example in examples:
            turns += example.turns
        return [(chat([*turns, _user(context)]), end) for context, end in self.pairs]


def _user(text: str) -> dict[str, Any]:
    """A message of a user."""
    return {"role": "user", "content": text}


@dataclass(frozen=True)
class Row:
    """One context and continuation in tokens."""

    tokens: tuple[int, ...]  # tokens of both
    num_scored: int  # tokens of the continuation


@dataclass(frozen=True)
class TaskScore:
    """The score of a model on a task; accuracies are fractions of the questions."""

    questions: int
    # the right continuation has the highest log-likelihood; cloze: it is the greedy one
    accuracy: float
    # the same with log-likelihoods divided by the UTF-8 bytes of the continuation
    accuracy_per_byte: float
    bits_per_byte: float  # over the right continuations
    chance: float = 0.0  # expected accuracy of guesses; 0 for cloze questions

    def to_dict(self) -> dict[str, float]:
        """The fields as values of a JSON file."""
        return asdict(self)

    def text(self) -> str:
        """The score in one line."""
        return (
            f"accuracy {self.accuracy:.4f} | per byte {self.accuracy_per_byte:.4f} | "
            f"bits per byte {self.bits_per_byte:.4f} | {self.questions:,} questions | "
            f"chance {self.chance:.4f}"
        )


@dataclass(frozen=True)
class Task:
    """A task and the rows of its questions, in order."""

    name: str
    questions: tuple[Question, ...]
    rows: tuple[Row, ...]

    def count_longer(self, seq_length: int) -> int:
        """The rows with more than `seq_length` input tokens."""
        return sum(len(row.tokens) - 1 > seq_length for row in self.rows)

    def score(self, log_likelihoods: Sequence[float], greedy_tokens: Sequence[float]) -> TaskScore:
        """The score of the questions.

        Args:
            log_likelihoods: log-likelihood of every row's continuation, in nats.
            greedy_tokens: number of every row's scored tokens that are greedy.
        """
        num_right = 0
        num_right_per_byte = 0
        nats = 0.0
        num_bytes = 0
        first = 0
        for question in self.questions:
            rows = slice(first, first + len(question.pairs))
            first = rows.stop
            sums = np.array(log_likelihoods[rows])
            sizes = np.maximum(question.num_bytes, 1)
            if question.is_cloze:
                is_greedy = round(greedy_tokens[rows][0]) == self.rows[rows][0].num_scored
                num_right += int(is_greedy)
                num_right_per_byte += int(is_greedy)
            else:
                num_right += int(np.argmax(sums) == question.gold)
                num_right_per_byte += int(np.argmax(sums / sizes) == question.gold)
            nats -= float(sums[question.gold])
            num_bytes += int(sizes[question.gold])
        count = len(self.questions)
        return TaskScore(
            count,
            accuracy=num_right / count,
            accuracy_per_byte=num_right_per_byte / count,
            bits_per_byte=nats / math.log(2) / num_bytes,
            chance=sum(question.chance for question in self.questions) / count,
        )


def read_task(
    name: str,
    path: Path,
    *,
    tokenizer: Tokenizer,
    num_fewshot: int = 0,
    limit: int | None = None,
    chat: ChatPrompt | None = None,
) -> Task:
    """Read a task.

    Args:
        name: name of the task in logs.
        path: JSONL file.
        tokenizer: tokenizer of the model.
        num_fewshot: examples before each question: the first other questions of the file, with
            their continuations.
        limit: number of questions, from the first; None for all.
        chat: makes a conversation of a question and its examples; None for plain text.

    Raises:
        DataError: the file cannot be read, a line is no question, or a template refuses one.
    """
    try:
        questions = _read_questions(path)
        if len(questions) <= num_fewshot:
            raise ValueError(
                f"it has {len(questions)} questions, "
                f"too few for {num_fewshot} examples and one question"
            )
    except (OSError, ValueError) as error:
        fix = f"write one JSON object per line, with {'; or '.join(FORMS)}"
        what = f"task {name} cannot be read from {path}"
        raise DataError(what, why=unreadable(error), fix=fix) from None
    chosen = questions[:limit]
    rows = []
    num_tokens = 0
    same: dict[int, int] = {}  # one object per id: 8 bytes per token, not 36
    for index, question in enumerate(chosen):
        others = [*questions[:index], *questions[index + 1 : num_fewshot + 1]]
        for context, continuation in question.prompts(others[:num_fewshot], chat):
            tokens, scored = encode_pair(context, continuation, tokenizer=tokenizer)
            both = tuple(same.setdefault(token, token) for token in (*tokens, *scored))
            rows.append(Row(both, len(scored)))
            num_tokens += len(both)
            if num_tokens > MAX_TASK_TOKENS:
                raise DataError(
                    f"task {name} has more than {MAX_TASK_TOKENS:,} tokens",
                    why=f"question {index + 1} of {len(chosen)} is the first beyond them",
                    fix="read fewer with --max-samples or --eval-task-limit",
                )
    return Task(name, tuple(chosen), tuple(rows))


def _read_questions(path: Path) -> list[Question]:
    """The questions of a file, without blank lines."""
    questions = []
    lines = read_file(path, most=MAX_TASK_BYTES).splitlines()
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_QUESTION_BYTES:
            raise ValueError(
                f"line {number} has {len(line):,} bytes, at most {MAX_QUESTION_BYTES:,} are read"
            )
        if line.strip():
            questions.append(_parse_question(line, number))
    return questions


class TaskDataset:
    """The rows of a task: sample i holds rows [i * S/L, (i + 1) * S/L), each padded to L tokens.

    Only the labels of continuations count in the loss. A longer row keeps its last L + 1
    tokens. A sample after the last one is fully masked.

    Args:
        task: the rows.
        seq_length: S.
        row_length: L.
    """

    def __init__(self, task: Task, *, seq_length: int, row_length: int) -> None:
        self.task = task
        self.row_length = row_length
        self.rows_per_sample = seq_length // row_length

    @property
    def samples_per_epoch(self) -> int:
        """Samples that hold a row."""
        return -(-len(self.task.rows) // self.rows_per_sample)

    def __getitem__(self, index: int) -> Sample:
        """Sample `index` >= 0."""
        length = self.row_length
        count = self.rows_per_sample
        ids = np.zeros((count, length + 1), dtype=np.int64)
        loss_mask = np.zeros((count, length), dtype=np.float32)
        rows = self.task.rows[index * count : (index + 1) * count]
        for number, row in enumerate(rows):
            tokens = row.tokens[-(length + 1) :]
            num_labels = len(tokens) - 1
            first_scored = max(0, num_labels - row.num_scored)
            ids[number, : len(tokens)] = tokens
            loss_mask[number, first_scored:num_labels] = 1.0
        inputs = ids[:, :-1].reshape(-1)
        labels = ids[:, 1:].reshape(-1)
        return Sample(inputs, labels, loss_mask=loss_mask.reshape(-1))


def row_length(task: Task, seq_length: int, *, multiple: int, shortest: int = 1) -> int:
    """The tokens per row: S halved while every row fits, and while it can be sharded.

    Args:
        task: the rows.
        seq_length: S.
        multiple: number that divides the tokens of a row (`sequence_parts` of the rules).
        shortest: tokens that a row has at least (`shortest_sequence` of the rules).

    >>> row_length(Task("t", (), (Row((1,) * 70, 1),)), 1024, multiple=4)
    128
    """
    least = max(shortest, *(len(row.tokens) - 1 for row in task.rows))
    length = seq_length
    while length % (2 * multiple) == 0 and length // 2 >= least:
        length //= 2
    return length


def _parse_question(line: bytes, number: int) -> Question:
    """A line of a file; `ValueError` if it is no question."""
    where = f"line {number}"
    fields: Mapping[str, Any] = object_of(parse_json(line), where)
    delimiter = text_of(fields.get("delimiter", " "), f"{where}: delimiter")

    def text(name: str) -> str:
        return text_of(fields[name], f"{where}: {name}")

    def texts(name: str) -> list[str]:
        values = list_of(fields[name], f"{where}: {name}")
        if not 2 <= len(values) <= MAX_CHOICES:
            raise ValueError(
                f"{where}: {name} has {len(values)} items, it must have 2 to {MAX_CHOICES}"
            )
        return [text_of(value, f"{where}: {name}") for value in values]

    if {"query", "choices"} <= fields.keys():
        continuations = texts("choices")
        contexts = [text("query")] * len(continuations)
    elif {"context_options", "continuation"} <= fields.keys():
        contexts = texts("context_options")
        continuations = [text("continuation")] * len(contexts)
    elif {"context", "continuation"} <= fields.keys():
        contexts = [text("context")]
        continuations = [text("continuation")]
    else:
        raise ValueError(f"{where} has the fields {json.dumps(sorted(fields))[:80]}")
    num_characters = sum(map(len, [*contexts, *continuations]))
    if num_characters > MAX_QUESTION_TEXT:
        raise ValueError(
            f"{where} has {num_characters:,} characters in {len(contexts)} choices, at most "
            f"{MAX_QUESTION_TEXT:,} are read"
        )
    is_cloze = len(contexts) == 1
    gold = 0
    if not is_cloze:
        gold = whole_number(fields.get("gold"), f"{where}: gold", high=len(contexts) - 1)
    num_bytes = tuple(len(continuation.encode()) for continuation in continuations)
    pairs = tuple(zip(contexts, continuations, strict=True))
    return Question(pairs, gold, num_bytes, is_cloze, delimiter)
