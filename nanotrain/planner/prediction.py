"""Memory and time of a scenario."""

from dataclasses import dataclass

from nanotrain.plan.memory_plan import MemoryPlan
from nanotrain.planner.memory import estimate_memory
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
