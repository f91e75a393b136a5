"""Every rank fails, or none: a rank that stops alone leaves the others waiting in their next collective.

`together` runs a piece of work on every rank and gathers what became of it; a mistake on any rank is raised on all of
them, with the same words. It is also the barrier between the phases of saving and loading.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from nanotrain.comm.collectives import all_gather_object
from nanotrain.comm.group import Group
from nanotrain.errors import CheckpointError, EnvironmentFault, NanotrainError

Answer = TypeVar("Answer")
MOST_NAMED = 4


@dataclass(frozen=True)
class _Failure:
    """An error in a form that survives the way to another rank."""

    kind: str
    what: str
    why: str = ""
    fix: str = ""


@dataclass(frozen=True)
class _Outcome(Generic[Answer]):
    answer: Answer | None
    failure: _Failure | None = None


def together(group: Group, work: Callable[[], Answer]) -> list[Answer]:
    """Do `work` on every rank of the group and return every rank's answer, in group order.

    Args:
        group: every rank of it calls this, at the same point of the program.
        work: communicates nothing itself; its answer can be pickled.

    Raises:
        CheckpointError, EnvironmentFault, AssertionError: what `work` raised on some rank, on every rank alike. A
            machine error (disk full, no permission) becomes an EnvironmentFault.
        RuntimeError: on the ranks whose neighbour met an error of any other kind; that rank raises the error itself.
    """
    error: Exception | None = None
    outcome: _Outcome[Answer]
    try:
        outcome = _Outcome(work())
    except Exception as caught:  # an error of any kind must reach the others before it is raised here
        error, outcome = caught, _Outcome(None, _describe(caught))
    outcomes: list[_Outcome[Answer]] = all_gather_object(outcome, group)
    failures = {rank: told.failure for rank, told in enumerate(outcomes) if told.failure is not None}
    if failures:
        if error is not None and not isinstance(error, NanotrainError | OSError | AssertionError):
            raise error
        raise _merged(failures, size=group.size) from error
    return [cast(Answer, told.answer) for told in outcomes]  # without a failure the answer is there


def on_first(group: Group, work: Callable[[], Answer]) -> Answer:
    """Do `work` on the first rank of the group only and give every rank its answer, or its error."""
    answers = together(group, lambda: work() if group.is_first else None)
    return cast(Answer, answers[0])


def _describe(error: Exception) -> _Failure:
    if isinstance(error, CheckpointError):
        return _Failure("CheckpointError", error.what, error.why, error.fix)
    if isinstance(error, NanotrainError):
        return _Failure("EnvironmentFault", error.what, error.why, error.fix)
    if isinstance(error, OSError):
        place = f" {os.fspath(error.filename)}" if isinstance(error.filename, str | os.PathLike) else ""
        return _Failure(
            "EnvironmentFault",
            f"the checkpoint folder{place} cannot be used",
            f"{error.strerror or error} (errno {error.errno})",
            "free some space or choose a writable folder with train.run_dir",
        )
    if isinstance(error, AssertionError):
        return _Failure("AssertionError", str(error))
    return _Failure("RuntimeError", f"{type(error).__name__}: {error}")


def _merged(failures: dict[int, _Failure], *, size: int) -> Exception:
    """One error for all ranks: the first one's, naming the ranks that met another."""
    first = next(iter(failures.values()))
    others = [rank for rank, failure in failures.items() if failure != first]
    note = ""
    if size > 1 and len(failures) < size:
        note = f" (on rank {', '.join(map(str, list(failures)[:MOST_NAMED]))} of {size})"
    if others:
        note += f" [rank {others[0]}: {failures[others[0]].what}]"
    kinds = {"CheckpointError": CheckpointError, "EnvironmentFault": EnvironmentFault}
    if first.kind in kinds:
        return kinds[first.kind](first.what + note, why=first.why, fix=first.fix)
    if first.kind == "AssertionError":
        return AssertionError(first.what + note)
    return RuntimeError(first.what + note)
