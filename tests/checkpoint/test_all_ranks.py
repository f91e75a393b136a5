"""An error on any rank is raised on every rank: same type and text for ours, a RuntimeError for unexpected ones."""

import errno
import os

import pytest

from nanotrain.checkpoint.all_ranks import run_on_all, run_on_first
from nanotrain.checkpoint.manifest import NewerFormat
from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.errors import CheckpointError, DataError, EnvironmentFault
from tests.harness import ranks, run_ranks


@ranks(3)
def test_every_rank_gets_the_results_of_all_or_of_the_first(ctx: ParallelContext) -> None:
    assert run_on_all(ctx.control, lambda: ctx.rank * 10) == [0, 10, 20]
    assert run_on_first(ctx.control, lambda: ctx.rank + 7) == 7
    assert run_on_all(ctx.control, lambda: None) == [None] * 3


def error_of(ctx: ParallelContext, errors: dict[int, Exception]) -> tuple[str, str]:
    def fail() -> None:
        if ctx.rank in errors:
            raise errors[ctx.rank]

    try:
        run_on_all(ctx.control, fail)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


DISK = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/step")


@pytest.mark.parametrize(
    ("errors", "kind", "text"),
    [
        ({1: CheckpointError("a", why="b", fix="c")}, "CheckpointError", "a (on rank 1 of 3): b; c"),
        ({2: NewerFormat("a", why="b")}, "NewerFormat", "a (on rank 2 of 3): b"),
        ({1: DataError("a"), 2: DataError("z")}, "DataError", "a (on rank 1, 2 of 3) [rank 2: z]"),
        ({0: DataError("a"), 1: DataError("a"), 2: DataError("a")}, "DataError", "a"),
        ({1: DISK}, "EnvironmentFault", "the checkpoint folder /data/step cannot be used (on rank 1 of 3): No space"),
    ],
    ids=str,
)
def test_a_known_error_is_the_same_on_every_rank(errors: dict[int, Exception], kind: str, text: str) -> None:
    raised = run_ranks(3, error_of, errors)

    assert len(set(raised)) == 1
    assert raised[0][0] == kind and raised[0][1].startswith(text)


def test_an_unexpected_error_is_raised_where_it_happened_and_stops_the_others() -> None:
    raised = run_ranks(3, error_of, {1: ZeroDivisionError("x")})

    assert raised[1] == ("ZeroDivisionError", "x")
    assert raised[0] == raised[2] == ("RuntimeError", "ZeroDivisionError: x (on rank 1 of 3)")


def test_one_rank_raises_without_a_note() -> None:
    def fail() -> None:
        raise DISK

    with pytest.raises(EnvironmentFault, match=r"^the checkpoint folder /data/step cannot be used: No space"):
        run_on_first(Group.single_rank("world"), fail)
