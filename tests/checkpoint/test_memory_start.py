"""Which checkpoint in memory is chosen, from what every rank found; whole runs are in tests/laws."""

from dataclasses import replace
from pathlib import Path

import pytest

from nanotrain.checkpoint.memory_checkpointer import HostMemory
from nanotrain.checkpoint.memory_start import MemoryStart, _choose, _HeldStep
from nanotrain.comm.group import Group
from nanotrain.topology.partners import Host

FILES = ("shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors")
BOTH = _HeldStep("digest", True, FILES, frozenset(FILES), ("a", "b"))
FIRST = replace(BOTH, sound=frozenset(FILES[:1]))
MEMORY = HostMemory(Path("m"), Group.single_rank("world"), (Host("a"), Host("b")), ())


def chosen(*held: dict[int, _HeldStep]) -> MemoryStart | None:
    return _choose(held, MEMORY)


def test_the_newest_step_with_all_shards_on_some_host_is_chosen() -> None:
    start = chosen({4: BOTH, 6: FIRST}, {4: BOTH, 6: FIRST})
    assert start is not None and start.step == 4
    assert start.holders == dict.fromkeys(FILES, (0, 1))

    start = chosen({6: FIRST}, {6: replace(BOTH, sound=frozenset(FILES[1:]))})
    assert start is not None and start.holders == {FILES[0]: (0,), FILES[1]: (1,)}
    assert start.description == "2 of 2 shards from the hosts that wrote them"


def test_shards_of_a_lost_host_come_from_its_partner() -> None:
    start = chosen({}, {6: BOTH})
    assert start is not None and start.manifest_rank == 1
    assert start.description == "1 of 2 shards from the hosts that wrote them, 1 from partners of a"


@pytest.mark.parametrize(
    "held",
    [
        ({}, {}),
        ({6: FIRST}, {6: FIRST}),
        ({6: BOTH}, {6: replace(BOTH, digest="another")}),
        ({6: replace(BOTH, is_finite=False)}, {}),
    ],
    ids=["nothing", "a missing shard", "two manifests", "values that are not finite"],
)
def test_what_is_not_whole_or_sound_is_not_chosen(held: tuple[dict[int, _HeldStep], ...]) -> None:
    assert chosen(*held) is None
