"""A rank uses its share of the cores of the machine."""

import os

import pytest

from nanotrain.comm.cores import cores_per_rank


@pytest.mark.parametrize(
    ("ranks", "expected"), [(None, 8), ("1", 8), ("3", 2), ("8", 1), ("64", 1), ("0", 8), ("x", 8), ("", 8)]
)
def test_the_ranks_of_a_machine_share_its_cores(
    ranks: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert cores_per_rank() == expected
