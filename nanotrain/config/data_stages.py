"""Named corpora and stages of the data, as the command line writes them.

    NAME=PATH              validation sets and tasks: "web=data/web" "math=data/math"
    NAME@START: BLEND      stages: "stable@0: 0.8 web 0.2 code" "anneal@9000: 0.5 web 0.5 math"

START is a step, or with "samples" after it a number of samples; the suffixes K, M, B and T are
allowed. With START..END the weights change linearly until END. BLEND is what `--data-path` takes.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from nanotrain.config.notation import read_number
from nanotrain.errors import ConfigError
from nanotrain.quantities import count_of

_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})=(.+)")
_COUNT = r"(?:\d+(?:\.\d*)?|\.\d+)[KMBTkmbt]?"
_STAGE = re.compile(
    rf"(?P<name>[\w.-]+)@(?P<start>{_COUNT})(\.\.(?P<end>{_COUNT}))?(?P<unit>samples)?:"
    r"\s*(?P<blend>\S.*)",
    re.DOTALL,
)
STAGES_EXAMPLE = '"stable@0: 0.8 web 0.2 code" "anneal@9000: 0.5 web 0.5 math"'


@dataclass(frozen=True)
class DataStage:
    """One stage: from its start to the start of the next, batches come from its blend."""

    name: str
    start: int  # the first step, counted from 0, or the first sample
    in_samples: bool  # whether `start` is a sample
    blend: str  # as `--data-path`
    # where the weights reach the blend, linearly from the stage before; None: at once
    end: int | None = None


def read_named(entries: Sequence[str]) -> dict[str, str]:
    """Paths by name of NAME=PATH entries; empty where no entry has a name.

    Raises:
        ConfigError: some entries have no name, or two have the same.

    >>> read_named(["web=data/web", "math=data/math"])
    {'web': 'data/web', 'math': 'data/math'}
    """
    named: dict[str, str] = {}
    for entry in entries:
        match = _NAMED.fullmatch(entry)
        if match is not None:
            named[match[1]] = match[2]
    if named and len(named) < len(entries):
        raise ConfigError(
            f"{' '.join(entries)} are not all NAME=PATH",
            why=f"of {len(entries)} entries {len(named)} have a name of their own",
            fix="write NAME=PATH for each, with different names",
        )
    return named


def read_stages(texts: Sequence[str], train_iters: int | None = None) -> tuple[DataStage, ...]:
    """The stages of `--data-stages`, in order.

    Args:
        texts: the entries.
        train_iters: steps of the run, which every stage in steps begins before; None for any.

    Raises:
        ConfigError: all mistakes in one: form, repeated names, starts that do not begin at 0 and
            ascend in one unit.

    >>> read_stages(["a@0: web", "b@1K: 0.5 web 0.5 math"])[1]
    DataStage(name='b', start=1000, in_samples=False, blend='0.5 web 0.5 math', end=None)
    """
    stages: list[DataStage] = []
    mistakes: list[str] = []
    for text in texts:
        stage = read_stage(text)
        if stage is None:
            mistakes.append(f"{text!r} is not NAME@START: BLEND")
        else:
            stages.append(stage)
    if not mistakes and stages:
        mistakes = [
            *mistakes_in_order(stages),
            *mistakes_in_changes(stages),
            *mistakes_in_length(stages, train_iters),
        ]
    if mistakes:
        raise ConfigError(
            f"data.stages: {'; '.join(mistakes)}",
            why="stages have different names, and starts in one unit that ascend from 0 and lie "
            "inside the run",
            fix=f"write --data-stages {STAGES_EXAMPLE}",
        )
    return tuple(stages)


def read_stage(text: str) -> DataStage | None:
    """One stage; None for a text of another form."""
    match = _STAGE.fullmatch(text.strip())
    if match is None:
        return None
    start = read_number(match["start"])
    end = read_number(match["end"]) if match["end"] else None
    if start is None or (match["end"] and end is None):
        return None
    return DataStage(
        match["name"],
        start=start,
        in_samples=match["unit"] is not None,
        blend=match["blend"].strip(),
        end=end,
    )


def mistakes_in_order(stages: Sequence[DataStage]) -> list[str]:
    """Names that stages share, and starts that do not ascend from 0 in one unit."""
    counts = Counter(stage.name for stage in stages)
    mistakes = [
        f"{name} is the name of {count} stages" for name, count in counts.items() if count > 1
    ]
    first = stages[0]
    if first.start != 0:
        mistakes.append(f"the first stage, {first.name}, starts at {first.start}")
    # the first start, 0, has no unit
    if len({stage.in_samples for stage in stages[1:]}) > 1:
        return [*mistakes, "some stages start at steps and some at samples"]
    for before, after in pairwise(stages):
        if after.start <= before.start:
            mistakes.append(
                f"{after.name} starts at {after.start}, not after {before.name} at {before.start}"
            )
        elif before.end is not None and before.end > after.start:
            mistakes.append(
                f"{before.name} changes until {before.end}, after {after.name} starts at "
                f"{after.start}"
            )
    return mistakes


def mistakes_in_changes(stages: Sequence[DataStage]) -> list[str]:
    """Mistakes in changing weights: in the first stage, or with an end before the start."""
    mistakes = []
    first = stages[0]
    if first.end is not None:
        mistakes.append(f"the first stage, {first.name}, has none before it to change from")
    for stage in stages[1:]:
        if stage.end is not None and stage.end <= stage.start:
            mistakes.append(
                f"{stage.name} changes from {stage.start} to {stage.end}, which is not later"
            )
    return mistakes


def mistakes_in_length(stages: Sequence[DataStage], train_iters: int | None) -> list[str]:
    """Stages that start after the last step of the run."""
    if train_iters is None:
        return []
    steps = count_of(train_iters, "step")
    mistakes = []
    for stage in stages[1:]:
        if not stage.in_samples and stage.start >= train_iters:
            mistakes.append(f"{stage.name} starts at step {stage.start} of a run of {steps}")
    return mistakes


def stage_bounds(
    stages: Sequence[DataStage], samples_of_steps: Callable[[int], int]
) -> tuple[tuple[int, int | None], ...]:
    """The first sample of every stage, and the first with the stage's full weights.

    The second is None for a stage whose weights do not change linearly.

    Args:
        stages: the stages.
        samples_of_steps: the number of samples in the first steps.
    """
    bounds = []
    for stage in stages:
        start = stage.start
        end = stage.end
        if not stage.in_samples:
            start = samples_of_steps(start)
            end = None if end is None else samples_of_steps(end)
        bounds.append((start, end))
    return tuple(bounds)
