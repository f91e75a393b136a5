"""Process groups by splits of the world on NCCL, which a stand-in records, and objects along a tree
of gloo groups.
"""

from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from nanotrain.comm import parallel_context, process_groups
from nanotrain.comm.collectives import (
    all_gather_object,
    all_reduce_scalars,
    barrier,
    broadcast_object,
    gather_object,
)
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.comm.process_groups import (
    create_control,
    create_groups,
)
from nanotrain.comm.work import CommunicationFault
from nanotrain.errors import EnvironmentFault
from nanotrain.topology.topology import Topology, partitions
from tests.harness import parallel_config, ranks

TIMEOUT = timedelta(seconds=7)


class Splits:
    """A world over NCCL, as far as groups are created from it."""

    def __init__(self, monkeypatch, *, is_bound=True, excess=0):
        self.calls = []
        backend = SimpleNamespace(supports_splitting=True)
        world = SimpleNamespace(
            bound_device_id=0 if is_bound else None, _get_backend=lambda device: backend
        )
        monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
        monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
        monkeypatch.setattr(dist, "split_group", self.split)
        monkeypatch.setattr(
            process_groups, "process_group_device", lambda group: torch.device("cpu")
        )
        monkeypatch.setattr(
            dist,
            "all_reduce",
            lambda tensor, group: tensor.fill_(
                group.size + excess if hasattr(group, "size") else 16
            ),
        )

    def split(self, *, parent_pg, split_ranks, timeout, group_desc):
        assert parent_pg is dist.group.WORLD and timeout == TIMEOUT
        self.calls.append((group_desc, split_ranks))
        part = next((part for part in split_ranks if self.rank in part), None)
        return None if part is None else SimpleNamespace(ranks=tuple(part), size=len(part))

    def create(self, topology, rank):
        self.rank, self.calls = rank, []
        return create_groups(topology, rank, timeout=TIMEOUT)


LAYOUTS = [
    {"tp": 2, "pp": 4},
    {"tp": 2, "cp": 2, "strategy": "optim", "instances": 2},
    {"ep": 4, "tp": 2, "pp": 2},
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_takes_part_in_the_same_splits_and_gets_its_own_groups(monkeypatch, layout):
    topology, splits = Topology.of(parallel_config(**layout), 16), Splits(monkeypatch)
    first = None
    for rank in range(16):
        groups = splits.create(topology, rank)
        first = first or splits.calls
        assert splits.calls == first  # same order, same arguments
        needed = {
            spec.ranks
            for name, spec in topology.group_specs(rank).items()
            if spec.size > 1 and name != "model"
        }
        assert needed == groups.keys()
        assert all(group.ranks == ranks for ranks, group in groups.items() if len(ranks) < 16)
    for _, parts in first:
        members = [rank for part in parts for rank in part]
        assert len(members) == len(set(members)), "the parts of a split are disjoint"
    assert [name for name, _ in first] == list(partitions(topology))


def test_parts_that_torch_gave_the_same_number_are_found(monkeypatch):
    with pytest.raises(
        EnvironmentFault, match=r"a group of 2 ranks \(first 0, last 1\) has 4 members"
    ):
        Splits(monkeypatch, excess=2).create(Topology.of(parallel_config(tp=2), 16), 0)


def test_a_world_without_a_device_has_groups_of_its_members_alone(monkeypatch):
    splits, created = Splits(monkeypatch, is_bound=False), []
    monkeypatch.setattr(
        process_groups, "_new_group", lambda name, ranks, timeout: created.append((name, ranks))
    )
    splits.create(Topology.of(parallel_config(tp=2), 16), 3)
    assert splits.calls == [] and created == [("tp", (2, 3)), ("dp", tuple(range(1, 16, 2)))]


def test_nccl_groups_have_streams_of_high_priority(monkeypatch):
    # given NCCL's options, which a CPU build of torch lacks
    monkeypatch.setattr(
        dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False
    )
    given = {}
    monkeypatch.setattr(dist, "new_group", lambda ranks, **options: given.update(options))
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    process_groups._new_group("tp", (0, 1), timeout=TIMEOUT)
    assert given["pg_options"] == SimpleNamespace(is_high_priority_stream=True, _timeout=TIMEOUT)
    # and groups for objects, over gloo, take none
    process_groups._new_group("control", (0, 1), timeout=TIMEOUT, backend="gloo")
    assert given["pg_options"] is None
    # the world is bound to its device, so that groups can be split from it
    monkeypatch.setattr(process_groups, "meet", lambda *_, **__: dist.HashStore())
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **options: given.update(options)
    )
    backend = SimpleNamespace(options=SimpleNamespace())
    world = SimpleNamespace(_get_backend=lambda device: backend)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    process_groups.join_world(0, 2, device=torch.device("cuda", 1), timeout=TIMEOUT)
    assert (
        given["device_id"] == torch.device("cuda", 1)
        and given["pg_options"].is_high_priority_stream
    )
    assert backend.options.global_ranks_in_group == [0, 1]
    process_groups.join_world(0, 2, device=torch.device("cpu"), timeout=TIMEOUT)
    assert given["device_id"] is None


def test_a_world_that_a_rank_does_not_join_is_a_fault_that_a_restart_may_cure(monkeypatch):
    def lost(*_, **__):
        raise RuntimeError("Connection closed by peer\n#0 a stack")

    monkeypatch.setattr(dist, "init_process_group", lost)
    with pytest.raises(CommunicationFault, match="rank 0 of 2 could not join .*closed by peer;"):
        process_groups.join_world(
            0, 2, device=torch.device("cpu"), timeout=TIMEOUT, store=dist.HashStore()
        )


class Counted:
    """An object that counts how many of its kind this process receives."""

    received: list[int] = []

    def __init__(self, rank: int) -> None:
        self.received.append(rank)

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return Counted, (7,)


@ranks(7, threads=False)
def test_objects_travel_along_a_tree_in_the_order_of_ranks(ctx):
    parallel_context.create_control = partial(create_control, fan_out=3)
    control = ParallelContext.attach(ctx.topology).control
    assert [level.size for level in control.levels] == {0: [2, 3], 2: [2, 3], 4: [3, 3]}.get(
        ctx.rank, [2 + (ctx.rank > 3)]
    )
    assert control.process_group is None and control.size == 7
    assert all_gather_object(f"rank {ctx.rank}", control) == [f"rank {rank}" for rank in range(7)]
    assert gather_object(ctx.rank, control) == (list(range(7)) if ctx.rank == 0 else None)
    gather_object(Counted(ctx.rank), control)
    # besides what it made: the ranks between send on what they receive, and only the root reads it
    assert len(Counted.received) - 1 == (7 if ctx.rank == 0 else 0)
    assert broadcast_object(("verdict", ctx.rank), control) == ("verdict", 0)
    assert all_reduce_scalars([ctx.rank, 1.0], control) == [21.0, 7.0]
    assert all_reduce_scalars([ctx.rank, -ctx.rank], control, op="max") == [6.0, 0.0]
    control.set_timeout(timedelta(seconds=30))
    barrier(control)
    assert ctx.control.levels == ()  # a small world has no tree
