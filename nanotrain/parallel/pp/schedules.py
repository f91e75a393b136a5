"""The schedules by name, each a pure function from a `PipelineShape` to a `Schedule`.

name         holds at most, per rank r of p          bubble / ideal time     (v stages per rank, m microbatches)
one_stage    1 microbatch                            0
gpipe        m                                       (p - 1) / m
1f1b         p - r                                   (p - 1) / m
interleaved  (2(p - r - 1) + (v - 1)p + 1) / v       (p - 1) / (v m)
zb-h1        p - r, and r more without their input   (p - 1)(F + B - W) / (m (F + B + W))
"""

from collections.abc import Callable

from nanotrain.parallel.pp.actions import PipelineShape, Schedule, backward, forward
from nanotrain.parallel.pp.gpipe import gpipe
from nanotrain.parallel.pp.interleaved import interleaved
from nanotrain.parallel.pp.one_f_one_b import one_f_one_b
from nanotrain.parallel.pp.zero_bubble import zero_bubble_h1


def one_stage(shape: PipelineShape) -> Schedule:
    """The schedule without a pipeline: each microbatch forward, then backward, so one lives at a time.

    >>> [str(action) for action in one_stage(PipelineShape(1, 1, 2)).actions[0]]
    ['F0.0', 'B0.0', 'F0.1', 'B0.1']
    """
    assert shape.num_stages == 1, "several stages have an order to choose; 1f1b is this one for a single stage"
    return Schedule((tuple(make(0, m) for m in range(shape.num_microbatches) for make in (forward, backward)),))


SCHEDULES: dict[str, Callable[[PipelineShape], Schedule]] = {
    "one_stage": one_stage,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zero_bubble_h1,
}
