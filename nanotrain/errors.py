"""The errors a user can cause, each saying what is wrong, why, and how to fix it.

    NanotrainError            every mistake we can name; exit code 2, printed without a traceback
    |-- ConfigError           a key, flag or value, or two that contradict each other
    |   |-- TopologyError     ranks that cannot form the asked-for groups
    |   `-- ScheduleError     a pipeline schedule that cannot run, or not on such stages
    |-- DataError             corpora, token files, tokenizers
    |-- CheckpointError       a checkpoint that is missing, damaged or of another model
    |   `-- HuggingFaceError  a Hugging Face folder that cannot be read or written
    `-- EnvironmentFault      the machine: an unwritable folder, a missing device, a lost rank

User mistakes raise these at load time, on every rank alike. `assert` is for our own invariants.
"""

import sys
from collections.abc import Callable, Sequence

EXIT_CODE = 2


class NanotrainError(Exception):
    """A mistake with a cure.

    Args:
        what: the fact, with its numbers ("8 ranks cannot form tp=4 x pp=4").
        why: the rule it breaks ("tp*cp*pp = 16 must divide the world size").
        fix: what to do ("set --pipeline-model-parallel-size 2 or run on 16 ranks").
    """

    def __init__(self, what: str, *, why: str = "", fix: str = "") -> None:
        self.what, self.why, self.fix = what, why, fix
        super().__init__(what, why, fix)

    def __reduce__(self) -> tuple[Callable[..., "NanotrainError"], tuple[object, ...]]:
        """Pickle the kind and the three texts: what processes and ranks send each other."""
        return _rebuild, (type(self), (self.what, self.why, self.fix))

    def __str__(self) -> str:
        reason = f": {self.why}" if self.why else ""
        cure = f"; {self.fix}" if self.fix else ""
        return f"{self.what}{reason}{cure}"


def _rebuild(kind: type[NanotrainError], texts: tuple[str, str, str]) -> NanotrainError:
    what, why, fix = texts
    return kind(what, why=why, fix=fix)


class ConfigError(NanotrainError):
    """A key, flag or value that is unknown, of the wrong type, or contradicts another."""


class ConfigErrors(ConfigError):
    """Several mistakes of one configuration, printed as a list.

    Args:
        errors: at least two.
    """

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        self.errors = tuple(errors)
        super().__init__(f"{len(self.errors)} mistakes", why="".join(f"\n  - {error}" for error in self.errors))

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
        """Keep a ConfigError and go on after the check."""
        if isinstance(error, ConfigErrors):
            self.errors += error.errors
        elif isinstance(error, ConfigError):
            self.errors.append(error)
        return isinstance(error, ConfigError)

    def raise_errors(self) -> None:
        """Raise what was collected: one error as it is, several as `ConfigErrors`."""
        distinct = list({str(error): error for error in self.errors}.values())
        if distinct:
            raise distinct[0] if len(distinct) == 1 else ConfigErrors(distinct)


class TopologyError(ConfigError):
    """Ranks that cannot form the asked-for groups."""


class ScheduleError(ConfigError):
    """A pipeline schedule that cannot run, or not on such stages."""


class DataError(NanotrainError):
    """A corpus, token file or tokenizer that cannot be used."""


class CheckpointError(NanotrainError):
    """A checkpoint that is missing, damaged or of another model."""


class HuggingFaceError(CheckpointError):
    """A Hugging Face folder that cannot be read or written."""


class EnvironmentFault(NanotrainError):
    """The machine cannot do what was asked: an unwritable folder, a missing device, a lost rank."""


def report(error: NanotrainError, *, quiet: bool = False) -> int:
    """Print an error as its one message on standard error, for entry points.

    Args:
        error: the mistake.
        quiet: print nothing, on a rank that is not the first and whose mistake the first one has made alike.

    Returns:
        The exit code.
    """
    if not quiet:
        print(f"error: {error}", file=sys.stderr, flush=True)
    return EXIT_CODE
