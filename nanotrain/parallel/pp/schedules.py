"""The pipeline schedules by name, each a pure function from a `PipelineShape` to a `Schedule`.

name         peak microbatches in flight, rank r of p   bubble / ideal time     (v stages per rank, m microbatches)
gpipe        m                                          (p - 1) / m
1f1b         p - r                                      (p - 1) / m
interleaved  (2(p - r - 1) + (v - 1)p + 1) / v          (p - 1) / (v m)
zb-h1        p - r, and r more without their input      (p - 1)(F + I - W) / (m (F + I + W))

A new schedule is one file and one row of SCHEDULES.
"""

from collections.abc import Callable

from nanotrain.parallel.pp.actions import PipelineShape, Schedule
from nanotrain.parallel.pp.gpipe import gpipe
from nanotrain.parallel.pp.interleaved import interleaved
from nanotrain.parallel.pp.one_f_one_b import one_f_one_b
from nanotrain.parallel.pp.zero_bubble import zero_bubble_h1

SCHEDULES: dict[str, Callable[[PipelineShape], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
}


def build_schedule(name: str, shape: PipelineShape) -> Schedule:
    """The schedule `name`; with a single stage always 1f1b, which keeps the activations of one microbatch at a time.

    Raises:
        ScheduleError: a number of stages per rank that the schedule does not support.

    >>> [str(action) for action in build_schedule("gpipe", PipelineShape(1, 1, 2))]
    ['F0.0', 'B0.0', 'F0.1', 'B0.1']
    """
    return one_f_one_b(shape) if shape.num_stages == 1 else SCHEDULES[name](shape)
