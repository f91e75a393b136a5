"""Heartbeats in shared memory, and the state of processes."""

import os
import signal
import subprocess
import time
from dataclasses import replace

from nanotrain.comm.collectives import barrier
from nanotrain.comm.heartbeat import read_record
from nanotrain.watch import processes
from nanotrain.watch.processes import RankProcess, share_heartbeats, start_time, state_of
from tests.harness import HANG_S, ranks


@ranks(3, threads=False)
def test_every_rank_of_a_machine_reads_the_others(ctx):
    created, create = [], processes._create_file
    processes._create_file = lambda num_ranks: created.append(create(num_ranks)) or created[-1]
    all_processes, records = share_heartbeats(ctx.heartbeat, ctx.control)
    ctx.heartbeat.begin("step", step=10 + ctx.rank)
    barrier(ctx.control)
    beats = {rank: read_record(record) for rank, record in records.items()}
    assert [beats[rank].step for rank in range(3)] == [10, 11, 12]
    assert all_processes[ctx.rank].pid == os.getpid()
    barrier(ctx.control)
    assert len(created) == (ctx.rank == 0)
    assert not any(map(os.path.exists, created)), "the file is unlinked"


@ranks(2, threads=False)
def test_without_shared_memory_a_rank_reads_only_its_own_record(ctx):
    processes._create_file = lambda num_ranks: None
    all_processes, records = share_heartbeats(ctx.heartbeat, ctx.control)
    assert len(all_processes) == 2 and set(records) == {ctx.rank}


def test_containers_of_one_machine_do_not_use_each_others_process_ids(monkeypatch):
    here = RankProcess.current(0)
    assert RankProcess.current(0).machine == here.machine
    monkeypatch.setattr(processes, "_pid_namespace", lambda: "pid:[4026532000]")
    assert RankProcess.current(0).machine != here.machine


def test_states_of_a_process_until_its_end():
    child = subprocess.Popen(["sleep", "60"])
    process = RankProcess(0, "host", child.pid, start_time(child.pid), "machine")
    assert state_of(process) in ("S", "R", "D")  # it may still be read from the disk
    assert state_of(replace(process, started=process.started + 1)) == "", (
        "a later process with its id"
    )
    child.send_signal(signal.SIGSTOP)
    end = time.monotonic() + HANG_S
    while state_of(process) != "T" and time.monotonic() < end:
        time.sleep(0.01)
    assert state_of(process) == "T"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    assert state_of(process) == ""
    child.wait()
    assert state_of(process) == ""
