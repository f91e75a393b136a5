"""Nothing is planned or hashed inside a step: schedules, layouts and groups are the plan's, made
before the first step.

A rank of each layout in a fake world; every call in the package is recorded.
"""

import sys
from types import FrameType
from typing import Any

import pytest

from nanotrain.parallel.pp.actions import Action, PipelineShape
from nanotrain.parallel.pp.schedules import build_schedule
from nanotrain.parallel.pp.transfers import plan_rank
from nanotrain.topology.topology import Topology
from nanotrain.train.run import StepSchedules
from nanotrain.train.step import train_step
from tests.fake_world import fake_context
from tests.harness import SHORT_NAMES, parallel_config
from tests.laws.worlds import Case, build_here

# Files that plan: no function of them runs in a step.
SCHEDULES = ("simulate", "transfers", "schedules", "zero_bubble", "interleaved")
PLANS = ("config/model.py", *(f"parallel/pp/{name}.py" for name in SCHEDULES))
# Files with functions that plan, and objects that a step reads.
PLANS_AND_OBJECTS = ("topology/", "config/schema.py", "parallel/dp/layout.py", "plan/")
VPP = {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2}
LAYOUTS = {
    "interleaved": ({"pp": 2, "strategy": "optim"}, VPP),
    "zero bubble": ({"pp": 2, "strategy": "optim_grads"}, {"pipeline_schedule": "zb-h1"}),
}


class Planned:
    """Calls that plan, or that hash more than an action of a schedule."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __enter__(self) -> "Planned":
        sys.setprofile(self._record)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _record(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call":
            return
        if code.co_name == "__hash__":
            hashed = frame.f_locals.get("self")
            if type(hashed).__module__.startswith("nanotrain.") and not isinstance(hashed, Action):
                self.calls.append(f"hash of {type(hashed).__name__}")
        _, _, path = code.co_filename.rpartition("/nanotrain/")
        is_plan = path.startswith(PLANS)
        if is_plan or (path.startswith(PLANS_AND_OBJECTS) and _is_function(code.co_qualname)):
            self.calls.append(f"{path} {code.co_qualname}")


def _is_function(qualname: str) -> bool:
    return "." not in qualname.partition(".<locals>")[0]


def planned_in_steps(name: str) -> list[str]:
    """The calls of the second and the third step of a layout."""
    sizes, options = LAYOUTS[name]
    parallel = {SHORT_NAMES[key]: value for key, value in sizes.items()} | options
    model, train = {"num_layers": 4}, {"global_batch_size": 2, "micro_batch_size": 1}
    with fake_context(Topology.of(parallel_config(**sizes), 2), 1) as ctx:
        run = build_here(ctx, Case(steps=3).but(parallel=parallel, model=model, train=train))
        first, *batches = [run.batch_iterator.next() for _ in range(3)]
        train_step(run, first)
        with Planned() as planned:
            for batch in batches:
                train_step(run, batch)
        run.batches.close()
    return planned.calls


@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_is_planned_inside_a_step(name: str) -> None:
    assert planned_in_steps(name) == []


def test_planning_inside_a_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan_again(self: StepSchedules, num_microbatches: int) -> Any:
        config, groups = self._plan.config, self._plan.groups
        shape = PipelineShape.of(config.parallel, num_microbatches)
        schedule = build_schedule(config.parallel.pipeline_schedule, shape)
        hash(schedule)  # as the key of a cache would
        return plan_rank(schedule, groups["pp"].index)

    monkeypatch.setattr(StepSchedules, "of", plan_again)
    calls = planned_in_steps("interleaved")
    assert "hash of Schedule" in calls and "parallel/pp/transfers.py plan_rank" in calls
