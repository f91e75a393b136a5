"""A recorded world: every call of a rank has operation, size, peer and place; nothing is sent."""

import pytest
import torch

from nanotrain.comm.all_to_all import all_to_all
from nanotrain.comm.collectives import (
    all_reduce_scalars,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from nanotrain.comm.recorded_world import recorded_world
from nanotrain.comm.recorder import Race, Recorder
from nanotrain.comm.send_recv import start_ring_send_recv
from nanotrain.topology.topology import Topology
from tests.harness import parallel_config


def test_the_calls_of_a_rank_of_a_large_world() -> None:
    topology, recorder = Topology.of(parallel_config(tp=8, pp=4), 16_384), Recorder()
    with recorded_world(topology, 9_000, recorder=recorder) as context, recorder:
        tp, pp = context.group("tp"), context.group("pp")
        x = torch.empty(16, 4, device=context.device, dtype=torch.bfloat16)
        assert start_all_gather(x, tp, dim=1).wait().shape == (16, 32)
        assert start_reduce_scatter(x, tp, dim=0).wait().shape == (2, 4)
        start_all_reduce(x, tp, op="max").wait()
        assert all_to_all(x, tp, input_splits=[2] * 8, output_splits=[3] * 8).shape == (24, 4)
        start_ring_send_recv([x], pp).wait()
        assert all_reduce_scalars([1.0, 2.0], context.group("world")) == [16_384.0, 32_768.0]
        recorder.finish()
    assert [(call.op, call.size, call.peer) for call in recorder.calls] == [
        ("all_gather", "512 bfloat16", None),
        ("reduce_scatter", "64 bfloat16 sum", None),
        ("all_reduce", "64 bfloat16 max", None),
        ("all_to_all", "bfloat16", None),
        ("receive", "64 bfloat16", (pp.index - 1) % 4),
        ("send", "64 bfloat16", (pp.index + 1) % 4),
        ("all_reduce", "2 float64 sum", None),
    ]
    assert recorder.calls[3].splits == ((2,) * 8, (3,) * 8)
    assert {call.ranks for call in recorder.calls} == {
        tp.ranks,
        pp.ranks,
        context.group("world").ranks,
    }


def test_an_input_inside_of_the_output_may_be_read_in_flight() -> None:
    recorder = Recorder()
    with (
        recorded_world(Topology.of(parallel_config(tp=2), 2), 1, recorder=recorder) as context,
        recorder,
    ):
        from nanotrain.comm.collectives import start_all_gather_into

        full = torch.empty(8, device="meta")
        work = start_all_gather_into(full, full[4:], group=context.group("tp"))
        assert full[4:].sum().is_meta
        with pytest.raises(Race, match="reads an output in flight: all_gather"):
            full[:4].sum()
        work.wait()
