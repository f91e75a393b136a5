"""The pipeline layout `Et*3|(tt|)*29,t|L` as text: `read_pipeline_layout`, `write_pipeline_layout`.

E is the embedding, t a transformer layer, m a layer of multi-token prediction, L the head with the loss, `|` begins the
next stage. `x*3` repeats a letter and `(...)*3` a part; commas and spaces separate only. The syntax is that of
Megatron-LM. Layers of multi-token prediction always run on the last stage, with the head: m may be left out. A stage
before it that has only m, as Megatron-LM allows, has no layers and passes hidden states on.
"""

import re
from collections.abc import Sequence
from itertools import groupby

from nanotrain.errors import ConfigError

FLAG = "--pipeline-model-parallel-layout"
MAX_LENGTH = 100_000  # letters of an expanded layout, so that a slip such as t*999999999 is an error and no hang
FIX = "write E, then t for every layer, then L, with | before every further stage, as Ett|tt|ttL"


def read_pipeline_layout(text: str) -> tuple[int, ...]:
    """The number of layers of every stage; only the first and the last one may have none.

    Raises:
        ConfigError: other letters, or the embedding, the loss or layers in the wrong place.

    >>> read_pipeline_layout("Et*3|(tt|)*2,t|L")
    (3, 2, 2, 1, 0)
    """
    stages = _expand(text).split("|")
    joined = "".join(stages)
    if sum("m" in stage for stage in stages) > 1:
        why = "the layers of multi-token prediction, m, are on one stage"
        raise ConfigError(f"{FLAG} is {text!r}", why=why, fix="write all m right before L, as Ett|tt|ttm*2L")
    if not re.fullmatch(r"Et*m*L", joined) or stages[0][:1] != "E" or stages[-1][-1:] != "L":
        why = "the embedding E is first, the loss L is last, and there are layers t between"
        raise ConfigError(f"{FLAG} is {text!r}", why=why, fix=FIX)
    lengths = tuple(stage.count("t") for stage in stages)
    if not all(stages[1:-1]) or sum(lengths) == 0:
        why = "every stage between the first and the last has layers"
        raise ConfigError(f"{FLAG} is {text!r}", why=why, fix=FIX)
    return lengths


def count_mtp_layers(text: str) -> int | None:
    """The layers of multi-token prediction in a layout; None where it names none.

    >>> count_mtp_layers("Et|tm*2L"), count_mtp_layers("Et|tL")
    (2, None)
    """
    return _expand(text).count("m") or None


def moves_mtp_layers(text: str) -> bool:
    """Whether a layout has layers of multi-token prediction before the last stage, which runs them here.

    >>> moves_mtp_layers("Et|t|m|L"), moves_mtp_layers("Et|t|mL")
    (True, False)
    """
    return "m" in _expand(text).rpartition("|")[0]


def write_pipeline_layout(lengths: Sequence[int]) -> str:
    """The layout of stages with these numbers of layers.

    >>> write_pipeline_layout((3, 2, 2, 0))
    'Et*3|t*2|t*2|L'
    """
    stages = "|".join("t" * length for length in lengths)
    runs = ((letter, len(list(run))) for letter, run in groupby(f"E{stages}L"))
    return "".join(letter if count == 1 else f"{letter}*{count}" for letter, count in runs)


def _expand(text: str) -> str:
    """The layout with all repetitions written out."""

    def repeat(match: re.Match[str]) -> str:
        count = int(match[2] or 1)
        if len(match[1]) * count > MAX_LENGTH:
            raise ConfigError(f"{FLAG} is {text!r}", why=f"it has more than {MAX_LENGTH} letters", fix=FIX)
        return match[1] * count

    expanded = re.sub(r"([A-Za-z|])\*(\d{1,9})", repeat, re.sub(r"[\s,]", "", text))
    while (inner := re.sub(r"\(([A-Za-z|]*)\)(?:\*(\d{1,9}))?", repeat, expanded)) != expanded:
        expanded = inner
    if other := re.search(r"[^EtmL|]", expanded):
        why = f"{other[0]!r} is not one of E, t, L, |, (...), * and a number"
        raise ConfigError(f"{FLAG} is {text!r}", why=why, fix=FIX)
    return expanded
