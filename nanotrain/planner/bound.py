"""`Bound`: a lower bound of the memory of a layout, a thousand times faster than its plan."""

from collections import defaultdict
from functools import cache

from nanotrain.planner.scenario import Scenario
from nanotrain.train.plans.activations import Activations
from nanotrain.train.plans.plan import Plan

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")  # by what they shard


class Bound:
    """A lower bound of the memory of the first pipeline rank, from the plan of a model without pipeline parallelism.

    Left out are buckets, gathered units, temporaries and what is not allocated by tensors.

    Args:
        plan: plan with the sizes of tp, cp, ep and etp and a micro-batch of 1; state sharded over data parallelism.
    """

    def __init__(self, plan: Plan) -> None:
        self._numel = defaultdict[tuple[str, bool], int](int)
        for param in plan.stages[0].params:
            self._numel[param.spec.unit, param.spec.is_expert] += param.box.numel
        resident, layouts = plan.resident_bytes, [(each.layout.numel, each.shard.size) for each in plan.buffers]
        total = sum(numel for numel, _ in layouts)
        self._params, self._grads = resident.params / total, resident.grads / total
        self._optimizer = resident.optimizer / sum(numel / size for numel, size in layouts)
        self._kept = Activations(plan, "cuda")
        self._block = cache(self._kept.block)

    def of(self, scenario: Scenario) -> int:
        """Bytes of a scenario."""
        return int(self._state(scenario) + self._activations(scenario))

    def _state(self, scenario: Scenario) -> float:
        level = STRATEGIES.index(scenario.config.parallel.data_parallel_sharding_strategy)
        instances = scenario.config.parallel.num_distributed_optimizer_instances
        units = ["embedding", *(f"layers.{layer}" for stage in scenario.stages[0] for layer in stage.layers)]
        shards = scenario.sizes["dp"] * scenario.sizes["cp"], scenario.sizes["expert_dp"]
        total = 0.0
        for is_expert, size in enumerate(shards):
            numel, size = sum(self._numel[unit, is_expert > 0] for unit in units), size // instances
            per_element = (self._optimizer, self._grads, self._params)
            total += sum(numel * num / (size if level > index else 1) for index, num in enumerate(per_element))
        return total

    def _activations(self, scenario: Scenario) -> float:
        memory, stages = scenario.config.memory, scenario.stages[0]
        if memory.recompute_granularity == "full":
            kept = sum(len(stage.layers) for stage in stages) * self._kept.outside * self._kept.width
        else:
            modules = frozenset(memory.recomputed_modules)
            kept = sum(self._block(layer, modules) for stage in stages for layer in stage.layers)
        shape, virtual = scenario.pipeline, scenario.pipeline.num_stages_per_rank
        chunks = shape.num_ranks * virtual  # of the first rank, and of all ranks of a V
        if scenario.config.parallel.pipeline_schedule == "interleaved":
            chunks += shape.num_ranks - 1
        kept *= scenario.config.train.micro_batch_size
        return kept * min(shape.num_microbatches * virtual, chunks) / virtual
