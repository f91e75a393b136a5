"""An error on any rank is raised on every rank: same type and text for ours, a RuntimeError for
unexpected ones.
"""

import errno
import os

import pytest

from nanotrain.checkpoint.all_ranks import reduce_on_all, run_on_all, run_on_first
from nanotrain.checkpoint.manifest import NewerFormat
from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.errors import CheckpointError, DataError, EnvironmentFault
from tests.harness import ranks, run_ranks


@ranks(3)
def test_every_rank_gets_what_the_first_makes_of_the_results_of_all(ctx: ParallelContext) -> None:
    merged_on = []

    def merge(results: list[int]) -> int:
        merged_on.append(ctx.rank)
        return sum(results)

    assert run_on_all(ctx.control, lambda: ctx.rank * 10, merge=merge) == 30
    assert merged_on == [0] * (ctx.rank == 0)
    assert run_on_first(ctx.control, lambda: ctx.rank + 7) == 7
    assert run_on_all(ctx.control, lambda: None, merge=list) == [None] * 3


@ranks(2)
def test_an_error_of_the_merge_is_raised_on_every_rank(ctx: ParallelContext) -> None:
    def merge(results: list[int]) -> int:
        raise CheckpointError(f"bad {results}")

    with pytest.raises(CheckpointError, match=r"^bad \[0, 1\]$"):
        run_on_all(ctx.control, lambda: ctx.rank, merge=merge)


@ranks(3)
def test_where_no_rank_fails_numbers_take_one_collective(ctx: ParallelContext) -> None:
    group = ctx.control
    first = group.heartbeat.sequence(group.name)
    assert reduce_on_all(group, lambda: [ctx.rank, -ctx.rank], length=2) == [2, 0]
    assert reduce_on_all(group, lambda: [ctx.rank + 1], length=1, op="sum") == [6]
    assert reduce_on_all(group, list) == []
    assert group.heartbeat.sequence(group.name) == first + 3


def errors_of(ctx: ParallelContext, errors: dict[int, Exception]) -> list[tuple[str, str]]:
    """Type and text of what `run_on_all` and `reduce_on_all` raise."""

    def fail() -> list[float]:
        if ctx.rank in errors:
            raise errors[ctx.rank]
        return [1.0]

    raised = []
    for call in (
        lambda: run_on_all(ctx.control, fail, merge=list),
        lambda: reduce_on_all(ctx.control, fail, length=1, op="sum"),
    ):
        try:
            call()
        except Exception as error:
            raised.append((type(error).__name__, str(error)))
    return raised


DISK = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/step")


@pytest.mark.parametrize(
    ("errors", "kind", "text"),
    [
        (
            {1: CheckpointError("a", why="b", fix="c")},
            "CheckpointError",
            "a (on rank 1 of 3): b; c",
        ),
        ({2: NewerFormat("a", why="b")}, "NewerFormat", "a (on rank 2 of 3): b"),
        ({1: DataError("a"), 2: DataError("z")}, "DataError", "a (on rank 1, 2 of 3) [rank 2: z]"),
        ({0: DataError("a"), 1: DataError("a"), 2: DataError("a")}, "DataError", "a"),
        (
            {1: DISK},
            "StorageFault",
            "/data/step cannot be written (on rank 1 of 3): No space left on device",
        ),
    ],
    ids=str,
)
def test_a_known_error_is_the_same_on_every_rank(
    errors: dict[int, Exception], kind: str, text: str
) -> None:
    by_rank = run_ranks(3, errors_of, errors)

    for raised in zip(*by_rank, strict=True):
        assert len(set(raised)) == 1
        assert raised[0][0] == kind and raised[0][1].startswith(text)
    assert len(by_rank[0]) == 2


def test_an_unexpected_error_is_raised_where_it_happened_and_stops_the_others() -> None:
    raised = run_ranks(3, errors_of, {1: ZeroDivisionError("x")})

    assert raised[1] == [("ZeroDivisionError", "x")] * 2
    assert raised[0] == raised[2] == [("RuntimeError", "ZeroDivisionError: x (on rank 1 of 3)")] * 2


def test_one_rank_raises_without_a_note() -> None:
    def fail() -> None:
        raise DISK

    with pytest.raises(EnvironmentFault, match=r"^/data/step cannot be written: No space"):
        run_on_first(Group.single_rank("world"), fail)
