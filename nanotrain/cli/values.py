"""Converters of arguments: numbers with bounds, lists and names of files.

count, seed, port, world_size, processes, examples     whole numbers
tokens, positive, not_negative, probability            numbers
whole_numbers, words, png_file                         lists and names of files
without_surrogates                                     texts for a tokenizer

Paths are converted by `nanotrain.paths` and `cli/addresses.py`.
"""

import argparse
import re
import shlex
from collections.abc import Callable
from pathlib import Path

from nanotrain.paths import local_path


def number(what: str, *, low: float, high: float) -> Callable[[str], float]:
    """The converter of a number from `low` to `high`, of their type; `what` names it in errors."""

    def convert(text: str) -> float:
        """The number in a text; an error outside of the limits."""
        try:
            value = type(low)(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is no {what}")
        return value

    return convert


count = number("whole number of at least 1", low=1, high=999_999_999_999)
examples = number("whole number of at least 0 and at most 64", low=0, high=64)
seed = number("whole number of at least 0 and below 10^18", low=0, high=999_999_999_999_999_999)
port = number("port from 0 to 65535", low=0, high=65_535)  # 0: the system chooses one
# the groups of so many ranks are listed within two seconds
world_size = number("whole number of at least 1 and at most 200,000", low=1, high=200_000)
# processes on this machine
processes = number("whole number of at least 1 and at most 256", low=1, high=256)
tokens = number("number of at least 1", low=1.0, high=1e18)
positive = number("number above 0", low=1e-307, high=1e308)
not_negative = number("number of at least 0", low=0.0, high=1e308)
probability = number("probability: it is above 0 and at most 1", low=1e-307, high=1.0)


def whole_numbers(text: str) -> tuple[int, ...]:
    """Whole numbers of at least 0, separated by commas."""
    if not re.fullmatch("[0-9]{1,9}(,[0-9]{1,9})*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers such as 0,1,8")
    return tuple(int(part) for part in text.split(","))


def words(text: str) -> list[str]:
    """The words of a text, divided as a shell does."""
    try:
        return shlex.split(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid 'words' value: {text!r}") from None


def png_file(text: str) -> Path:
    """A file for a picture; the ending keeps other files from being replaced."""
    if not text.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .png")
    return local_path(text)


def without_surrogates(text: str) -> str:
    """A text without lone surrogates, which no tokenizer encodes.

    Python reads bytes that are not of the locale's encoding as such.
    """
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
