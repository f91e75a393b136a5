"""What `--data-path` names: token file prefixes with their weights, and the tokenizer that made them.

`PREFIX.json` beside a prepared pair records how it was made; the tokenizer it names is a word ("bytes") or a
folder beside it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from nanotrain.data.token_format import idx_path
from nanotrain.errors import ConfigError


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


def record_path(prefix: Path) -> Path:
    """The file beside a pair that says how it was made."""
    return prefix.with_name(prefix.name + ".json")


def tokenizer_beside(prefix: Path | str) -> str | None:
    """The tokenizer a prepared corpus was made with, in a form `load_tokenizer` takes; None where nobody knows."""
    record = record_path(Path(prefix))
    if not record.is_file():
        return None
    named = json.loads(record.read_text()).get("tokenizer")
    if named is None:
        return None
    beside = record.with_name(named)
    return str(beside) if beside.exists() else named


def _weight(word: str) -> Fraction | None:
    if idx_path(_prefix(word)).exists():
        return None
    try:
        return Fraction(word)
    except (ValueError, ZeroDivisionError):
        return None


def _prefix(word: str) -> Path:
    return Path(word[:-4] if word.endswith((".bin", ".idx")) else word).expanduser()
