"""`RankClock`: how long memory-bound operators and collectives of one rank of a scenario take."""

from dataclasses import replace

from nanotrain.plan.saved_bytes import cast_recipe
from nanotrain.planner.collectives import collective_s
from nanotrain.planner.kernels import BYTES, memory_s
from nanotrain.planner.parts import Part
from nanotrain.planner.scenario import Scenario
from nanotrain.spec.layer_sizes import LayerSizes


def scenario_sizes(scenario: Scenario) -> LayerSizes:
    """The sizes of a rank, with the tokens of the busiest expert-parallel rank."""
    sizes = LayerSizes.of(scenario.config, scenario.shape, sizes=scenario.sizes)
    if scenario.engine.name == "nanotrain" and not scenario.machine.is_cpu:
        sizes = replace(sizes, cast_recipe=cast_recipe(scenario.config, scenario.sizes))
    moe = scenario.shape.moe
    if moe is None:
        return sizes
    routed_rows = int(sizes.routed_tokens * moe.mean_topk * scenario.imbalance)
    expert_rows = int(routed_rows * scenario.padding)
    return replace(sizes, routed_rows=routed_rows, expert_rows=expert_rows)


class RankClock:
    """Times of one rank.

    Args:
        scenario: configuration, machine and engine.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.config = scenario.config
        self.engine = scenario.engine
        self.gpu = scenario.machine
        self.dtype = scenario.config.precision.params_dtype
        self.sizes = scenario_sizes(scenario)

    def collective(self, name: str, operation: str, *, num_bytes: float) -> float:
        """Seconds of a collective over the group of an axis."""
        ranks = self.scenario.ranks(name)
        seconds = collective_s(self.gpu, operation, num_bytes=num_bytes, ranks=ranks)
        if name == "tp" and self.sizes.tp > self.gpu.gpus_per_node:
            seconds += len(ranks) * self.engine.network.device_stall_s
        return seconds

    def memory(
        self, name: str, forward: float, *, backward: float, launches: tuple[int, int] = (1, 1)
    ) -> Part:
        """A memory-bound operator, by the bytes that it reads and writes.

        Args:
            name: name of the part.
            forward: bytes of the forward.
            backward: bytes of the backward.
            launches: kernels of forward and backward.
        """
        # a CPU computes in fp32
        widening = BYTES["fp32"] / self.sizes.itemsize if self.gpu.is_cpu else 1
        forward_s = memory_s(self.gpu, forward * widening) if forward else 0.0
        backward_s = memory_s(self.gpu, backward * widening) if backward else 0.0
        return Part(name, forward_s, backward_s, launches=(*launches, 0), num_bytes=forward)
