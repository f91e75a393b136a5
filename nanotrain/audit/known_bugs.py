"""Bugs of versions of Megatron-LM, and combinations of flags that it refuses, by tables of rows.

known_bugs, refusals     the rows
matching_bugs            the bugs of a version in a configuration
matching_refusals        the combinations that it refuses or ignores
read_version             "0.16.1", "core_v0.16.1" or "main" -> (0, 16, 1)
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nanotrain.audit.arguments import Condition, FlagValues
from nanotrain.config.tables import read_table
from nanotrain.errors import ConfigError

FOLDER = Path(__file__).parent
Version = tuple[int, ...]
VERSION = re.compile(r"(?:core_)?v?(\d{1,3})\.(\d{1,3})(?:\.(\d{1,3}))?")
MAIN = ("main", "dev", "latest")
MAX_LACKS = 3  # more conditions that are not met are not listed
ADDRESS = "https://github.com/{}"


@dataclass(frozen=True)
class Conditions:
    """Conditions that all hold, and conditions of which none holds."""

    needs: tuple[Condition, ...]
    lacks: tuple[Condition, ...]

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Conditions":
        """The conditions of a row of a table."""
        needs = tuple(Condition.of(condition) for condition in row["needs"])
        return cls(needs, tuple(Condition.of(condition) for condition in row.get("lacks", ())))

    def evidence(self, values: FlagValues) -> list[str]:
        """The arguments with which they hold; empty where they do not."""
        if any(condition.evidence(values) for condition in self.lacks):
            return []
        found = [condition.evidence(values) for condition in self.needs]
        return found if all(found) else []

    def __str__(self) -> str:
        text = ", ".join(map(str, self.needs))
        return f"{text}; not {', not '.join(map(str, self.lacks))}" if self.lacks else text


@dataclass(frozen=True)
class KnownBug:
    """A silent bug of Megatron-LM."""

    id: str
    link: str  # issue or pull request, as OWNER/REPOSITORY#NUMBER
    finding: int | None  # number within the issue
    also: tuple[str, ...]  # further issues and pull requests
    first: Version  # the first version with it; empty: the first of all, as far as is known
    fixed: Version  # the first version without it; empty: no version is known
    conditions: Conditions
    only_if: str  # what else it takes, which no flag shows; empty: nothing
    effect: str
    here: str  # what nanotrain does
    held_by: str  # test that holds it

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "KnownBug":
        """A bug from a row of the table."""
        return cls(
            id=row["id"],
            link=row["link"],
            finding=row.get("finding"),
            also=tuple(row.get("also", ())),
            first=parse_version(str(row.get("first", ""))),
            fixed=parse_version(str(row.get("fixed", ""))),
            conditions=Conditions.of(row),
            only_if=row.get("only_if", ""),
            effect=row["effect"],
            here=row["here"],
            held_by=row["held_by"],
        )

    def is_in(self, version: Version) -> bool:
        """Whether a version has the bug."""
        return self.first <= version and (not self.fixed or version < self.fixed)

    @property
    def reference(self) -> str:
        """The issue with the number of the finding."""
        return f"{self.link} finding {self.finding}" if self.finding else self.link

    @property
    def versions(self) -> str:
        """The versions that have the bug, in words."""
        if not self.first:
            return f"before {version_text(self.fixed)}" if self.fixed else "all that were read"
        first = f"since {version_text(self.first)}"
        return f"{first}, fixed in {version_text(self.fixed)}" if self.fixed else first

    @property
    def address(self) -> str:
        """The address of the issue."""
        return address_of(self.link)


@dataclass(frozen=True)
class Refusal:
    """Flags that contradict each other in Megatron-LM."""

    conditions: Conditions
    why: str
    is_ignored: bool  # one of them is ignored there; else the program ends with an error

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Refusal":
        """A combination from a row of the table."""
        return cls(Conditions.of(row), row["why"], row.get("ignored", False))


@dataclass(frozen=True)
class Match:
    """A row of a table with the arguments for which it holds."""

    row: Any  # a KnownBug or a Refusal
    evidence: tuple[str, ...]

    @property
    def since(self) -> str:
        """The arguments for which it holds, and a few missing conditions ("without ...")."""
        lacks = self.row.conditions.lacks
        missing = [f"without {condition}" for condition in lacks]
        shown = missing if len(lacks) <= MAX_LACKS else []
        return ", ".join([*dict.fromkeys(self.evidence), *shown])


@cache
def known_bugs() -> tuple[KnownBug, ...]:
    """All bugs of the table."""
    table = read_table("known_bugs", folder=FOLDER)
    return tuple(KnownBug.of(row) for row in table["bugs"])


@cache
def refusals() -> tuple[Refusal, ...]:
    """All combinations of flags that Megatron-LM refuses or ignores, from the table."""
    return tuple(Refusal.of(row) for row in read_table("refusals", folder=FOLDER))


def matching_bugs(values: FlagValues, version: Version) -> list[Match]:
    """The bugs that a version has in a configuration; first the bugs without `only_if`."""
    bugs = [bug for bug in known_bugs() if bug.is_in(version)]
    return _matches(sorted(bugs, key=lambda bug: bool(bug.only_if)), values)


def matching_refusals(values: FlagValues) -> list[Match]:
    """The combinations of flags that Megatron-LM refuses or ignores."""
    return _matches(refusals(), values)


def _matches(rows: Sequence[KnownBug] | Sequence[Refusal], values: FlagValues) -> list[Match]:
    """The rows whose conditions hold."""
    matches = []
    for row in rows:
        evidence = row.conditions.evidence(values)
        if evidence:
            matches.append(Match(row, tuple(evidence)))
    return matches


def newest_version() -> Version:
    """The newest version that the table knows."""
    return parse_version(str(_numbers()[-1]))


def newest_text() -> str:
    """The newest version that the table covers, in words."""
    text: str = read_table("known_bugs", folder=FOLDER)["newest"]
    return text


def _numbers() -> list[str]:
    """The known versions as texts, the oldest first."""
    return [str(number) for number in read_table("known_bugs", folder=FOLDER)["versions"]]


def read_version(text: str) -> Version:
    """A version of the command line.

    Raises:
        ConfigError: it is none, or one that the table does not know.
    """
    newest = newest_version()
    if text in MAIN:
        return newest
    version = parse_version(text)
    numbers = _numbers()
    if not version or version < parse_version(numbers[0]) or version[:2] > newest[:2]:
        raise ConfigError(
            f"--megatron-version is {text!r}",
            why=f"the table of bugs knows {numbers[0]} to {numbers[-1]} ({newest_text()})",
            fix=f"write a release, such as {numbers[-2]}.0, or main",
        )
    return version


def parse_version(text: str) -> Version:
    """The numbers of a version; empty for another text.

    >>> parse_version("core_v0.16.1"), parse_version("0.9"), parse_version("x")
    ((0, 16, 1), (0, 9, 0), ())
    """
    match = VERSION.fullmatch(text)
    if match is None:
        return ()
    return tuple(int(number or 0) for number in match.groups())


def version_text(version: Version) -> str:
    """A version as a text.

    >>> version_text((0, 16, 1))
    '0.16.1'
    """
    return ".".join(map(str, version))


def address_of(link: str) -> str:
    """The address of an issue or pull request.

    >>> address_of("NVIDIA/Megatron-LM#7452")
    'https://github.com/NVIDIA/Megatron-LM/issues/7452'
    """
    repository, _, number = link.partition("#")
    return ADDRESS.format(f"{repository}/issues/{number}")
