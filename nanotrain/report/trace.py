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
    """Times that are in both.

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
    number = max(steps, default=0) if step is None else step
    bounds = steps.get(number, np.concatenate(list(lanes.values())))
    if not len(bounds):
        why, fix = "it has neither kernels nor operators", "profile a run with --profile"
        raise EnvironmentFault(f"{path} shows no work", why=why, fix=fix)
    start, end = float(bounds[:, 0].min()), float(bounds[:, 1].max())
    compute, communication, copies = (
        clip(union(spans), start=start, end=end) for spans in lanes.values()
    )
    if not on_device:  # on a CPU copies are operators too
        compute = without(compute, copies)
    hidden, exposed = overlap(communication, compute), without(communication, compute)
    return RankStep(rank, number, end - start, compute, hidden, exposed, copies, on_device)


def _lanes(events: list[dict[str, Any]]) -> tuple[dict[str, np.ndarray], bool]:
    """Times of the whole trace by kind, [n, 2] in any order, and whether they are those of kernels."""
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if kernels:
        compute = [event for event in kernels if not _COLLECTIVE_KERNEL.search(event["name"])]
        collective = [event for event in kernels if _COLLECTIVE_KERNEL.search(event["name"])]
        copies = [event for event in events if event.get("cat") in _COPIES]
    else:
        operators = [event for event in events if event.get("cat") == "cpu_op"]
        compute = [event for event in operators if _computes(event["name"])]
        collective = [event for event in events if _CPU_COLLECTIVE.match(event["name"])]
        copies = [event for event in operators if event["name"] == "aten::copy_"]
    lanes = {"compute": compute, "communication": collective, "copies": copies}
    return {kind: _spans(chosen) for kind, chosen in lanes.items()}, bool(kernels)


def _computes(name: str) -> bool:
    """Whether an operator of a CPU computes; functions of autograd may wait for a collective."""
    namespace, has_namespace, _ = name.partition("::")
    return (
        bool(has_namespace) and namespace not in _NOT_COMPUTE and not namespace.startswith("_c10d")
    )


def _parts(a: Spans, b: Spans, *, wanted: bool) -> Spans:
    """The times of `a` that are also in `b`, or with `wanted=False` those that are not."""
    bounds = np.unique(np.concatenate([a.ravel(), b.ravel()]))
    middles = (bounds[1:] + bounds[:-1]) / 2
    kept = _holds(a, middles) & (_holds(b, middles) == wanted)
    return union(np.stack([bounds[:-1][kept], bounds[1:][kept]], axis=1))


def _holds(spans: Spans, times: np.ndarray) -> np.ndarray:
    """For each time, whether it is in one of the spans."""
    begun = np.searchsorted(spans[:, 0], times, side="right")
    ended = np.searchsorted(spans[:, 1], times, side="right")
    return np.greater(begun, ended)


def _marked_steps(events: list[dict[str, Any]]) -> dict[int, np.ndarray]:
    """Times of each marked step: those of its kernels where the trace has them, otherwise those on
    the host.
    """
    marks = [event for event in events if re.fullmatch(rf"{STEP}\d+", event["name"])]
    chosen = [event for event in marks if event.get("cat") == "gpu_user_annotation"] or marks
    names = {event["name"] for event in chosen}
    return {
        int(name.removeprefix(STEP)): _spans(event for event in chosen if event["name"] == name)
        for name in names
    }


def _spans(events: Iterable[dict[str, Any]]) -> np.ndarray:
    times = [(event["ts"], event["ts"] + event["dur"]) for event in events]
    return np.array(times, dtype=float).reshape(-1, 2)


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= LARGEST


def _events(path: Path) -> list[dict[str, Any]]:
    """Complete events ("ph": "X") that have a name and times."""
    try:
        # inputs of operators may be NaN
        trace = parse_json(read_file(path, follows_links=False), allow_nan=True)
        events = trace["traceEvents"]
        complete = [
            event
            for event in events
            if event.get("ph") == "X" and isinstance(event.get("name"), str)
        ]
        return [
            event for event in complete if all(_is_time(event.get(key)) for key in ("ts", "dur"))
        ]
    except OSError as error:
        reason = error.strerror or str(error)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"it is no trace of torch's profiler ({error})"
    raise EnvironmentFault(
        f"{path} cannot be read", why=reason, fix="profile the run again with --profile"
    )
