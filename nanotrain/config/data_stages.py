"""Data stages: blends of corpora that follow each other, `--data-stages`.

    --data-stages "stable@0: 0.8 web 0.2 code" "anneal@9000: 0.5 web 0.2 code 0.3 math"

Each entry is NAME@START: BLEND. START is a step, or with "samples" after it a number of samples; the suffixes K, M, B
and T are allowed. BLEND is what `--data-path` takes.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanotrain.config.batch_schedule import read_number
from nanotrain.errors import ConfigError
from nanotrain.quantities import count_of

_ENTRY = re.compile(r"(?P<name>[\w.-]+)@(?P<start>[\d.]+[KMBTkmbt]?)(?P<unit>samples)?:\s*(?P<blend>\S.*)", re.DOTALL)
EXAMPLE = '"stable@0: 0.8 web 0.2 code" "anneal@9000: 0.5 web 0.5 math"'


@dataclass(frozen=True)
class DataStage:
    """One stage: from its start to the start of the next, batches come from its blend."""

    name: str
    start: int  # the first step, counted from 0, or the first sample
    in_samples: bool  # whether `start` is a sample
    blend: str  # as `--data-path`


def read_stages(texts: Sequence[str], train_iters: int | None = None) -> tuple[DataStage, ...]:
    """The stages of `--data-stages`, in order.

    Args:
        texts: the entries.
        train_iters: steps of the run, which every stage in steps begins before; None for any.

    Raises:
        ConfigError: all mistakes in one: form, repeated names, starts that do not begin at 0 and ascend in one unit.

    >>> read_stages(["a@0: web", "b@1K: 0.5 web 0.5 math"])[1]
    DataStage(name='b', start=1000, in_samples=False, blend='0.5 web 0.5 math')
    """
    stages, mistakes = [], []
    for text in texts:
        found = _ENTRY.fullmatch(text.strip())
        start = None if found is None else read_number(found["start"])
        if found is None or start is None:
            mistakes.append(f"{text!r} is not NAME@START: BLEND")
            continue
        stages.append(DataStage(found["name"], start, found["unit"] is not None, found["blend"].strip()))
    if not mistakes and stages:
        mistakes = _mistakes(stages, train_iters)
    if mistakes:
        why = "stages have different names, and starts in one unit that ascend from 0 and lie inside the run"
        raise ConfigError(f"data.stages: {'; '.join(mistakes)}", why=why, fix=f"write --data-stages {EXAMPLE}")
    return tuple(stages)


def stage_starts(stages: Sequence[DataStage], samples_of_steps: Callable[[int], int]) -> tuple[int, ...]:
    """The first sample of every stage; `samples_of_steps` returns the number of samples in the first steps."""
    return tuple(stage.start if stage.in_samples else samples_of_steps(stage.start) for stage in stages)


def _mistakes(stages: Sequence[DataStage], train_iters: int | None) -> list[str]:
    counts = Counter(stage.name for stage in stages)
    mistakes = [f"{name} is the name of {count} stages" for name, count in counts.items() if count > 1]
    if stages[0].start != 0:
        mistakes.append(f"the first stage, {stages[0].name}, starts at {stages[0].start}")
    if len({stage.in_samples for stage in stages[1:]}) > 1:
        mistakes.append("some stages start at steps and some at samples")
    else:
        for before, after in zip(stages, stages[1:], strict=False):
            if after.start <= before.start:
                mistakes.append(f"{after.name} starts at {after.start}, not after {before.name} at {before.start}")
    for stage in stages[1:]:
        if train_iters is not None and not stage.in_samples and stage.start >= train_iters:
            mistakes.append(f"{stage.name} starts at step {stage.start} of a run of {count_of(train_iters, 'step')}")
    return mistakes
