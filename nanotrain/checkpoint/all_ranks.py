"""Run a function on all ranks: an error on any rank is raised on every rank.

    run_on_all      results of any kind, gathered and merged on the first rank, then broadcast
    reduce_on_all   numbers: one reduction where no rank fails
    run_on_first    the first rank alone

A rank that stopped alone would leave the others waiting in their next collective. Each of these is
also the barrier between two phases of saving or loading.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, cast

from nanotrain.comm.collectives import all_reduce_scalars, broadcast_object, gather_object
from nanotrain.comm.group import Group
from nanotrain.errors import NanotrainError, StorageFault
from nanotrain.runs.files import disk_fault

Result = TypeVar("Result")
Final = TypeVar("Final")
MAX_LISTED = 4


@dataclass(frozen=True)
class _Outcome(Generic[Result]):
    """The message of a rank: a result, or an error that pickles."""

    result: Result | None = None
    error: NanotrainError | RuntimeError | None = None


def run_on_all(
    group: Group, function: Callable[[], Result], *, merge: Callable[[list[Result]], Final]
) -> Final:
    """Call a function on every rank, merge the results on the first rank, and return the merged
    result on all ranks.

    Only the first rank receives the results, which may be long; all receive the merged one, which
    should be short. Every rank calls this at the same point of the program. `function` and `merge`
    must not communicate; what they return must pickle.

    Raises:
        NanotrainError: the error of the first rank that raised one, on every rank. An OSError (disk
            full, no permission) becomes a StorageFault.
        RuntimeError: on the other ranks, if a rank raised any other error; that rank raises its
            own.
    """
    outcome, unexpected = _try(function)
    return _agree(group, outcome, unexpected=unexpected, merge=merge)


def reduce_on_all(
    group: Group, function: Callable[[], Sequence[float]], *, length: int = 0, op: str = "max"
) -> list[float]:
    """Call a function on every rank and reduce its `length` numbers over the ranks; the same result
    on all.

    `op` is "max" or "sum". One further number counts failed ranks; where none failed this is one
    collective.

    Raises:
        NanotrainError, RuntimeError: as `run_on_all`.
    """
    outcome, unexpected = _try(function)
    numbers = [0.0] * length if outcome.result is None else list(map(float, outcome.result))
    assert len(numbers) == length, f"{len(numbers)} numbers on this rank, {length} are reduced"
    has_failed = float(outcome.error is not None)
    failed, *reduced = all_reduce_scalars([has_failed, *numbers], group, op=op)
    if failed > 0:
        _agree(group, outcome, unexpected=unexpected, merge=lambda _: None)
    return reduced


def run_on_first(group: Group, function: Callable[[], Result]) -> Result:
    """Call a function on the first rank of the group and return its result, or raise its error, on
    every rank.
    """
    verdict, unexpected = _try(function) if group.is_first else (_Outcome[Result](), None)
    return _accept(broadcast_object(verdict, group), unexpected)


def _agree(
    group: Group,
    outcome: _Outcome[Result],
    *,
    unexpected: Exception | None,
    merge: Callable[[list[Result]], Final],
) -> Final:
    """Gather the outcomes on the first rank, and return the merged result or raise the joint error
    on all.
    """
    gathered: list[_Outcome[Result]] | None = gather_object(outcome, group)
    verdict: _Outcome[Final] = _Outcome()
    if gathered is not None:
        failed = {}
        for rank, reported in enumerate(gathered):
            if reported.error is not None:
                failed[rank] = reported.error
        if failed:
            verdict = _Outcome(error=_joint_error(failed, size=group.size))
        else:  # a result is None only if the function returned None
            results = [cast(Result, reported.result) for reported in gathered]
            verdict, unexpected = _try(lambda: merge(results))
    return _accept(broadcast_object(verdict, group), unexpected)


def _accept(verdict: _Outcome[Result], unexpected: Exception | None) -> Result:
    """The result of an outcome; raises its error."""
    error = unexpected or verdict.error
    if error is not None:
        raise error
    return cast(Result, verdict.result)


def _try(function: Callable[[], Result]) -> tuple[_Outcome[Result], Exception | None]:
    """The result of a call, and the error if the call raised one of an unexpected kind."""
    try:
        return _Outcome(function()), None
    except NanotrainError as error:
        return _Outcome(error=error), None
    except OSError as error:
        return _Outcome(error=storage_fault(error)), None
    except Exception as error:  # the other ranks must receive any error before it is raised here
        return _Outcome(error=RuntimeError(f"{type(error).__name__}: {error}")), error


def storage_fault(error: OSError) -> StorageFault:
    """The error of a failed write, with its file and the free space."""
    # a write through a descriptor names none
    is_named = isinstance(error.filename, str | os.PathLike)
    fault = disk_fault(
        error, Path(os.fspath(error.filename)) if is_named else Path("the checkpoint")
    )
    return StorageFault(fault.what, why=fault.why, fix=fault.fix)


def _joint_error(
    failed: dict[int, NanotrainError | RuntimeError], *, size: int
) -> NanotrainError | RuntimeError:
    """The error of the first failed rank, with the ranks that failed and the first error that
    differs.
    """
    first, *_ = failed.values()
    note = ""
    if len(failed) < size:
        ranks = ", ".join(map(str, list(failed)[:MAX_LISTED]))
        note = f" (on rank {ranks} of {size})"
    for rank, error in failed.items():
        if str(error) != str(first):
            what = error.what if isinstance(error, NanotrainError) else error
            note += f" [rank {rank}: {what}]"
            break
    if isinstance(first, NanotrainError):
        return first.with_note(note)
    return RuntimeError(f"{first}{note}")
