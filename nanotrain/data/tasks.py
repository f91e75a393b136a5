"""Tasks from local JSONL files: questions whose continuations are compared by their
log-likelihoods.

One line per question, in one of the three forms of the CORE tasks (Li et al. 2024, "DataComp-LM",
appendix G):

    {"query": "Water boils at", "choices": ["100 C", "50 C"], "gold": 0}              multiple choice
    {"context_options": ["The cat", "The pen"], "continuation": "sleeps", "gold": 0}  schema: two contexts
    {"context": "She opened the", "continuation": "door"}                             cloze: right if sampled greedily

An optional "delimiter" stands between a context and its continuation; a blank if it is not set.

read_task       a file -> Task
TaskDataset     the rows of a task, several to one sample of training's length
Task.score      log-likelihoods of the rows -> TaskScore

    L tokens per row   S tokens per sample, a multiple of L
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanotrain.data.batch import Sample
from nanotrain.data.tokenizer import Tokenizer, document_start
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
FORMS = (
    '"query", "choices", "gold"',
    '"context_options", "continuation", "gold"',
    '"context", "continuation"',
)


@dataclass(frozen=True)
class Question:
    """Contexts and the continuations that follow them."""

    # (context, continuation); several to compare, or one of a cloze question
    pairs: tuple[tuple[str, str], ...]
    gold: int  # index of the right pair
    # UTF-8 bytes of each continuation without the delimiter, as lm-eval counts them
    num_bytes: tuple[int, ...]
    is_cloze: bool = False  # right if every token of the continuation is the most likely one

    @property
    def text(self) -> str:
        """The context with the right continuation, as an example for other questions."""
        return "".join(self.pairs[self.gold])


@dataclass(frozen=True)
class Row:
    """One context and continuation in tokens."""

    tokens: tuple[int, ...]  # of both
    num_scored: int  # tokens of the continuation


@dataclass(frozen=True)
class TaskScore:
    """The score of a model on a task; shares are of the questions."""

    questions: int
    # the right continuation has the highest log-likelihood; cloze: it is the greedy one
    accuracy: float
    # the same with log-likelihoods divided by the UTF-8 bytes of the continuation
    accuracy_per_byte: float
    bits_per_byte: float  # of the right continuations

    def to_dict(self) -> dict[str, float]:
        """The fields."""
        return asdict(self)

    def text(self) -> str:
        """One line."""
        return (
            f"accuracy {self.accuracy:.4f} | per byte {self.accuracy_per_byte:.4f} | "
            f"bits per byte {self.bits_per_byte:.4f} | {self.questions:,} questions"
        )


@dataclass(frozen=True)
class Task:
    """A task and the rows of its questions, in order."""

    name: str
    questions: tuple[Question, ...]
    rows: tuple[Row, ...]

    def score(self, log_likelihoods: Sequence[float], greedy_tokens: Sequence[float]) -> TaskScore:
        """The score, from every row's log-likelihood in nats and the number of its scored tokens
        that are greedy.
        """
        num_right, num_right_per_byte, nats, num_bytes, first = 0, 0, 0.0, 0, 0
        for question in self.questions:
            rows = slice(first, first := first + len(question.pairs))
            sums = np.array(log_likelihoods[rows])
            sizes = np.maximum(question.num_bytes, 1)
            if question.is_cloze:
                is_right = is_right_per_byte = (
                    round(greedy_tokens[rows][0]) == self.rows[rows][0].num_scored
                )
            else:
                is_right, is_right_per_byte = (
                    int(np.argmax(each)) == question.gold for each in (sums, sums / sizes)
                )
            num_right, num_right_per_byte = (
                num_right + is_right,
                num_right_per_byte + is_right_per_byte,
            )
            nats, num_bytes = (
                nats - float(sums[question.gold]),
                num_bytes + int(sizes[question.gold]),
            )
        count = len(self.questions)
        return TaskScore(
            count, num_right / count, num_right_per_byte / count, nats / math.log(2) / num_bytes
        )


def read_task(
    name: str, path: Path, *, tokenizer: Tokenizer, num_fewshot: int = 0, limit: int | None = None
) -> Task:
    """Read a task.

    Args:
        name: name of the task in logs.
        path: JSONL file.
        tokenizer: tokenizer of the model.
        num_fewshot: examples before each question: the first other questions of the file, with
            their continuations.
        limit: number of questions, from the first; None for all.

    Raises:
        DataError: the file cannot be read, or a line is no question.
    """
    try:
        lines = read_file(path, most=MAX_TASK_BYTES).splitlines()
        questions = [
            _question(line, number) for number, line in enumerate(lines, start=1) if line.strip()
        ]
        if len(questions) <= num_fewshot:
            raise ValueError(
                f"it has {len(questions)} questions, too few for {num_fewshot} examples and one question"
            )
    except (OSError, ValueError) as error:
        fix = f"write one JSON object per line, with {'; or '.join(FORMS)}"
        raise DataError(
            f"task {name} cannot be read from {path}", why=unreadable(error), fix=fix
        ) from None
    chosen, rows = questions[:limit], []
    for index, question in enumerate(chosen):
        examples = [
            other.text for place, other in enumerate(questions[: num_fewshot + 1]) if place != index
        ]
        before = "".join(f"{example}\n\n" for example in examples[:num_fewshot])
        for context, continuation in question.pairs:
            tokens, scored = encode_pair(before + context, continuation, tokenizer=tokenizer)
            rows.append(Row((*tokens, *scored), len(scored)))
    return Task(name, tuple(chosen), tuple(rows))


def encode_pair(
    context: str, continuation: str, *, tokenizer: Tokenizer
) -> tuple[list[int], list[int]]:
    """Tokens of a context and of its continuation, encoded as one text, so that the border is that
    of training.

    Blanks at the end of the context belong to the continuation. An empty context is the end of a
    document. Where tokens reach over the border, the continuation has at least the last one:
    without any it would be the most likely.
    """
    stripped = context.rstrip()
    both = tokenizer.encode(context + continuation)
    before = tokenizer.encode(stripped)
    if len(before) >= len(both):
        before = both[:-1]
    return before or document_start(tokenizer), both[len(before) :]


class TaskDataset:
    """The rows of a task: sample i holds rows [i * S/L, (i + 1) * S/L), each padded to L tokens.

    Only the labels of continuations count in the loss. Of a longer row the last L + 1 tokens are
    kept. A sample after the last one is fully masked.

    Args:
        task: the rows.
        seq_length: S.
        row_length: L.
    """

    def __init__(self, task: Task, *, seq_length: int, row_length: int) -> None:
        self.task, self.row_length, self.rows_per_sample = (
            task,
            row_length,
            seq_length // row_length,
        )

    @property
    def samples_per_epoch(self) -> int:
        """Samples that hold a row."""
        return -(-len(self.task.rows) // self.rows_per_sample)

    def __getitem__(self, index: int) -> Sample:
        """Sample `index` >= 0."""
        length, count = self.row_length, self.rows_per_sample
        ids = np.zeros((count, length + 1), dtype=np.int64)
        loss_mask = np.zeros((count, length), dtype=np.float32)
        for place, row in enumerate(self.task.rows[index * count : (index + 1) * count]):
            tokens = row.tokens[-(length + 1) :]
            ids[place, : len(tokens)] = tokens
            loss_mask[place, max(0, len(tokens) - 1 - row.num_scored) : len(tokens) - 1] = 1.0
        return Sample(
            ids[:, :-1].reshape(-1), ids[:, 1:].reshape(-1), loss_mask=loss_mask.reshape(-1)
        )


def row_length(task: Task, seq_length: int, *, multiple: int) -> int:
    """The tokens per row: S halved while every row fits, and while it can be sharded.

    Args:
        task: the rows.
        seq_length: S.
        multiple: number that divides the tokens of a row on every rank, for sequence and context
            parallelism.

    >>> row_length(Task("t", (), (Row((1,) * 70, 1),)), 1024, multiple=4)
    128
    """
    longest, length = max(len(row.tokens) for row in task.rows) - 1, seq_length
    while length % (2 * multiple) == 0 and length // 2 >= longest:
        length //= 2
    return length


def _question(line: bytes, number: int) -> Question:
    """A line of a file; `ValueError` if it is no question."""
    where = f"line {number}"
    fields: Mapping[str, Any] = object_of(parse_json(line), where)
    delimiter = text_of(fields.get("delimiter", " "), f"{where}: delimiter")

    def texts(name: str) -> list[str]:
        values = list_of(fields[name], f"{where}: {name}")
        if not 2 <= len(values) <= MAX_CHOICES:
            raise ValueError(
                f"{where}: {name} has {len(values)} items, it must have 2 to {MAX_CHOICES}"
            )
        return [text_of(value, f"{where}: {name}") for value in values]

    if {"query", "choices"} <= fields.keys():
        continuations = texts("choices")
        contexts = [text_of(fields["query"], f"{where}: query")] * len(continuations)
    elif {"context_options", "continuation"} <= fields.keys():
        contexts = texts("context_options")
        continuations = [text_of(fields["continuation"], f"{where}: continuation")] * len(contexts)
    elif {"context", "continuation"} <= fields.keys():
        contexts = [text_of(fields["context"], f"{where}: context")]
        continuations = [text_of(fields["continuation"], f"{where}: continuation")]
    else:
        raise ValueError(f"{where} has the fields {json.dumps(sorted(fields))[:80]}")
    is_cloze = len(contexts) == 1
    gold = (
        0
        if is_cloze
        else whole_number(fields.get("gold"), f"{where}: gold", high=len(contexts) - 1)
    )
    pairs = tuple(
        (context, delimiter + text) for context, text in zip(contexts, continuations, strict=True)
    )
    return Question(pairs, gold, tuple(len(text.encode()) for text in continuations), is_cloze)
