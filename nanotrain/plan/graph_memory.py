"""Memory of CUDA graphs: what their forwards save stays allocated for every microbatch in flight.

    plan_graphs   bytes of the graphs of a rank, and of what its stages keep besides
    slots_of      microbatches of each stage between forward and backward, at most
    returned_by_graphs   gradients that the graph of a compiled block returns

The graphs of a part keep their inputs, outputs and saved tensors between steps, and their
temporaries in a pool of their own, beside those of operators outside of graphs.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from nanotrain.parallel.dp.units import traced_units
from nanotrain.parallel.pp.actions import Action, ActionKind
from nanotrain.plan.compile import with_compile
from nanotrain.plan.model_plan import ModelPlan
from nanotrain.plan.saved_bytes import SavedBytes, StageBytes
from nanotrain.precision.dtypes import Precision
from nanotrain.spec.stages import StageSpec

# gradients that parts of layers with experts share: of the input and the output of the shared
# expert, and of the input of the router
EXPERT_BUFFERS = 3
LINK_BUFFERS = 1  # the gradient between parts


@dataclass(frozen=True)
class GraphBytes:
    """Bytes of the graphs of a rank."""

    stages: Mapping[int, StageBytes]  # bytes of the stages that are not in graphs, by index
    saved: int = 0  # saved tensors of all slots
    buffers: int = 0  # inputs and outputs at the ends of stages, and gradients
    temporaries: int = 0  # of the largest graph

    @property
    def working(self) -> int:
        """Bytes besides saved tensors."""
        return self.buffers + self.temporaries


def plan_graphs(plan: ModelPlan, kept: SavedBytes, *, actions: Sequence[Action]) -> GraphBytes:
    """The bytes of the graphs of a rank; all tensors that blocks save count as saved by graphs.

    Args:
        plan: plan of the rank.
        kept: bytes that its stages save.
        actions: actions of the rank in a step.
    """
    specs = {stage.spec.index: stage.spec for stage in plan.stages}
    stages = {index: kept.stage(spec) for index, spec in specs.items()}
    if plan.config.train.cuda_graph_impl == "none":
        return GraphBytes(stages)
    slots = slots_of(actions)
    saved = 0
    buffers = _returned_bytes(plan)
    temporaries = 0
    outside = {}
    for index, stage in stages.items():
        spec = specs[index]
        blocks = kept.blocks(spec.layers)
        saved += slots[index] * blocks.kept
        buffers += _hidden_states(plan, kept, spec=spec, num_slots=slots[index])
        temporaries = max(temporaries, blocks.recomputed + kept.block_temporaries())
        # what the previous stage has sent, beside its static copy
        message = 0 if spec.has_embedding else kept.sizes.outside * kept.sizes.width
        outside[index] = replace(
            stage,
            kept=stage.kept - blocks.kept + message,
            complete=stage.complete - blocks.kept + message,
            recomputed=0,
            working=0,
        )
    return GraphBytes(outside, saved, buffers, temporaries)


def slots_of(actions: Iterable[Action]) -> Counter[int]:
    """The most microbatches between forward and backward, by stage."""
    in_flight: Counter[int] = Counter()
    slots: Counter[int] = Counter()
    for action in actions:
        if action.kind is ActionKind.forward:
            in_flight[action.stage] += 1
        elif action.kind.has_dgrad:
            in_flight[action.stage] -= 1
        slots[action.stage] = max(slots[action.stage], in_flight[action.stage])
    return slots


def _hidden_states(plan: ModelPlan, kept: SavedBytes, *, spec: StageSpec, num_slots: int) -> int:
    """Bytes of the static inputs, outputs and gradients of the parts of a stage."""
    num_experts = sum(plan.shape.has_experts(layer) for layer in spec.layers)
    # the output of the last layer, and the inputs of routers and shared experts
    per_slot = 1 + num_experts
    shared = LINK_BUFFERS
    if num_experts:
        shared += EXPERT_BUFFERS
    return (shared + num_slots * per_slot) * kept.sizes.outside * kept.sizes.width


def _returned_bytes(plan: ModelPlan) -> int:
    """Gradients of the largest layer, which graphs return where gradient buffers are borrowed.

    Twice, as hooks take a copy.
    """
    fusion = plan.config.parallel.gradient_accumulation_fusion
    if fusion is not False and not plan.data_parallel.strategy.shard_grads:
        return 0
    numel: Counter[str] = Counter()
    for buffer in plan.buffers:
        for param in buffer.layout.params:
            if param.spec.unit.startswith("layers.") and not param.spec.is_expert:
                numel[param.spec.unit] += param.box.numel
    itemsize = Precision.of(plan.config.precision).params.itemsize
    return 2 * max(numel.values(), default=0) * itemsize


def returned_by_graphs(plan: ModelPlan, device: str) -> int:
    """Bytes of gradients that the graph of the largest compiled block returns.

    Hooks take them after the whole backward of the graph.
    """
    if not with_compile(plan.config, device).train.torch_compile:
        return 0
    options = plan.data_parallel
    itemsize = Precision.of(plan.config.precision).params.itemsize
    num_bytes = 0
    for buffer in plan.trained_buffers:
        traced = traced_units(
            buffer.layout,
            is_transient=options.strategy.shard_grads,
            num_blocks=options.num_gather_blocks,
        )
        returned: Counter[str] = Counter()
        for param in buffer.layout.params:
            unit = param.spec.unit
            is_layer = unit.startswith("layers.")
            if is_layer and not param.spec.is_expert and unit not in traced:
                returned[unit] += param.box.numel
        num_bytes += max(returned.values(), default=0) * itemsize
    return num_bytes
