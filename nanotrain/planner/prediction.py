"""`predict`: time of a step and peak memory of the heaviest rank of a scenario.

estimate_memory    MemoryPlan of the pipeline rank that needs the most
memory_of_rank     MemoryPlan of the ranks of one pipeline stage

Memory of engine nanotrain: the numbers that a run plans before it starts (plan/). Memory of other
engines: program_memory.py.
"""

from dataclasses import dataclass, replace

from nanotrain.parallel.pp.actions import Schedule
from nanotrain.plan.memory_plan import MemoryPlan, built_schedule, memory_of
from nanotrain.planner.program_memory import memory_of_program
from nanotrain.planner.scenario import Scenario
from nanotrain.planner.step_time import StepTime, predict_step


@dataclass(frozen=True)
class Prediction:
    """Predicted time and memory of one scenario."""

    scenario: Scenario
    memory: MemoryPlan
    time: StepTime

    @property
    def headroom(self) -> int:
        """Bytes of the GPU that are left; negative where they do not suffice."""
        return self.scenario.gpu.memory_bytes - self.memory.reserved


def predict(scenario: Scenario) -> Prediction:
    """Memory and time of a scenario."""
    memory = estimate_memory(scenario)
    time = predict_step(scenario, memory_share=memory.total / scenario.gpu.memory_bytes)
    return Prediction(scenario, memory, time)


def estimate_memory(scenario: Scenario) -> MemoryPlan:
    """The memory of the pipeline rank that needs the most."""
    plans = (memory_of_rank(scenario, rank) for rank in range(scenario.sizes["pp"]))
    return max(plans, key=lambda plan: plan.total)


def memory_of_rank(scenario: Scenario, pp_rank: int) -> MemoryPlan:
    """The memory of the ranks of a pipeline stage."""
    schedule = _in_flight_schedule(scenario)
    if scenario.engine.name != "nanotrain":
        return memory_of_program(scenario, pp_rank, schedule=schedule)
    return memory_of(
        scenario.config,
        scenario.topology,
        shape=scenario.shape,
        pp_rank=pp_rank,
        device="cuda",
        schedule=schedule,
    )


def _in_flight_schedule(scenario: Scenario) -> Schedule:
    """The schedule, with at most as many microbatches as its peak in flight needs."""
    name = scenario.config.parallel.pipeline_schedule
    shape = scenario.pipeline
    if name != "gpipe":
        shape = replace(shape, num_microbatches=min(shape.num_microbatches, 4 * shape.num_ranks))
    return built_schedule(name, shape)
