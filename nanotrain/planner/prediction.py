"""Memory and time of a scenario."""

from dataclasses import dataclass

from nanotrain.planner.memory import MemoryEstimate
from nanotrain.planner.scenario import Scenario
from nanotrain.planner.step_time import StepTime


@dataclass(frozen=True)
class Prediction:
    """What the planner says about one scenario."""

    scenario: Scenario
    memory: MemoryEstimate
    time: StepTime
