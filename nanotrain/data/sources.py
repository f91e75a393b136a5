"""What `--data-path` names: token file prefixes with their weights, and the tokenizer that made them.

`PREFIX.nanotrain.json` beside a prepared pair records how it was made; the tokenizer it names is a word ("bytes") or a
folder beside it.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

from nanotrain.data.token_format import idx_path
from nanotrain.errors import ConfigError, DataError


@dataclass(frozen=True)
class Source:
    """One corpus of a blend.

    Args:
        prefix: path of the `.bin/.idx` pair without its endings.
        weight: its share; None to blend by size.
    """

    prefix: Path
    weight: Fraction | None = None


def parse_data_path(entries: Sequence[str]) -> tuple[Source, ...]:
    """Read a `--data-path`: "a b" blends by size, "0.7 a 0.3 b" by weight.

    Raises:
        ConfigError: weights for some prefixes only, or a weight that is not above 0.

    >>> parse_data_path(["0.7", "a", "0.3", "b"])[1].weight
    Fraction(3, 10)
    """
    words = [word for entry in entries for word in str(entry).split()]
    weights = [_weight(word) for word in words]
    if all(weight is None for weight in weights):
        return tuple(Source(_prefix(word)) for word in words)
    numbers, names = weights[::2], words[1::2]
    if len(numbers) != len(names) or None in numbers or any(weight is not None for weight in weights[1::2]):
        raise ConfigError(
            f"--data-path {' '.join(words)} cannot be read",
            why="a weight stands before every prefix or before none",
            fix="write for example --data-path 0.7 web 0.3 code",
        )
    for weight, name in zip(numbers, names, strict=True):
        if weight is None or weight <= 0:
            raise ConfigError(
                f"--data-path gives {name} the weight {weight}", why="weights are above 0", fix="leave that corpus out"
            )
    return tuple(Source(_prefix(name), weight) for weight, name in zip(numbers, names, strict=True))


@dataclass(frozen=True)
class Record:
    """How a pair was made, kept beside it in `PREFIX.nanotrain.json` (`PREFIX.json` may well be its input).

    Args:
        tokenizer: a word ("bytes") or the name of a folder beside the pair; None where nobody knows.
        vocab_size: one more than the largest id of that tokenizer.
        eod: the token that ends documents.
        documents: how many.
        tokens: how many.
        plan: hash of inputs and options.
    """

    tokenizer: str | None = None
    vocab_size: int = 0
    eod: int | None = None
    documents: int = 0
    tokens: int = 0
    plan: str = ""


def record_path(prefix: Path) -> Path:
    """The file beside a pair that says how it was made."""
    return prefix.with_name(prefix.name + ".nanotrain.json")


def tokenizer_path(prefix: Path) -> Path:
    """The folder beside a pair that holds the tokenizer."""
    return prefix.with_name(prefix.name + ".tokenizer")


def read_record(prefix: Path) -> Record:
    """The record of a pair; an empty one where there is none, as beside Megatron-LM's own files."""
    path = record_path(prefix)
    if not path.is_file():
        return Record()
    try:
        return Record(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path} cannot be read",
            why=str(error),
            fix="remove it and name the tokenizer with --tokenizer-model, or prepare the corpus again",
        ) from None


def write_record(prefix: Path, record: Record) -> None:
    """Leave a record beside a pair."""
    partial = record_path(prefix).with_suffix(".partial")
    partial.write_text(json.dumps(asdict(record), indent=2) + "\n")
    os.replace(partial, record_path(prefix))


def tokenizer_beside(prefix: Path | str) -> str | None:
    """The tokenizer a prepared corpus was made with, in a form `load_tokenizer` takes; None where nobody knows."""
    named = read_record(Path(prefix)).tokenizer
    beside = tokenizer_path(Path(prefix))
    return str(beside) if named == beside.name else named


def _weight(word: str) -> Fraction | None:
    if idx_path(_prefix(word)).exists():
        return None
    try:
        return Fraction(word)
    except (ValueError, ZeroDivisionError):
        return None


def _prefix(word: str) -> Path:
    return Path(word[:-4] if word.endswith((".bin", ".idx")) else word).expanduser()
