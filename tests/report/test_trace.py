"""The lanes of a step, from a GPU trace made by hand and from small CPU ones."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanotrain.errors import EnvironmentFault
from nanotrain.report.trace import length, overlap, read_step, union, without
from tests.report.traces import STEP, event, gpu_events, write_trace

sets_of_times = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=8).map(
    lambda pairs: np.array([(start, start + size) for start, size in pairs], dtype=float).reshape(
        -1, 2
    )
)


def moments(spans: np.ndarray) -> set[int]:
    """The whole microseconds that are covered."""
    return {moment for start, end in spans for moment in range(int(start), int(end))}


@given(sets_of_times, sets_of_times)
def test_sets_of_times_are_sets(a, b):
    first, second = union(a), union(b)
    assert moments(first) == moments(a) and length(first) == len(moments(a))
    assert moments(overlap(first, second)) == moments(a) & moments(b)
    assert moments(without(first, second)) == moments(a) - moments(b)
    assert (first[1:, 0] > first[:-1, 1]).all()


def test_a_gpu_step_is_read_from_its_kernels(tmp_path):
    step = read_step(write_trace(tmp_path, gpu_events(), rank=3), rank=3)
    assert (step.rank, step.step, step.duration_us, step.on_device) == (3, 5, 1000, True)
    assert step.compute.tolist() == [[0, 400], [500, 700]]
    assert step.copies.tolist() == [[720, 740]]
    assert step.hidden.tolist() == [[300, 400], [500, 600]]
    assert step.exposed.tolist() == [[400, 500], [800, 900]]
    assert step.idle_us == 1000 - 700 - 20 - 100


def test_an_earlier_step_of_the_trace(tmp_path):
    step = read_step(write_trace(tmp_path, gpu_events()), rank=0, step=4)
    assert (step.step, step.duration_us, len(step.hidden) + len(step.exposed)) == (4, 890, 0)


def test_a_cpu_step_is_read_from_operators_and_gloo(tmp_path):
    events = [
        event("user_annotation", f"{STEP}2", 0, 100),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 0, 40),
        event("cpu_op", "aten::linear", 10, 30),
        event("cpu_op", "aten::mm", 12, 28),
        event("cpu_op", "aten::copy_", 28, 30),
        event("cpu_op", "_GatherBackward", 40, 60),  # waits
        event("cpu_op", "c10d::allgather_", 41, 42),
        event("user_annotation", "gloo:all_gather", 20, 60, tid=9),
        event("user_annotation", "Optimizer.step#adam", 60, 90),
        event("cpu_op", "aten::add_", 95, 120),
    ]
    step = read_step(write_trace(tmp_path, events), rank=0)
    assert step.compute.tolist() == [[10, 28], [95, 100]]  # without the copy, ends with the step
    assert step.copies.tolist() == [[28, 30]] and not step.on_device
    assert step.hidden.tolist() == [[20, 28]] and step.exposed.tolist() == [[28, 60]]


def test_a_trace_without_marks_is_one_step(tmp_path):
    events = [event("kernel", "gemm", 50, 60), event("kernel", "ncclKernel_AllReduce", 55, 70)]
    step = read_step(write_trace(tmp_path, events), rank=0)
    assert (step.step, step.duration_us, length(step.hidden), length(step.exposed)) == (
        0,
        20,
        5,
        10,
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read: it is no trace"),
        ("[]", "cannot be read: it is no trace"),
        ('{"traceEvents": 3}', "cannot be read: it is no trace"),
        ('{"traceEvents": [3]}', "cannot be read: it is no trace"),
        ('{"traceEvents": [{"ph": "X", "name": "a", "ts": "x", "dur": 1}]}', "shows no work"),
    ],
)
def test_another_file_is_one_error(tmp_path, text, message):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(EnvironmentFault, match=message):
        read_step(path, rank=0)


def test_a_step_that_was_not_profiled(tmp_path):
    with pytest.raises(EnvironmentFault, match="has no step 9: the steps in it: 4, 5; "):
        read_step(write_trace(tmp_path, gpu_events()), rank=0, step=9)


@settings(deadline=None, max_examples=40)
@given(
    kernels=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), min_size=1, max_size=6),
    transfers=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=5),
    copied=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=5),
)
def test_the_parts_of_a_step_are_those_of_every_microsecond(kernels, transfers, copied):
    """Of events that overlap, touch the bounds of the step, or lie outside of it."""
    lanes = {"gemm": kernels, "ncclDevKernel_AllGather": transfers, "Memcpy DtoH": copied}
    events = [event("gpu_user_annotation", f"{STEP}2", 10, 50)]
    for name, spans in lanes.items():
        kind = "gpu_memcpy" if spans is copied else "kernel"
        events += [event(kind, name, start, start + size) for start, size in spans]
    with tempfile.TemporaryDirectory() as folder:
        step = read_step(write_trace(Path(folder), events), rank=0)
    busy = [
        {moment - 10 for start, size in spans for moment in range(start, start + size)}
        & set(range(40))
        for spans in lanes.values()
    ]
    compute, communication, copies = busy
    assert moments(step.compute) == compute and moments(step.copies) == copies
    assert moments(step.hidden) == communication & compute
    assert moments(step.exposed) == communication - compute
    assert step.idle_us == 40 - len(compute | communication | copies)
