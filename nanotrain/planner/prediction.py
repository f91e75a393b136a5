"""Memory and time of a scenario."""

from dataclasses import dataclass

from nanotrain.planner.memory import MemoryEstimate, estimate_memory
from nanotrain.planner.scenario import Scenario
from nanotrain.planner.step_time import StepTime, predict_step


@dataclass(frozen=True)
class Prediction:
    """What the planner says about one scenario."""

    scenario: Scenario
    memory: MemoryEstimate
    time: StepTime


def predict(scenario: Scenario) -> Prediction:
    """Memory and time of a scenario."""
    memory = estimate_memory(scenario)
    return Prediction(scenario, memory, predict_step(scenario, memory_share=memory.total / memory.capacity))
