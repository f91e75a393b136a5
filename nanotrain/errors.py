"""The errors that a user can cause, each with what is wrong, why, and how to fix it.

    NanotrainError            a user error; exit code 2, printed without a traceback
    |-- ConfigError           a key, flag or value, or two that contradict each other
    |   |-- ConfigErrors      several of them, printed as a list
    |   |-- TopologyError     ranks that cannot form the requested groups
    |   `-- ScheduleError     a pipeline schedule that cannot run on the given stages
    |-- DataError             corpora, token files, tokenizers
    |-- CheckpointError       a checkpoint that is missing, damaged or of another model
    |   `-- HuggingFaceError  a Hugging Face folder that cannot be read or written
    |-- TrainingFault         training that cannot continue: steps that are not finite
    |   `-- CorruptState      replicas that differ; nothing is saved
    `-- EnvironmentFault      the machine: an unwritable folder, a missing device, a lost rank

User errors are raised at load time, on all ranks. `assert` is for internal invariants. Errors
pickle, so ranks and processes send the error itself.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Self

EXIT_CODE = 2
INTERRUPTED = 130  # 128 + SIGINT, what shells expect


class NanotrainError(Exception):
    """An error that a user can correct.

    Args:
        what: the fact, with its numbers ("8 ranks cannot form tp=4 x pp=4").
        why: the rule it breaks ("tp*cp*pp = 16 must divide the world size").
        fix: what to do ("set --pipeline-model-parallel-size 2 or run on 16 ranks").
    """

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        self.what = what
        self.why = why
        self.fix = fix
        super().__init__(what, why, fix)

    def __reduce__(self) -> tuple[Callable[..., "NanotrainError"], tuple[object, ...]]:
        return partial(type(self), why=self.why, fix=self.fix), (self.what,)

    def with_note(self, note: str) -> Self:
        """The same error with a note after the fact, as " in tiny.yaml"."""
        return type(self)(self.what + note, why=self.why, fix=self.fix)

    def __str__(self) -> str:
        reason = f": {self.why}" if self.why else ""
        cure = f"; {self.fix}" if self.fix else ""
        return f"{self.what}{reason}{cure}"


class ConfigError(NanotrainError):
    """A key, flag or value that is unknown, of the wrong type, or contradicts another."""


class ConfigErrors(ConfigError):
    """Two or more mistakes of one configuration, printed as a list."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        self.errors = tuple(errors)
        super().__init__(f"{len(self.errors)} mistakes")

    def __str__(self) -> str:
        return "\n  - ".join([f"{self.what}:", *map(str, self.errors)])

    def with_note(self, note: str) -> Self:
        """The same errors, each with the note."""
        return type(self)([error.with_note(note) for error in self.errors])

    def __reduce__(self) -> tuple[Callable[..., "ConfigErrors"], tuple[object, ...]]:
        return ConfigErrors, (self.errors,)


class ErrorCollector:
    """Collect the errors of independent checks, to raise them together.

    >>> errors = ErrorCollector()
    >>> for value in (1, 2):
    ...     with errors:
    ...         raise ConfigError(f"{value} is wrong")
    >>> [str(error) for error in errors.errors]
    ['1 is wrong', '2 is wrong']
    """

    def __init__(self) -> None:
        self.errors: list[ConfigError] = []

    def __enter__(self) -> None:
        """Begin one check."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        """Keep a ConfigError and continue after the check."""
        if isinstance(error, ConfigErrors):
            self.errors += error.errors
        elif isinstance(error, ConfigError):
            self.errors.append(error)
        return isinstance(error, ConfigError)

    def raise_errors(self, *, where: str = "") -> None:
        """Raise the collected errors: one error as it is, several as `ConfigErrors`.

        `where` is added to the fact of each, as " in tiny.yaml".
        """
        errors = [error.with_note(where) for error in self.errors]
        distinct = list({str(error): error for error in errors}.values())
        if distinct:
            raise distinct[0] if len(distinct) == 1 else ConfigErrors(distinct)


class TopologyError(ConfigError):
    """Ranks that cannot form the requested groups."""


class ScheduleError(ConfigError):
    """A pipeline schedule that cannot run on the given stages."""


class DataError(NanotrainError):
    """A corpus, token file or tokenizer that cannot be used."""


class CheckpointError(NanotrainError):
    """A checkpoint that is missing, damaged or of another model."""


class HuggingFaceError(CheckpointError):
    """A Hugging Face folder that cannot be read or written."""


class TrainingFault(NanotrainError):
    """Training that cannot continue, as when no step is finite. The state is sound and is saved."""


class CorruptState(TrainingFault):
    """Weights or optimizer state that must not be saved."""


class EnvironmentFault(NanotrainError):
    """A fault of the machine: an unwritable folder, a missing device, a lost rank."""


class StorageFault(EnvironmentFault):
    """A full, missing or read-only disk or bucket.

    All ranks are alive, so training can continue without the file.
    """


class LocalFault(EnvironmentFault):
    """A fault of this rank alone, printed at once.

    It does not wait for the first rank to print the same.
    """


class ReportedFault(EnvironmentFault):
    """A fault that one rank printed already; `report` does not print it again."""


def report(error: NanotrainError, *, quiet: bool = False, edit: Callable[[str], str] = str) -> int:
    """Print an error on standard error and return the exit code.

    Args:
        error: what to print.
        quiet: print nothing, for ranks other than the first: it raises the same error.
        edit: edits the text before it is printed.
    """
    if not quiet and not isinstance(error, ReportedFault):
        print(f"error: {edit(str(error))}", file=sys.stderr, flush=True)
    return EXIT_CODE
