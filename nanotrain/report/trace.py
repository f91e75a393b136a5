"""Read one rank's step from a torch profiler trace: when it computed, communicated and copied.

    union, overlap, without      sets of times, as sorted arrays of (start, end)
    read_step                    a trace file -> RankStep
    RankStep                     the three lanes of a step, and what follows from them

A trace with GPU kernels is read from its device events: NCCL kernels are communication, other
kernels compute, memcpy and memset copies. A trace of CPU ranks is read from operators (compute),
`copy_` (copies) and gloo's work (communication). gloo records a send or receive until it is waited
for, so its share of hidden communication is an upper bound.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nanotrain.errors import EnvironmentFault
from nanotrain.untrusted import LARGEST, parse_json, read_file

# torch's own name, which other tools read too; followed by the number of the step
STEP = "ProfilerStep#"
_COLLECTIVE_KERNEL = re.compile(
    r"nccl|rccl|nvshmem|multimem_|(one|two)_shot_all_reduce", re.IGNORECASE
)
_CPU_COLLECTIVE = re.compile(r"gloo:|mpi:")
# namespaces of operators that wait or call others
_NOT_COMPUTE = ("c10d", "_c10d", "autograd", "torch", "profiler")
_COPIES = ("gpu_memcpy", "gpu_memset")

Spans = np.ndarray  # [n, 2] fp64 (start, end) in microseconds, ascending and disjoint


@dataclass(frozen=True)
class RankStep:
    """One step of one rank. Times are microseconds from the start of the step."""

    rank: int
    step: int
    duration_us: float
    compute: Spans
    hidden: Spans  # communication while the rank computes
    exposed: Spans  # communication while it does not
    copies: Spans
    on_device: bool  # read from GPU kernels

    @property
    def idle_us(self) -> float:
        """Time in which no lane has anything."""
        busy = union(np.concatenate([self.compute, self.exposed, self.copies]))
        return max(0.0, self.duration_us - length(busy))


def union(spans: np.ndarray) -> Spans:
    """Merge times that touch or overlap.

    >>> union(np.array([[5.0, 9.0], [0.0, 2.0], [1.0, 3.0]])).tolist()
    [[0.0, 3.0], [5.0, 9.0]]
    """
    if not len(spans):
        return np.empty((0, 2))
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = np.maximum.accumulate(spans[:, 1])
    first = np.append(True, spans[1:, 0] > ends[:-1])
    return np.stack([spans[first, 0], ends[np.append(first[1:], True)]], axis=1)


def overlap(a: Spans, b: Spans) -> Spans:
    """The intersection of two sets of spans.

    >>> overlap(np.array([[0.0, 4.0], [6.0, 8.0]]), np.array([[2.0, 7.0]])).tolist()
    [[2.0, 4.0], [6.0, 7.0]]
    """
    return _parts(a, b, wanted=True)


def without(a: Spans, b: Spans) -> Spans:
    """Times of `a` that are not in `b`.

    >>> without(np.array([[0.0, 4.0]]), np.array([[1.0, 2.0]])).tolist()
    [[0.0, 1.0], [2.0, 4.0]]
    """
    return _parts(a, b, wanted=False)


def length(spans: Spans) -> float:
    """The total time."""
    return float((spans[:, 1] - spans[:, 0]).sum())


def clip(spans: Spans, *, start: float, end: float) -> Spans:
    """The part within [start, end], counted from `start`."""
    inside = np.clip(spans, start, end) - start
    return inside[inside[:, 1] > inside[:, 0]]


def read_step(path: Path, *, rank: int, step: int | None = None) -> RankStep:
    """Read one step of a trace.

    Args:
        path: trace file that torch's profiler exported.
        rank: rank of the trace.
        step: number of the step; None: the last one that the trace marks, or the whole trace where
            none is marked.

    Raises:
        EnvironmentFault: the file cannot be read, is no trace, or does not have the step.
    """
    events = _events(path)
    steps = _marked_steps(events)
    if step is not None and step not in steps:
        why = f"the steps in it: {', '.join(map(str, sorted(steps))) or 'none'}"
        raise EnvironmentFault(f"{path} has no step {step}", why=why, fix="name one with --step")
    lanes, on_device = _lanes(events)
    step_number = max(steps, default=0) if step is None else step
    bounds = steps.get(step_number, np.concatenate(list(lanes.values())))
    if not len(bounds):
        raise EnvironmentFault(
            f"{path} shows no work",
            why="it has neither kernels nor operators",
            fix="profile a run with --profile",
        )
    start = float(bounds[:, 0].min())
    end = float(bounds[:, 1].max())
    compute = clip(union(lanes["compute"]), start=start, end=end)
    communication = clip(union(lanes["communication"]), start=start, end=end)
    copies = clip(union(lanes["copies"]), start=start, end=end)
    if not on_device:  # on a CPU copies are operators too
        compute = without(compute, copies)
    return RankStep(
        rank,
        step_number,
        duration_us=end - start,
        compute=compute,
        hidden=overlap(communication, compute),
        exposed=without(communication, compute),
        copies=copies,
        on_device=on_device,
    )


def _lanes(events: list[dict[str, Any]]) -> tuple[dict[str, np.ndarray], bool]:
    """Spans [n, 2] of the whole trace by kind, unsorted, and whether they are of GPU kernels."""
    kernels = events_of(events, "kernel")
    compute: list[dict[str, Any]] = []
    communication: list[dict[str, Any]] = []
    if kernels:
        for kernel in kernels:
            if _COLLECTIVE_KERNEL.search(kernel["name"]):
                communication.append(kernel)
            else:
                compute.append(kernel)
        copies = events_of(events, *_COPIES)
    else:
        operators = events_of(events, "cpu_op")
        compute = [event for event in operators if _computes(event["name"])]
        communication = [event for event in events if _CPU_COLLECTIVE.match(event["name"])]
        copies = [event for event in operators if event["name"] == "aten::copy_"]
    lanes = {
        "compute": _spans(compute),
        "communication": _spans(communication),
        "copies": _spans(copies),
    }
    return lanes, bool(kernels)


def events_of(events: list[dict[str, Any]], *categories: str) -> list[dict[str, Any]]:
    """The events of some categories."""
    return [event for event in events if event.get("cat") in categories]


def _computes(name: str) -> bool:
    """Whether an operator of a CPU computes; functions of autograd may wait for a collective."""
    namespace, separator, _ = name.partition("::")
    if not separator:
        return False
    return namespace not in _NOT_COMPUTE and not namespace.startswith("_c10d")


def _parts(a: Spans, b: Spans, *, wanted: bool) -> Spans:
    """The times of `a` that are also in `b`; with `wanted=False` the times that are not in `b`."""
    bounds = np.unique(np.concatenate([a.ravel(), b.ravel()]))
    middles = (bounds[1:] + bounds[:-1]) / 2
    kept = _contains(a, middles) & (_contains(b, middles) == wanted)
    starts = bounds[:-1][kept]
    ends = bounds[1:][kept]
    return union(np.stack([starts, ends], axis=1))


def _contains(spans: Spans, times: np.ndarray) -> np.ndarray:
    """For each time, whether it is in one of the spans."""
    begun = np.searchsorted(spans[:, 0], times, side="right")
    ended = np.searchsorted(spans[:, 1], times, side="right")
    return np.greater(begun, ended)


def _marked_steps(events: list[dict[str, Any]]) -> dict[int, np.ndarray]:
    """Times of each marked step: of its kernels where the trace has them, else on the host."""
    marks = [event for event in events if re.fullmatch(rf"{STEP}\d+", event["name"])]
    marks = events_of(marks, "gpu_user_annotation") or marks
    marks_of_step: dict[int, list[dict[str, Any]]] = {}
    for event in marks:
        step = int(event["name"].removeprefix(STEP))
        marks_of_step.setdefault(step, []).append(event)
    return {step: _spans(events) for step, events in marks_of_step.items()}


def _spans(events: Iterable[dict[str, Any]]) -> np.ndarray:
    """Start and end of events, [n, 2]."""
    times = [(event["ts"], event["ts"] + event["dur"]) for event in events]
    return np.array(times, dtype=float).reshape(-1, 2)


def _is_time(value: Any) -> bool:
    """Whether a value can be a time."""
    return isinstance(value, int | float) and abs(value) <= LARGEST


def _is_complete(event: dict[str, Any]) -> bool:
    """Whether an event has a name, a start and a duration."""
    if event.get("ph") != "X" or not isinstance(event.get("name"), str):
        return False
    return _is_time(event.get("ts")) and _is_time(event.get("dur"))


def _events(path: Path) -> list[dict[str, Any]]:
    """Complete events ("ph": "X") that have a name and times."""
    try:
        # inputs of operators may be NaN
        trace = parse_json(read_file(path, follows_links=False), allow_nan=True)
        return [event for event in trace["traceEvents"] if _is_complete(event)]
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"it is no trace of torch's profiler ({error})"
    raise EnvironmentFault(
        f"{path} cannot be read", why=reason, fix="profile the run again with --profile"
    )
