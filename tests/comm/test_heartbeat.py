"""What a rank records: phases, actions, collectives and what it waits for, also in memory of other
processes.
"""

import sys
from types import FrameType

import pytest
import torch

from nanotrain.comm.collectives import (
    all_gather_object,
    all_reduce,
    all_reduce_scalars,
    start_all_reduce,
)
from nanotrain.comm.group import Group
from nanotrain.comm.heartbeat import RECORD_BYTES, Collective, Heartbeat, Waiting, read_record
from nanotrain.comm.send_recv import start_ring_send_recv
from nanotrain.comm.work import CommunicationFault, Work
from tests.harness import ranks


def test_phases_actions_and_collectives_are_read_back():
    heartbeat = Heartbeat()
    heartbeat.begin("step", step=3)
    heartbeat.action("F", stage=0, microbatch=0)
    assert heartbeat.read().action == "F0.0"
    heartbeat.action("B", stage=1, microbatch=5)
    heartbeat.started("dp", "all_reduce", num_bytes=64)
    heartbeat.started("no such group", "no such op", num_bytes=1)
    beat = heartbeat.read()
    assert (beat.step, beat.phase, beat.action) == (3, "step", "B1.5")
    assert beat.collectives == {
        "dp": Collective(1, "all_reduce", 64),
        "?": Collective(1, "no such op", 1),
    }
    assert beat.waiting is None and beat.beats == 5 and not beat.is_alarmed


@pytest.mark.parametrize("peer", [None, 0, 2])
def test_a_wait_is_recorded_while_it_lasts(peer):
    heartbeat = Heartbeat()
    heartbeat.wait_begins("pp", "p2p", sequence=4, peer=peer)
    assert heartbeat.read().waiting == Waiting("pp", "p2p", 4, peer=peer)
    heartbeat.wait_ended()
    assert heartbeat.read().waiting is None and heartbeat.waited_s > 0


class Broken:
    """A handle of a lost peer."""

    def wait(self) -> None:
        raise RuntimeError("connection closed")


def test_a_failed_wait_stays_recorded():
    group = Group.single_rank("tp")
    with pytest.raises(CommunicationFault):
        Work(lambda: 1, op="all_gather", group=group, handles=[Broken()]).wait()
    assert group.heartbeat.read().waiting == Waiting("tp", "all_gather", 0)


def test_a_record_continues_in_other_memory():
    heartbeat, record = Heartbeat(), memoryview(bytearray(RECORD_BYTES)).cast("q")
    heartbeat.begin("data", step=9)
    heartbeat.move_to(record)
    heartbeat.alarm()
    assert read_record(record).step == 9 and read_record(record).is_alarmed


@ranks(2, threads=False, tp=2)
def test_every_collective_of_a_rank_is_in_its_heartbeat(ctx):
    group, tensor = ctx.group("tp"), torch.ones(3)
    all_reduce(tensor, group)
    all_reduce_scalars([1.0], group)
    start_ring_send_recv([tensor], group).wait()
    all_gather_object("x", group)
    work = start_all_reduce(tensor, group)
    beat = ctx.heartbeat.read()
    assert beat.collectives["tp"].sequence == 5 and beat.collectives["tp"].op == "all_reduce"
    work.wait()
    assert ctx.heartbeat.read().waiting is None


def test_recording_a_collective_only_stores_into_memory():
    """No lock, system call or message: a collective takes 20 us, and a record a small part of it."""
    heartbeat = Heartbeat()
    python_calls: list[str] = []
    c_calls: list[str] = []

    def record_call(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            python_calls.append(frame.f_code.co_name)
        elif event == "c_call":
            c_calls.append(argument.__name__)

    sys.setprofile(record_call)
    try:
        heartbeat.started("dp", "all_reduce", num_bytes=64)
        heartbeat.wait_begins("dp", "all_reduce", sequence=1)
        heartbeat.wait_ended()
    finally:
        sys.setprofile(None)
    assert python_calls == ["started", "_newest", "wait_begins", "wait_ended"]
    assert set(c_calls) - {"setprofile"} <= {"get", "encode", "perf_counter_ns"}
