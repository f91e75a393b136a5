"""Flags with their values, and conditions over them.

read_arguments(words)    words of a command line -> arguments
FlagValues               the values of flags, the last occurrence of each
Condition, Condition.of  a condition over one flag, from a row of a table
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Argument:
    """A flag with its values."""

    flag: str
    values: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The argument as it is written."""
        return " ".join([self.flag, *self.values])

    @property
    def words(self) -> list[str]:
        """The words of the argument."""
        return [self.flag, *self.values]


def read_arguments(words: Sequence[str]) -> tuple[list[Argument], list[str]]:
    """The flags of a command line with their values, and the words before the first flag.

    >>> read_arguments(["run", "--lr=1", "--betas", "0.9", "0.95"])[0][1].values
    ('0.9', '0.95')
    """
    arguments: list[Argument] = []
    before: list[str] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            flag, has_value, value = word.partition("=")
            arguments.append(Argument(flag, (value,) if has_value else ()))
        elif arguments:
            last = arguments[-1]
            arguments[-1] = Argument(last.flag, (*last.values, word))
        else:
            before.append(word)
    return arguments, before


@dataclass(frozen=True)
class FlagValues:
    """The arguments of a command line by flag; a later argument replaces one of the same flag."""

    by_flag: Mapping[str, Argument]

    @classmethod
    def of(cls, arguments: Iterable[Argument]) -> "FlagValues":
        """The values of a command line."""
        return cls({argument.flag: argument for argument in arguments})

    def text(self, flag: str) -> str | None:
        """The values of a flag as one text, empty for a switch; None where it is not set."""
        argument = self.by_flag.get(flag)
        return None if argument is None else " ".join(argument.values)

    def number(self, flag: str, default: float) -> float:
        """The value of a flag as a number."""
        text = self.text(flag)
        number = None if text is None else number_of(text)
        return default if number is None else number

    def size(self, flag: str) -> int:
        """The size of a group; 1 if the flag is not set or its value is no positive number."""
        return max(1, int(self.number(flag, 1)))


def number_of(text: str) -> float | None:
    """A text as a finite number; None for other texts.

    >>> number_of("1e-2"), number_of("nan"), number_of("a")
    (0.01, None, None)
    """
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < 1e18 else None


@dataclass(frozen=True)
class Condition:
    """A condition over one flag: that it is set, with a value if one is named."""

    flag: str
    above: float | None = None  # the value is a larger number
    one_of: tuple[str, ...] = ()  # the value is one of these texts or numbers
    contains: str = ""  # the value has this text in it
    differs_from: str = ""  # the value of this flag is another one; 1 where that is not set
    not_divisible_by: str = ""  # the value of this flag does not divide it
    below: str = ""  # the value of this flag is larger
    default: str | None = None  # value of a flag that is not set
    alternatives: tuple["Condition", ...] = field(default=())  # in place of the rest: one holds

    @classmethod
    def of(cls, row: str | Mapping[str, Any]) -> "Condition":
        """A condition from a table: a flag, a mapping of the fields, or `any` with a list."""
        if isinstance(row, str):
            return cls(row)
        if "any" in row:
            return cls("", alternatives=tuple(cls.of(option) for option in row["any"]))
        fields = dict(row)
        fields["one_of"] = tuple(str(value) for value in fields.get("one_of", ()))
        return cls(**fields)

    def evidence(self, values: FlagValues) -> str:
        """The arguments with which it holds; empty where it does not."""
        for condition in self.alternatives:
            found = condition.evidence(values)
            if found:
                return found
        if self.alternatives:
            return ""
        text = values.text(self.flag)
        if text is None and self.default is None:
            return ""
        value = self.default if text is None else text
        if not self.accepts(value or "", values):
            return ""
        if text is None:
            return f"{self.flag} {self.default} by default"
        return " ".join([f"{self.flag} {text}".strip(), *self.compared(values)])

    def compared(self, values: FlagValues) -> list[str]:
        """The argument that the value is compared with, where it is set."""
        other = self.differs_from or self.not_divisible_by or self.below
        argument = values.by_flag.get(other)
        return [] if argument is None else [f"with {argument.text}"]

    def accepts(self, value: str, values: FlagValues) -> bool:
        """Whether the condition holds for a value of its flag."""
        number = number_of(value)
        if self.above is not None:
            return number is not None and number > self.above
        if self.one_of:
            return any(is_same(value, other) for other in self.one_of)
        if self.differs_from:
            return not is_same(value, values.text(self.differs_from) or "1")
        if self.not_divisible_by:
            return number is not None and number % values.size(self.not_divisible_by) != 0
        if self.below:
            return number is not None and number < values.number(self.below, 0)
        return self.contains in value

    def __str__(self) -> str:
        """The condition in words of a command line."""
        if self.alternatives:
            return " or ".join(map(str, self.alternatives))
        if self.above is not None:
            return f"{self.flag} above {self.above:g}"
        if self.one_of:
            return f"{self.flag} {'|'.join(self.one_of)}"
        if self.not_divisible_by:
            return f"{self.flag} that {self.not_divisible_by} does not divide"
        comparisons = {
            "other than": self.differs_from,
            "below": self.below,
            "with": self.contains,
        }
        for words, other in comparisons.items():
            if other:
                return f"{self.flag} {words} {other}"
        return self.flag


def is_same(left: str, right: str) -> bool:
    """Whether two values are the same number or text.

    >>> is_same("0.0", "0"), is_same("a", "b")
    (True, False)
    """
    left_number = number_of(left)
    if left_number is None:
        return left == right
    return left_number == number_of(right)
