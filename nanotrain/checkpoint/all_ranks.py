"""Run a function on all ranks: an error on any rank is raised on every rank.

A rank that stopped alone would leave the others waiting in their next collective. The gathering of results is also the
barrier between the phases of saving and loading.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from nanotrain.comm.collectives import all_gather_object
from nanotrain.comm.group import Group
from nanotrain.errors import EnvironmentFault, NanotrainError

Result = TypeVar("Result")
MAX_LISTED = 4


@dataclass(frozen=True)
class _Outcome(Generic[Result]):
    """What a rank sends the others: a result, an error that pickles, or the text of an unexpected error."""

    result: Result | None = None
    error: NanotrainError | None = None
    unexpected: str = ""


def run_on_all(group: Group, function: Callable[[], Result]) -> list[Result]:
    """Call a function on every rank of the group and return the results of all ranks, in group order.

    Every rank calls this at the same point of the program. `function` must not communicate; its result must pickle.

    Raises:
        NanotrainError: the error of the first rank that raised one, on every rank. An OSError (disk full, no
            permission) becomes an EnvironmentFault.
        RuntimeError: on the other ranks, if a rank raised any other error; that rank raises its own.
    """
    outcome, unexpected = _try(function)
    outcomes: list[_Outcome[Result]] = all_gather_object(outcome, group)
    if unexpected is not None:
        raise unexpected
    failed = {rank: one for rank, one in enumerate(outcomes) if one.error is not None or one.unexpected}
    if failed:
        raise _merge(failed, size=group.size)
    return [cast(Result, one.result) for one in outcomes]  # None only if the function returned None


def run_on_first(group: Group, function: Callable[[], Result]) -> Result:
    """Call a function on the first rank of the group and return its result, or raise its error, on every rank."""
    results = run_on_all(group, lambda: function() if group.is_first else None)
    return cast(Result, results[0])


def _try(function: Callable[[], Result]) -> tuple[_Outcome[Result], Exception | None]:
    """The outcome of a call, and its error if it is of an unexpected kind."""
    try:
        return _Outcome(function()), None
    except NanotrainError as error:
        return _Outcome(error=error), None
    except OSError as error:
        path = f" {os.fspath(error.filename)}" if isinstance(error.filename, str | os.PathLike) else ""
        fault = EnvironmentFault(
            f"the checkpoint folder{path} cannot be used",
            why=f"{error.strerror or error} (errno {error.errno})",
            fix="free some space or choose a writable folder with train.run_dir",
        )
        return _Outcome(error=fault), None
    except Exception as error:  # the other ranks must learn of any error before it is raised here
        return _Outcome(unexpected=f"{type(error).__name__}: {error}"), error


def _merge(failed: dict[int, _Outcome[Result]], *, size: int) -> Exception:
    """The error of the first failed rank, with the ranks that failed and the first error that differs."""
    texts = {rank: outcome.unexpected or str(outcome.error) for rank, outcome in failed.items()}
    first = next(iter(failed))
    note = ""
    if size > 1 and len(failed) < size:
        note = f" (on rank {', '.join(map(str, list(failed)[:MAX_LISTED]))} of {size})"
    other = next((rank for rank in failed if texts[rank] != texts[first]), None)
    if other is not None:
        error = failed[other].error
        note += f" [rank {other}: {error.what if error is not None else texts[other]}]"
    error = failed[first].error
    if error is None:
        return RuntimeError(texts[first] + note)
    return type(error)(error.what + note, why=error.why, fix=error.fix)
