"""Log-likelihoods of given tokens: what language-model benchmarks ask of a model.

Scored            one continuation of one context
log_likelihoods   several of them, in batches
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
    """Score continuations, in the order of the requests; rows of similar length are read together.

    Rows are padded on the right, to which no earlier token attends. Where experts have a capacity,
    which all tokens of a batch share, a row is read alone.

    Args:
        stage: a model in one stage.
        requests: contexts and continuations; of longer ones the last `max_length` + 1 tokens are
            read.
        batch_size: rows per forward pass.
        max_length: input tokens of a row; None for the positions of the model.
    """
    limit = max_length or stage.model_config.max_position_embeddings
    order = sorted(range(len(requests)), key=lambda index: -sum(map(len, requests[index])))
    moe = stage.model_config.moe
    size = 1 if moe is not None and moe.expert_capacity_factor is not None else batch_size
    scores: dict[int, Scored] = {}
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        rows = [[*requests[index][0], *requests[index][1]][-(limit + 1) :] for index in chosen]
        logits = _logits(stage, [row[:-1] for row in rows])
        for index, row, of_row in zip(chosen, rows, logits, strict=True):
            scores[index] = _score(of_row[: len(row) - 1], row, num_scored=len(requests[index][1]))
    return [scores[index] for index in range(len(requests))]


def rolling_windows(tokens: Sequence[int], *, prefix: int, max_length: int) -> Iterator[Request]:
    """Windows of at most `max_length` input tokens in which every token is predicted once; the
    first follows `prefix`.

    >>> [(list(context), list(scored)) for context, scored in rolling_windows([1, 2, 3, 4, 5], prefix=0, max_length=3)]
    [([0], [1, 2, 3]), ([2, 3], [4, 5])]
    """
    text = [prefix, *tokens]
    for first in range(1, len(text), max_length):
        last = min(first + max_length, len(text))
        yield text[max(0, last - 1 - max_length) : first], text[first:last]


def _logits(stage: Stage, rows: Sequence[Sequence[int]]) -> Tensor:
    """[rows, S, V] fp32, of rows padded on the right to S."""
    longest, device = max(1, *map(len, rows)), next(stage.parameters()).device
    padded = [[*row, *[0] * (longest - len(row))] for row in rows]
    return stage.logits(torch.tensor(padded, device=device)).float()


def _score(logits: Tensor, row: Sequence[int], *, num_scored: int) -> Scored:
    """The last `num_scored` tokens of a row from the logits [len(row) - 1, V]; fewer where the row
    was cut.
    """
    num_scored = min(num_scored, len(row) - 1)
    if num_scored == 0:
        return Scored(0.0, True)
    targets = torch.tensor(row[-num_scored:], device=logits.device)
    log_probs = logits[-num_scored:].log_softmax(dim=-1)
    picked = log_probs.gather(1, targets[:, None]).double().sum()
    return Scored(float(picked), bool((log_probs.argmax(dim=-1) == targets).all()))
