"""The context has the planned groups, one process group per set of ranks."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from nanotrain.comm import flight_recorder
from nanotrain.comm import group as group_module
from nanotrain.comm import parallel_context as context_module
from nanotrain.comm.collectives import (
    all_gather_into,
    all_reduce,
    all_reduce_scalars,
    barrier,
    start_reduce_scatter_into,
)
from nanotrain.comm.parallel_context import Launch, ParallelContext
from nanotrain.comm.work import CommunicationFault
from nanotrain.errors import EnvironmentFault
from nanotrain.topology.groups import GROUP_NAMES, UNCONNECTED
from nanotrain.topology.topology import Topology
from tests.fake_world import HAS_META_COLLECTIVES, fake_context
from tests.harness import HANG_S, parallel_config, ranks, run_ranks

LAUNCHED = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def topology(world_size: int, **options) -> Topology:
    return Topology.of(parallel_config(**options), world_size)


@pytest.fixture
def no_torchrun(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@ranks(8, threads=False, tp=2, pp=2, strategy="optim")
def test_groups_are_those_of_the_topology(ctx):
    for name in GROUP_NAMES:
        group = ctx.group(name)
        assert group.ranks == ctx.topology.members(ctx.rank, name)
        assert group.rank == ctx.rank
        assert (group.process_group is None) == (group.size == 1 or name in UNCONNECTED)
        if group.process_group is None and group.size > 1:
            continue
        assert all_reduce_scalars([ctx.rank], group) == [float(sum(group.ranks))]
    assert ctx.coords_text == f"pp{ctx.rank // 4} dp{ctx.rank // 2 % 2} tp{ctx.rank % 2}"


@ranks(3, threads=False, pp=3)
def test_a_middle_stage_is_in_no_embed_group(ctx):
    assert ("embed" in ctx.groups) == (ctx.rank != 1)
    if ctx.rank != 1:
        assert all_reduce_scalars([1.0], ctx.group("embed")) == [2.0]


@ranks(4, threads=False, tp=2)
def test_names_of_the_same_ranks_share_one_process_group(ctx):
    distinct = {group.ranks for group in ctx.groups.values() if group.size > 1}
    handles = {id(group.process_group) for group in ctx.groups.values() if group.size > 1}
    assert len(handles) == len(distinct) == 3  # tp, dp, world
    assert ctx.group("dp").process_group is ctx.group("dp_cp").process_group
    assert ctx.group("world").process_group is dist.group.WORLD
    assert ctx.control.process_group is not dist.group.WORLD


def test_one_process_without_torchrun_is_a_world_of_one_without_process_groups(no_torchrun):
    with ParallelContext.start(topology(1), device="cpu") as ctx:
        assert not dist.is_initialized()
        assert (ctx.rank, ctx.coords_text, ctx.device) == (0, "", torch.device("cpu"))
        assert all(group.size == 1 for group in [*ctx.groups.values(), ctx.control])
        barrier(ctx.control)


def test_a_topology_of_another_world_size_is_an_error(no_torchrun):
    with (
        pytest.raises(
            EnvironmentFault, match="1 rank was launched for a topology of 4.*launch 4 ranks"
        ),
        ParallelContext.start(topology(4), device="cpu"),
    ):
        pass


def test_process_groups_are_destroyed_after_success_and_left_after_an_error(monkeypatch):
    destroyed: list[bool] = []
    monkeypatch.setattr(context_module, "join_world", lambda *_arguments, **_options: None)
    monkeypatch.setattr(ParallelContext, "_with_groups", lambda self, _timeout_s: self)
    monkeypatch.setattr(ParallelContext, "_destroy", lambda self: destroyed.append(True))
    for name, value in (LAUNCHED | {"RANK": "1", "LOCAL_RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    for name in flight_recorder.SETTINGS:
        monkeypatch.setenv(name, "0")  # kept, so the environment of other tests stays
    with pytest.raises(ZeroDivisionError), ParallelContext.start(topology(2), device="cpu"):
        _ = 1 / 0  # destroying would wait for a peer inside a collective
    assert not destroyed
    with ParallelContext.start(topology(2), device="cpu"):
        pass
    assert destroyed == [True]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "RANK set but not WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT in"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "RANK, WORLD_SIZE set but not LOCAL_RANK, MASTER_ADDR"),
        (LAUNCHED | {"MASTER_ADDR": ""}, "set but not MASTER_ADDR in the environment"),
        (
            LAUNCHED | {"WORLD_SIZE": "two"},
            "WORLD_SIZE is 'two' .* from 1 to 10000000; start with torchrun, or unset",
        ),
        (LAUNCHED | {"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        (
            LAUNCHED | {"RANK": "2"},
            "RANK is '2' in the environment: it must be a whole number from 0 to 1",
        ),
        (LAUNCHED | {"RANK": "9" * 5000}, "RANK is '999"),
        (LAUNCHED | {"RANK": "-1"}, "RANK is '-1'"),
        (LAUNCHED | {"LOCAL_RANK": "7"}, "LOCAL_RANK is '7'"),
        (LAUNCHED | {"MASTER_PORT": "abc"}, "MASTER_PORT is 'abc' .* from 0 to 65535"),
        (LAUNCHED | {"MASTER_PORT": "99999"}, "MASTER_PORT is '99999'"),
    ],
)
def test_an_incomplete_environment_is_an_error(environment, message):
    with pytest.raises(EnvironmentFault, match=message):
        Launch.of(environment)


def test_a_fake_world_gives_any_rank_its_context_without_communication():
    world = topology(1024, tp=8, pp=4, strategy="optim")
    with fake_context(world, 777) as ctx:
        assert ctx.rank == 777
        assert ctx.coords["tp"] == 777 % 8
        assert {name: group.size for name, group in ctx.groups.items()} == {
            name: world.size(name) for name in ctx.groups
        }
        shard = ctx.group("dp_shard")
        full, part = torch.zeros(32 * 4), torch.zeros(4)
        start_reduce_scatter_into(part, full, group=shard).wait()
        all_gather_into(full, part, group=shard)
        all_reduce(full, ctx.group("tp"))
        barrier(ctx.control)
        assert ctx.traffic.bytes("dp_shard") == 2 * 512 * 31 // 32
        assert ctx.traffic.bytes("tp") == 2 * 512 * 7 // 8
        if HAS_META_COLLECTIVES:
            meta = torch.empty(32 * 4, device="meta")
            start_reduce_scatter_into(meta[:4], meta, group=shard).wait()
    assert not dist.is_initialized()


def wait_after_lowering(ctx, op):
    """Seconds until a collective fails whose peer does not come, after the timeout was lowered."""
    group = ctx.group("world")
    all_gather_into(torch.zeros(4), torch.ones(2), group=group)  # connects
    ctx.set_timeout(0.2)
    if ctx.rank == 1:
        ctx.set_timeout(HANG_S)
        return 0.0
    work = (
        start_reduce_scatter_into(torch.zeros(2), torch.ones(4), group=group)
        if op == "messages"
        else None
    )
    started = time.monotonic()
    with pytest.raises(
        CommunicationFault, match="#2 of [0-9]+ bytes over group world .* failed on rank 0"
    ):
        work.wait() if work else all_reduce(torch.ones(4), group)
    seconds = time.monotonic() - started
    ctx.set_timeout(HANG_S)  # the ranks meet at the end of the test
    return seconds


@pytest.mark.parametrize("op", ["messages", "collective"])
def test_a_timeout_is_lowered_for_gloo_s_collectives_and_messages(op):
    assert 0.1 < run_ranks(2, wait_after_lowering, op, threads=False)[0] < HANG_S / 2


def test_the_timeout_of_every_group_that_communicates_is_set(monkeypatch):
    given = {}
    monkeypatch.setattr(
        group_module,
        "_set_timeout",
        lambda process_group, timeout: given.update({process_group: timeout}),
    )
    with fake_context(topology(8, tp=2), 0) as ctx:
        ctx.set_timeout(7.0)
        groups = [group for group in (*ctx.groups.values(), ctx.control) if group.size > 1]
        connected = [group for group in groups if group.process_group is not None]
        assert (
            given == {group.process_group: timedelta(seconds=7) for group in connected}
            and len(given) == 4
        )
        assert ctx.timeout_s == 7.0
