"""Tests of shell scripts: `[ ]`, `[[ ]]` and `test`, over texts and numbers.

truth_of    True, False, or None for what is not known, such as whether a file exists
combined    two of them with && or ||
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from nanotrain.audit.shell_values import COMMAND, MARK

MAX_WORDS = 100
MAX_TEXT = 1_000  # characters of a comparison
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "-eq": lambda left, right: left == right,
    "-ne": lambda left, right: left != right,
    "-gt": lambda left, right: left > right,
    "-ge": lambda left, right: left >= right,
    "-lt": lambda left, right: left < right,
    "-le": lambda left, right: left <= right,
}


def combined(left: bool | None, right: bool | None, *, operator: str) -> bool | None:
    """The truth of two conditions with && or ||; None if it is not known.

    >>> combined(None, True, operator="||"), combined(None, True, operator="&&")
    (True, None)
    """
    decides = operator == "||"
    if left is decides or right is decides:
        return decides
    return None if left is None or right is None else not decides


def truth_of(texts: Sequence[str]) -> bool | None:
    """The truth of the words in `[ ]` or `[[ ]]`; None if it is not known.

    A variable that is not set is empty. Tests of more words than MAX_WORDS are not read.
    """
    if len(texts) > MAX_WORDS:
        return None
    for operator in ("||", "&&"):
        if operator in texts:
            index = list(texts).index(operator)
            left = truth_of(texts[:index])
            right = truth_of(texts[index + 1 :])
            return combined(left, right, operator=operator)
    if texts and texts[0] == "!":
        value = truth_of(texts[1:])
        return None if value is None else not value
    if any(COMMAND in text for text in texts):
        return None
    return simple_truth([MARK.sub("", text) for text in texts])


def simple_truth(texts: Sequence[str]) -> bool | None:
    """The truth of one test of texts or numbers; None for another test, as of a file."""
    if len(texts) == 1:
        return bool(texts[0])
    if len(texts) == 2 and texts[0] in ("-z", "-n"):
        return bool(texts[1]) == (texts[0] == "-n")
    if len(texts) != 3:
        return None
    left, operator, right = texts
    if len(left) + len(right) > MAX_TEXT:
        return None
    if operator in ("==", "=", "!="):
        return fnmatchcase(left, right) == (operator != "!=")
    return compared(left, right, comparison=operator)


def compared(left: str, right: str, *, comparison: str) -> bool | None:
    """The truth of a comparison of numbers; None for other texts."""
    if comparison not in COMPARISONS:
        return None
    try:
        return COMPARISONS[comparison](int(left), int(right))
    except ValueError:
        return None
