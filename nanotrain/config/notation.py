"""Settings that are texts with a form of their own: patterns of layers, layouts, numbers.

    patterns of layers     --moe-layer-freq [0]*3+[1]*58: a frequency, or one 0 or 1 per layer
                           --hybrid-layer-pattern G-*-|G-*E: one letter per layer
    pipeline layouts       --pipeline-model-parallel-layout Et*3|(tt|)*29,t|L
    numbers                250B, as in schedules and stages of the data

A pattern is a Python expression (lists of 0 and 1, `+`, and `*` by a number, which may be a sum).
It is parsed, never evaluated.

In a layout E is the embedding, t a transformer layer, m a layer of multi-token prediction, L the
head with the loss, `|` begins the next stage. `x*3` repeats a letter and `(...)*3` a part; commas
and spaces separate only. The syntax is that of Megatron-LM. Layers of multi-token prediction always
run on the last stage, with the head: m may be left out. A stage before it that has only m, as
Megatron-LM allows, has no layers and passes hidden states on.
"""

import ast
import operator
import re
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from threading import Lock
from typing import Any

from nanotrain.config.tables import read_table
from nanotrain.errors import ConfigError
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
    >>> read_layer_pattern("no_rope_freq", "2", num_layers=4)
    (False, True, False, True)
    >>> read_layer_pattern("no_rope_freq", "0", num_layers=2)
    (False, False)
    """
    row = read_table("layer_patterns")[field]
    value = parse_pattern(text.strip())
    if isinstance(value, int) and value >= row["least"]:
        every = value or num_layers + 1
        marks_nth = row["marks_nth"]
        return tuple(
            ((layer + row["offset"]) % every == 0) is marks_nth for layer in range(num_layers)
        )
    if isinstance(value, list) and len(value) == num_layers and {*value} <= {0, 1}:
        return tuple(bool(item) for item in value)
    layers = count_of(num_layers, "layer")
    number = f", and this has {count_of(len(value), 'value')}" if isinstance(value, list) else ""
    raise ConfigError(
        f"{field} is {text!r}",
        why=f"it takes N for every Nth layer, or {row['values']} for each of {layers}{number}",
        fix=row["fix"].format(others=num_layers - 1),
    )


HYBRID_LETTERS = "*+MG-E"


def read_hybrid_pattern(text: str) -> str:
    """The letter of every layer of the model, without the borders of pipeline stages.

    Raises:
        ConfigError: a letter of no kind of layer.

    >>> read_hybrid_pattern("G-*-|G-*E/*E")
    'G-*-G-*E'
    """
    letters = text.partition("/")[0].replace("|", "")
    unknown = [letter for letter in dict.fromkeys(letters) if letter not in HYBRID_LETTERS]
    if unknown:
        raise ConfigError(
            f"hybrid_layer_pattern is {text!r}",
            why=f"{' '.join(unknown)} is no kind of layer; the letters are "
            f"{' '.join(HYBRID_LETTERS)}, | between stages and / before multi-token prediction",
            fix="change it",
        )
    return letters


# kinds of token mixers by their letters in compressed_layer_pattern
COMPRESSED_LETTERS = {"W": "sliding", "C": "csa", "H": "hca"}


def read_compressed_pattern(text: str | None, *, num_layers: int) -> str:
    """The letter of every layer of compressed attention; a pattern is repeated.

    Raises:
        ConfigError: another letter, or layers that no whole number of patterns has.

    >>> read_compressed_pattern("WCH", num_layers=6), read_compressed_pattern(None, num_layers=5)
    ('WCHWCH', 'HHHCH')
    """
    if text is None:
        turns = "HC" * num_layers
        return f"HH{turns}"[:num_layers]
    unknown = [letter for letter in text if letter not in COMPRESSED_LETTERS]
    if unknown or not text or num_layers % len(text) != 0:
        raise ConfigError(
            f"compressed_layer_pattern is {text!r}",
            why=f"it has letters W, C and H for {count_of(num_layers, 'layer')}, or for fewer that "
            f"are repeated, and this has {count_of(len(text), 'letter')}",
            fix="leave --compressed-layer-pattern out, or change it",
        )
    return text * (num_layers // len(text))


def read_mtp_patterns(text: str) -> list[str]:
    """The letters of every layer of multi-token prediction: its attention and its MLP.

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
        raise ConfigError(
            f"hybrid_layer_pattern is {text!r}",
            why="after each / are a letter of attention and one of an MLP that the model has, the "
            "same everywhere",
            fix="write /*E or the like once per layer of multi-token prediction, or leave / out",
        )
    return layers


@cache
def parse_pattern(text: str) -> Any:
    """The number or list of a pattern, which is parsed and never evaluated; None for other text."""
    try:
        with PARSING:
            return read_node(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return None


OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def read_node(node: ast.expr) -> Any:
    """The value of numbers, lists of numbers, sums, and products with a number."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=nodes) if all(isinstance(entry, ast.Constant) for entry in nodes):
            return [read_node(entry) for entry in nodes]
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            first = read_node(left)
            second = read_node(right)
            is_product = isinstance(sign, ast.Mult)
            if not is_product or length_of(first) * length_of(second) <= LONGEST_PATTERN:
                return OPERATORS[type(sign)](first, second)
    raise ValueError("not a pattern")


def length_of(value: Any) -> int:
    """The items of a list, or the size of a number."""
    return len(value) if isinstance(value, list) else abs(value)


def write_pattern(layers: tuple[bool, ...]) -> str:
    """The shortest pattern: `1` for all layers, else run lengths.

    >>> write_pattern((True, True)), write_pattern((False, False, True, True, False))
    ('1', '[0]*2+[1]*2+[0]')
    """
    if all(layers):
        return "1"
    parts = []
    for kind, run in groupby(layers):
        length = len(list(run))
        item = f"[{int(kind)}]"
        parts.append(f"{item}*{length}" if length > 1 else item)
    return "+".join(parts)


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
    stages = expand_layout(text).split("|")
    joined = "".join(stages)
    if sum("m" in stage for stage in stages) > 1:
        raise ConfigError(
            f"{LAYOUT_FLAG} is {text!r}",
            why="the layers of multi-token prediction, m, are on one stage",
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
    return expand_layout(text).count("m") or None


def moves_mtp_layers(text: str) -> bool:
    """Whether a layout has layers of multi-token prediction before the last stage.

    Here the last stage runs them.

    >>> moves_mtp_layers("Et|t|m|L"), moves_mtp_layers("Et|t|mL")
    (True, False)
    """
    return "m" in expand_layout(text).rpartition("|")[0]


def write_pipeline_layout(lengths: Sequence[int]) -> str:
    """The layout of stages with these numbers of layers.

    >>> write_pipeline_layout((3, 2, 2, 0))
    'Et*3|t*2|t*2|L'
    """
    stages = "|".join("t" * length for length in lengths)
    parts = []
    for letter, run in groupby(f"E{stages}L"):
        count = len(list(run))
        parts.append(letter if count == 1 else f"{letter}*{count}")
    return "".join(parts)


def expand_layout(text: str) -> str:
    """The layout with all repetitions written out."""

    def repeat(match: re.Match[str]) -> str:
        """The letters of a match, repeated."""
        count = int(match[2] or 1)
        if len(match[1]) * count > LONGEST_LAYOUT:
            why = f"it has more than {LONGEST_LAYOUT} letters"
            raise ConfigError(f"{LAYOUT_FLAG} is {text!r}", why=why, fix=LAYOUT_FIX)
        return match[1] * count

    letters = re.sub(r"([A-Za-z|])\*(\d{1,9})", repeat, re.sub(r"[\s,]", "", text))
    has_parts = True
    while has_parts:  # the innermost (...) first
        letters, count = re.subn(r"\(([A-Za-z|]*)\)(?:\*(\d{1,9}))?", repeat, letters)
        has_parts = count > 0
    unknown = re.search(r"[^EtmL|]", letters)
    if unknown:
        why = f"{unknown[0]!r} is not one of E, t, L, |, (...), * and a number"
        raise ConfigError(f"{LAYOUT_FLAG} is {text!r}", why=why, fix=LAYOUT_FIX)
    return letters


def read_number(text: str) -> int | None:
    """A number with an optional suffix; None if the text is not a number.

    >>> read_number("1.5K"), read_number("x")
    (1500, None)
    """
    factor = SUFFIXES.get(text[-1:].upper(), 1)
    digits = text if factor == 1 else text[:-1]
    try:
        number = int(float(digits) * factor)
    except (ValueError, OverflowError):
        return None
    return number if number >= 0 else None
