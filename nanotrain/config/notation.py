"""Settings that are texts with a form of their own.

    patterns of layers     --moe-layer-freq [0]*3+[1]*58: a frequency, or one 0 or 1 per layer
                           --hybrid-layer-pattern G-*-|G-*E: one letter per layer
    pipeline layouts       --pipeline-model-parallel-layout Et*3|(tt|)*29,t|L: the layers of every stage
    data stages            --data-stages "stable@0: 0.8 web 0.2 code" "anneal@9000: 0.5 web 0.5 math"
    numbers                250B, as in schedules

A pattern is a Python expression (lists of 0 and 1, `+`, and `*` by a number, which may be a sum).
It is parsed, never evaluated.

In a layout E is the embedding, t a transformer layer, m a layer of multi-token prediction, L the
head with the loss, `|` begins the next stage. `x*3` repeats a letter and `(...)*3` a part; commas
and spaces separate only. The syntax is that of Megatron-LM. Layers of multi-token prediction always
run on the last stage, with the head: m may be left out. A stage before it that has only m, as
Megatron-LM allows, has no layers and passes hidden states on.

A data stage is NAME@START: BLEND. START is a step, or with "samples" after it a number of samples;
the suffixes K, M, B and T are allowed. BLEND is what `--data-path` takes.
"""

import ast
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from threading import Lock
from typing import Any

from nanotrain.config.tables import read_table
from nanotrain.errors import ConfigError
from nanotrain.paths import expanded
from nanotrain.quantities import count_of

SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
# More layers than any model has; guards against `[1]*10**9`.
LONGEST_PATTERN = 10_000
# Held while a pattern is parsed: two threads that parse at once can fail in Python 3.11, with a
# SystemError.
PARSING = Lock()


def read_layer_pattern(field: str, text: str, *, num_layers: int) -> tuple[bool, ...]:
    """Whether a field that is a frequency or has a value per layer marks each layer.

    Raises:
        ConfigError: neither a number nor one 0 or 1 per layer.

    >>> read_layer_pattern("moe_layer_freq", "2", num_layers=4)
    (True, False, True, False)
    >>> read_layer_pattern("moe_layer_freq", "([0] + [1]*2)*2", num_layers=6)
    (False, True, True, False, True, True)
    >>> read_layer_pattern("window_attn_skip_freq", "3", num_layers=4)
    (True, True, False, True)
    >>> read_layer_pattern("no_rope_freq", "2", num_layers=4), read_layer_pattern("no_rope_freq", "0", num_layers=2)
    ((False, True, False, True), (False, False))
    """
    row = read_table("layer_patterns")[field]
    try:
        value = _parsed(text.strip())
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        value = -1
    if isinstance(value, int) and value >= row["least"]:
        every = value or num_layers + 1
        return tuple(
            ((layer + row["offset"]) % every == 0) is row["marks_nth"]
            for layer in range(num_layers)
        )
    if isinstance(value, list) and len(value) == num_layers and {*value} <= {0, 1}:
        return tuple(map(bool, value))
    count = f", and this has {count_of(len(value), 'value')}" if isinstance(value, list) else ""
    why = f"it takes N for every Nth layer, or {row['values']} for each of {count_of(num_layers, 'layer')}{count}"
    raise ConfigError(f"{field} is {text!r}", why=why, fix=row["fix"].format(others=num_layers - 1))


HYBRID_LETTERS = "*+MG-E"


def read_hybrid_pattern(text: str) -> str:
    """The letter of every layer of the model, without the borders of pipeline stages.

    Raises:
        ConfigError: a letter of no kind of layer.

    >>> read_hybrid_pattern("G-*-|G-*E/*E")
    'G-*-G-*E'
    """
    letters = text.partition("/")[0].replace("|", "")
    if unknown := [letter for letter in dict.fromkeys(letters) if letter not in HYBRID_LETTERS]:
        known = f"the letters are {' '.join(HYBRID_LETTERS)}, | between stages and / before multi-token prediction"
        why = f"{' '.join(unknown)} is no kind of layer; {known}"
        raise ConfigError(f"hybrid_layer_pattern is {text!r}", why=why, fix="change it")
    return letters


def read_mtp_patterns(text: str) -> list[str]:
    """The letters of every layer of multi-token prediction, which begin with a /: its attention and
    its MLP.

    Raises:
        ConfigError: other letters, letters that no layer of the model has, or layers that differ.

    >>> read_mtp_patterns("G-*E/*E/*E"), read_mtp_patterns("G-*E")
    (['*E', '*E'], [])
    """
    model, *layers = text.split("/")
    is_known = all(
        re.fullmatch(r"[*+MG][-E]", letters) and {*letters} <= {*model} for letters in layers
    )
    if len({*layers}) > 1 or not is_known:
        why = "after each / are a letter of attention and one of an MLP that the model has, the same everywhere"
        fix = "write /*E or the like once per layer of multi-token prediction, or leave / out"
        raise ConfigError(f"hybrid_layer_pattern is {text!r}", why=why, fix=fix)
    return layers


@cache
def _parsed(text: str) -> Any:
    with PARSING:
        return read_node(ast.parse(text, mode="eval").body)


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def read_node(node: ast.expr) -> Any:
    """The value of a number or a list of numbers, of their sums, and of a list or number times a
    number.
    """
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=nodes) if all(isinstance(entry, ast.Constant) for entry in nodes):
            return [read_node(entry) for entry in nodes]
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            first, second = read_node(left), read_node(right)
            length = math.prod(
                len(value) if isinstance(value, list) else abs(value) for value in (first, second)
            )
            if length <= LONGEST_PATTERN or not isinstance(sign, ast.Mult):
                return OPERATORS[type(sign)](first, second)
    raise ValueError("not a pattern")


def write_pattern(layers: tuple[bool, ...]) -> str:
    """The shortest pattern: `1` for all layers, else run lengths.

    >>> write_pattern((True, True)), write_pattern((False, False, True, True, False))
    ('1', '[0]*2+[1]*2+[0]')
    """
    if all(layers):
        return "1"
    runs = ((int(kind), len(list(run))) for kind, run in groupby(layers))
    return "+".join(f"[{kind}]*{length}" if length > 1 else f"[{kind}]" for kind, length in runs)


LAYOUT_FLAG = "--pipeline-model-parallel-layout"
# letters of an expanded layout, so that a slip such as t*999999999 is an error and no hang
LONGEST_LAYOUT = 100_000
LAYOUT_FIX = (
    "write E, then t for every layer, then L, with | before every further stage, as Ett|tt|ttL"
)


def read_pipeline_layout(text: str) -> tuple[int, ...]:
    """The number of layers of every stage; only the first and the last one may have none.

    Raises:
        ConfigError: other letters, or the embedding, the loss or layers in the wrong place.

    >>> read_pipeline_layout("Et*3|(tt|)*2,t|L")
    (3, 2, 2, 1, 0)
    """
    stages = _expand_layout(text).split("|")
    joined = "".join(stages)
    if sum("m" in stage for stage in stages) > 1:
        why = "the layers of multi-token prediction, m, are on one stage"
        raise ConfigError(
            f"{LAYOUT_FLAG} is {text!r}",
            why=why,
            fix="write all m right before L, as Ett|tt|ttm*2L",
        )
    if not re.fullmatch(r"Et*m*L", joined) or stages[0][:1] != "E" or stages[-1][-1:] != "L":
        why = "the embedding E is first, the loss L is last, and there are layers t between"
        raise ConfigError(f"{LAYOUT_FLAG} is {text!r}", why=why, fix=LAYOUT_FIX)
    lengths = tuple(stage.count("t") for stage in stages)
    if not all(stages[1:-1]) or sum(lengths) == 0:
        why = "every stage between the first and the last has layers"
        raise ConfigError(f"{LAYOUT_FLAG} is {text!r}", why=why, fix=LAYOUT_FIX)
    return lengths


def count_mtp_layers(text: str) -> int | None:
    """The layers of multi-token prediction in a layout; None where it names none.

    >>> count_mtp_layers("Et|tm*2L"), count_mtp_layers("Et|tL")
    (2, None)
    """
    return _expand_layout(text).count("m") or None


def moves_mtp_layers(text: str) -> bool:
    """Whether a layout has layers of multi-token prediction before the last stage, which runs them
    here.

    >>> moves_mtp_layers("Et|t|m|L"), moves_mtp_layers("Et|t|mL")
    (True, False)
    """
    return "m" in _expand_layout(text).rpartition("|")[0]


def write_pipeline_layout(lengths: Sequence[int]) -> str:
    """The layout of stages with these numbers of layers.

    >>> write_pipeline_layout((3, 2, 2, 0))
    'Et*3|t*2|t*2|L'
    """
    stages = "|".join("t" * length for length in lengths)
    runs = ((letter, len(list(run))) for letter, run in groupby(f"E{stages}L"))
    return "".join(letter if count == 1 else f"{letter}*{count}" for letter, count in runs)


def _expand_layout(text: str) -> str:
    """The layout with all repetitions written out."""

    def repeat(match: re.Match[str]) -> str:
        count = int(match[2] or 1)
        if len(match[1]) * count > LONGEST_LAYOUT:
            why = f"it has more than {LONGEST_LAYOUT} letters"
            raise ConfigError(f"{LAYOUT_FLAG} is {text!r}", why=why, fix=LAYOUT_FIX)
        return match[1] * count

    expanded = re.sub(r"([A-Za-z|])\*(\d{1,9})", repeat, re.sub(r"[\s,]", "", text))
    while (inner := re.sub(r"\(([A-Za-z|]*)\)(?:\*(\d{1,9}))?", repeat, expanded)) != expanded:
        expanded = inner
    if other := re.search(r"[^EtmL|]", expanded):
        why = f"{other[0]!r} is not one of E, t, L, |, (...), * and a number"
        raise ConfigError(f"{LAYOUT_FLAG} is {text!r}", why=why, fix=LAYOUT_FIX)
    return expanded


_NAMED = re.compile(r"([A-Za-z0-9_.-]{1,64})=(.+)")
_COUNT = r"(?:\d+(?:\.\d*)?|\.\d+)[KMBTkmbt]?"
_STAGE = re.compile(
    rf"(?P<name>[\w.-]+)@(?P<start>{_COUNT})(\.\.(?P<end>{_COUNT}))?(?P<unit>samples)?:\s*(?P<blend>\S.*)",
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
    matches = [_NAMED.fullmatch(entry) for entry in entries]
    named = {match[1]: expanded(match[2], may_be_address=True) for match in matches if match}
    if named and len(named) < len(entries):
        why = f"of {len(entries)} entries {len(named)} have a name of their own"
        fix = "write NAME=PATH for each, with different names"
        raise ConfigError(f"{' '.join(entries)} are not all NAME=PATH", why=why, fix=fix)
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
    stages, mistakes = [], []
    for text in texts:
        match = _STAGE.fullmatch(text.strip())
        start = None if match is None else read_number(match["start"])
        end = read_number(match["end"]) if match is not None and match["end"] else None
        if match is None or start is None or (match["end"] and end is None):
            mistakes.append(f"{text!r} is not NAME@START: BLEND")
            continue
        stages.append(
            DataStage(match["name"], start, match["unit"] is not None, match["blend"].strip(), end)
        )
    if not mistakes and stages:
        mistakes = _stage_mistakes(stages, train_iters)
    if mistakes:
        why = "stages have different names, and starts in one unit that ascend from 0 and lie inside the run"
        raise ConfigError(
            f"data.stages: {'; '.join(mistakes)}",
            why=why,
            fix=f"write --data-stages {STAGES_EXAMPLE}",
        )
    return tuple(stages)


def stage_bounds(
    stages: Sequence[DataStage], samples_of_steps: Callable[[int], int]
) -> tuple[tuple[int, int | None], ...]:
    """The first sample of every stage, and the first that has its full weights where these change
    linearly.

    `samples_of_steps` returns the number of samples in the first steps.
    """

    def in_samples(stage: DataStage, place: int) -> int:
        return place if stage.in_samples else samples_of_steps(place)

    return tuple(
        (
            in_samples(stage, stage.start),
            None if stage.end is None else in_samples(stage, stage.end),
        )
        for stage in stages
    )


def _stage_mistakes(stages: Sequence[DataStage], train_iters: int | None) -> list[str]:
    counts = Counter(stage.name for stage in stages)
    mistakes = [
        f"{name} is the name of {count} stages" for name, count in counts.items() if count > 1
    ]
    if stages[0].start != 0:
        mistakes.append(f"the first stage, {stages[0].name}, starts at {stages[0].start}")
    if len({stage.in_samples for stage in stages[1:]}) > 1:
        mistakes.append("some stages start at steps and some at samples")
    else:
        for before, after in zip(stages, stages[1:], strict=False):
            if after.start <= before.start:
                mistakes.append(
                    f"{after.name} starts at {after.start}, not after {before.name} at {before.start}"
                )
            elif before.end is not None and before.end > after.start:
                mistakes.append(
                    f"{before.name} changes until {before.end}, after {after.name} starts at {after.start}"
                )
    if stages[0].end is not None:
        mistakes.append(f"the first stage, {stages[0].name}, has none before it to change from")
    mistakes += [
        f"{stage.name} changes from {stage.start} to {stage.end}, which is not later"
        for stage in stages[1:]
        if stage.end is not None and stage.end <= stage.start
    ]
    for stage in stages[1:]:
        if train_iters is not None and not stage.in_samples and stage.start >= train_iters:
            mistakes.append(
                f"{stage.name} starts at step {stage.start} of a run of {count_of(train_iters, 'step')}"
            )
    return mistakes


def read_number(text: str) -> int | None:
    """A number with an optional suffix; None if the text is not a number.

    >>> read_number("1.5K"), read_number("x")
    (1500, None)
    """
    suffix = text[-1:].upper()
    try:
        number = int(float(text[:-1] if suffix in SUFFIXES else text) * SUFFIXES.get(suffix, 1))
    except (ValueError, OverflowError):
        return None
    return number if number >= 0 else None
