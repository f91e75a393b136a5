"""Log-likelihoods of given tokens, for language-model benchmarks.

Scored            the log-likelihood of one continuation of a context
log_likelihoods   score several continuations, in batches
rolling_windows   a long text in windows, every token predicted once with as much context as fits

S tokens per row   V vocabulary
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanotrain.model.transformer import Stage


@dataclass(frozen=True)
class Scored:
    """The log-likelihood of a continuation, in nats."""

    log_likelihood: float  # summed over its tokens
    is_greedy: bool  # whether each of its tokens is the most likely one


# tokens of a context, at least one, and of its continuation
Request = tuple[Sequence[int], Sequence[int]]


@torch.no_grad()
def log_likelihoods(
    stage: Stage, requests: Sequence[Request], *, batch_size: int, max_length: int | None = None
) -> list[Scored]:
    """Score continuations, in the order of the requests.

    Rows of similar length are read together, padded on the right, where no earlier token attends.
    Where experts have a capacity, which all tokens of a batch share, a row is read alone.

    Args:
        stage: a model in one stage.
        requests: contexts and continuations; the last `max_length` + 1 tokens of longer ones are
            read.
        batch_size: rows per forward pass.
        max_length: input tokens of a row; None for the positions of the model.
    """
    limit = max_length or stage.model_config.max_position_embeddings
    moe = stage.model_config.moe
    if moe is not None and moe.expert_capacity_factor is not None:
        batch_size = 1
    rows = []
    for context, continuation in requests:
        row = [*context, *continuation]
        rows.append(row[-(limit + 1) :])
    lengths = [len(context) + len(continuation) for context, continuation in requests]
    order = sorted(range(len(requests)), key=lengths.__getitem__, reverse=True)
    scores: dict[int, Scored] = {}
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        inputs = [rows[index][:-1] for index in batch]
        logits = _logits(stage, inputs)
        for index, row_logits in zip(batch, logits, strict=True):
            row = rows[index]
            _, continuation = requests[index]
            num_scored = len(continuation)
            read_logits = row_logits[: len(row) - 1]
            scores[index] = _score(read_logits, row, num_scored=num_scored)
    return [scores[index] for index in range(len(requests))]


def rolling_windows(tokens: Sequence[int], *, prefix: int, max_length: int) -> Iterator[Request]:
    """Windows of at most `max_length` input tokens, in which every token is predicted once.

    The first token follows `prefix`.

    >>> list(rolling_windows([1, 2, 3, 4, 5], prefix=0, max_length=3))
    [([0], [1, 2, 3]), ([2, 3], [4, 5])]
    """
    text = [prefix, *tokens]
    for first in range(1, len(text), max_length):
        last = min(first + max_length, len(text))
        start = max(0, last - 1 - max_length)
        yield text[start:first], text[first:last]


def _logits(stage: Stage, rows: Sequence[Sequence[int]]) -> Tensor:
    """The logits of rows padded on the right: [rows, S, V] fp32."""
    longest = max(1, *map(len, rows))
    padded = torch.zeros(len(rows), longest, dtype=torch.int64)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = torch.tensor(row, dtype=torch.int64)
    device = next(stage.parameters()).device
    return stage.logits(padded.to(device)).float()


def _score(logits: Tensor, row: Sequence[int], *, num_scored: int) -> Scored:
    """Score the last tokens of a row by its logits [len(row) - 1, V]; fewer if the row was cut."""
    num_scored = min(num_scored, len(row) - 1)
    if num_scored == 0:
        return Scored(0.0, True)
    targets = torch.tensor(row[-num_scored:], device=logits.device)
    log_probs = logits[-num_scored:].log_softmax(dim=-1)
    log_likelihood = log_probs.gather(1, targets[:, None]).double().sum()
    is_greedy = (log_probs.argmax(dim=-1) == targets).all()
    return Scored(float(log_likelihood), bool(is_greedy))
