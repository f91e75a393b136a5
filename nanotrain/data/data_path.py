"""Parse `--data-path`, prefixes of token files with or without weights, and `--split`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from pathlib import Path

from nanotrain.data.token_format import idx_path, prefix_of
from nanotrain.errors import ConfigError
from nanotrain.paths import Address, path_or_address

_NUMBER = re.compile(
    r"[+-]?(\d{1,30}(\.\d{0,30})?|\.\d{1,30})(e[+-]?\d{1,2})?|\d{1,30}/0*[1-9]\d{0,29}",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class WeightedPrefix:
    """One corpus of a blend."""

    prefix: Path  # path of the `.bin/.idx` pair without its endings
    weight: Fraction | None = None  # its weight; None to blend by size


def parse_data_path(entries: Sequence[str]) -> tuple[WeightedPrefix, ...]:
    """Parse a `--data-path`: "a b" blends by size, "0.7 a 0.3 b" by weight.

    Raises:
        ConfigError: weights for some prefixes only, or a weight that is not above 0.

    >>> parse_data_path(["0.7", "a", "0.3", "b"])[1].weight
    Fraction(3, 10)
    """
    items = _split_entries(entries)
    numbers = [_weight(item) for item in items]
    if all(number is None for number in numbers):
        return tuple(WeightedPrefix(_prefix(item)) for item in items)
    if not _are_pairs(numbers):
        raise ConfigError(
            f"--data-path {' '.join(items)} cannot be parsed",
            why="either every prefix has a weight above 0 before it, or none has",
            fix="write for example --data-path 0.7 web 0.3 code",
        )
    pairs = zip(items[1::2], numbers[::2], strict=True)
    return tuple(WeightedPrefix(_prefix(name), weight) for name, weight in pairs)


def _are_pairs(numbers: Sequence[Fraction | None]) -> bool:
    """Whether items are pairs of a weight above 0 and a name, which is no number."""
    if len(numbers) % 2:
        return False
    has_weights = all(weight is not None and weight > 0 for weight in numbers[::2])
    return has_weights and all(name is None for name in numbers[1::2])


def _split_entries(entries: Sequence[str]) -> list[str]:
    """Split entries at blanks, unless one names a corpus."""
    items = []
    for entry in map(str, entries):
        items += [entry] if _is_prefix(entry) else entry.split()
    return items


def _weight(item: str) -> Fraction | None:
    if _NUMBER.fullmatch(item) and not _is_prefix(item):
        return Fraction(item)
    return None


def _is_prefix(item: str) -> bool:
    """Whether an entry names a corpus, which may contain blanks or look like a number."""
    prefix = _prefix(item)
    return isinstance(prefix, Address) or idx_path(prefix).exists()


def _prefix(item: str) -> Path:
    path = path_or_address(prefix_of(item))
    return path if path.name else path.resolve()  # "." is a folder, which has a name


def parse_split(split: str) -> tuple[float, float, float]:
    """Parse up to three numbers ("969,30,1", "99,1") into proportions that sum to 1.

    Missing numbers are 0.

    Raises:
        ConfigError: no numbers, more than three, a negative one, or all zero.

    >>> parse_split("3,1")
    (0.75, 0.25, 0.0)
    """
    try:
        parts = [float(part) for part in split.replace("/", ",").split(",")]
    except ValueError:
        parts = []
    total = sum(parts)
    is_positive = all(part >= 0 for part in parts) and 0 < total < float("inf")
    if len(parts) > 3 or not is_positive:
        raise ConfigError(
            f"--split {split} cannot be parsed",
            why="it takes up to three proportions of at least 0, not all 0",
            fix="write for example --split 969,30,1, or 1,0,0 to train on everything",
        )
    train, valid, test = (parts + [0.0, 0.0])[:3]
    total = train + valid + test
    return train / total, valid / total, test / total


def split_documents(num_documents: int, split: str) -> tuple[range, range, range]:
    """Document ranges of training, validation and test: consecutive, with Megatron-LM's rounding.

    >>> split_documents(1000, "969,30,1")[1]
    range(969, 999)
    """
    first, second, last = [round(share * num_documents) for share in accumulate(parse_split(split))]
    return range(first), range(first, second), range(second, last)
