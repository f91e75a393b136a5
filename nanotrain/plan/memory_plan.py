"""Memory of a rank at the peak of a step, before a run starts (docs/memory.md).

    plan_memory      MemoryPlan of one rank
    worst_memory     MemoryPlan of the pipeline rank that needs the most
    memory_of        the same as `plan_memory`, for a topology and a shape that are there
    peak_of_step     the moment of a schedule with the most activations and temporaries
    plan_graphs      bytes of the CUDA graphs of a rank, and of what its stages keep besides
    slots_of         microbatches of each stage between forward and backward, at most

The graphs of a part keep their inputs, outputs and saved tensors between steps, and their
temporaries in a pool of their own, beside those of operators outside of graphs. What their forwards
save stays allocated for every microbatch in flight.

Parameters, gradients and optimizer state are exact, the rest is estimated. Pure: nothing is
allocated. The error of a run that does not fit is in fitting.py.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from nanotrain.config.config import Config
from nanotrain.config.schedules import num_microbatches as count_microbatches
from nanotrain.parallel.dp.units import traced_units
from nanotrain.parallel.pp.actions import Action, ActionKind, PipelineShape, Schedule
from nanotrain.parallel.pp.executor import MAX_SENDS
from nanotrain.parallel.pp.schedules import build_schedule
from nanotrain.plan.buffers import with_fp8_products
from nanotrain.plan.compile import with_compile
from nanotrain.plan.model_plan import ModelPlan, plan_model
from nanotrain.plan.plan import check_names
from nanotrain.plan.saved_bytes import SavedBytes, StageBytes, held_by_routers
from nanotrain.precision.dtypes import Precision
from nanotrain.quantities import describe_bytes
from nanotrain.spec.layer_sizes import INT64
from nanotrain.spec.shape import ModelShape
from nanotrain.spec.stages import StageSpec
from nanotrain.topology.groups import UNCONNECTED
from nanotrain.topology.replays import require_replicas
from nanotrain.topology.topology import Topology

# cpu: measured with a tiny model, libraries in its first steps; cuda: workspaces of cuBLAS, which
# torch allocates on compute capability 9.0 for the thread of the forward and for the thread of the
# backward, and the rest of blocks that its allocator does not split (0 to 15 MB over the
# layouts of docs/gpu.md)
PROCESS_BYTES = {"cpu": 75_000_000, "cuda": 2 * 32 * 2**20 + 16_000_000}
# Memory of a GPU that a process takes besides tensors. The context, with the kernels of torch,
# cuBLAS and cuDNN that are loaded as they are used: 0.5 to 0.8 GB. The channels of an NCCL
# communicator: 0.2 to 0.4 GB.
CONTEXT_BYTES = 700 * 2**20
NCCL_BYTES = 256 * 2**20
# Share of the tensors: reserved memory exceeds allocated memory by 2 to 7 % in the runs that
# SimuMax measured.
FRAGMENTS = 0.03
# gradients that parts of layers with experts share: of the input and the output of the shared
# expert, and of the input of the router
EXPERT_BUFFERS = 3
LINK_BUFFERS = 1  # the gradient between parts
ROWS = ("params", "grads", "optimizer", "activations", "working", "communication", "overhead")
OPTIONAL_ROWS = ("communication", "overhead")  # rows that are left out where they are empty
built_schedule = lru_cache(maxsize=64)(build_schedule)  # layouts that differ elsewhere share one


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank at the peak of a step."""

    pp_rank: int
    params: int  # and the buffers of routers
    grads: int
    optimizer: int
    activations: int  # kept from forward to backward, at the peak of the schedule
    working: int  # temporaries, the tokens of a step, and libraries of the process on a CPU
    communication: int  # pipeline messages, full-size gradient buckets, gathered units
    runtime: int  # on a GPU its context and NCCL
    host: int = 0  # memory of the host for memory checkpoints; on a CPU, `working` has it too
    in_flight: int = 0  # forwards whose activations are kept at that peak
    recompute: str = ""  # what is recomputed, as the user sets it; empty for nothing
    unplanned: str = ""  # large memory that the plan leaves out

    @property
    def total(self) -> int:
        """Bytes of all tensors."""
        return self.certain(1.0) - self.runtime + self.working + self.communication

    @property
    def overhead(self) -> int:
        """Memory besides tensors: `runtime` and the fragments of a GPU's allocator."""
        fragments = int(FRAGMENTS * self.total) if self.runtime > 0 else 0
        return self.runtime + fragments

    @property
    def reserved(self) -> int:
        """Tensors and overhead."""
        return self.total + self.overhead

    def certain(self, share: float) -> int:
        """The exact part, the runtime and a share of the activations."""
        exact = self.params + self.grads + self.optimizer + self.runtime
        return exact + int(share * self.activations)

    def rows(self) -> dict[str, str]:
        """The rows of the table by name; without communication and overhead if there is none."""
        rows = {}
        for name in ROWS:
            size = getattr(self, name)
            if size or name not in OPTIONAL_ROWS:
                rows[name] = describe_bytes(size)
        return rows

    def table(self, available: int | None, *, pp_size: int = 1) -> str:
        """A small table, with the pipeline rank that needs the most if there are several."""
        title = "planned memory per rank"
        if pp_size > 1:
            title += f" (pipeline rank {self.pp_rank} needs the most)"
        lines = [f"{title}:"]
        for name, size in self.rows().items():
            line = f"  {name:<14}{size:>12}"
            if name == "activations":
                line += f"  {self.in_flight} in flight"
                line += f", recompute {self.recompute}" if self.recompute else ""
            lines.append(line)
        total = f"  {'total':<14}{describe_bytes(self.reserved):>12}"
        lines.append(f"{total} of {describe_bytes(available)}" if available else total)
        if self.unplanned:
            lines.append(f"  without {self.unplanned}")
        return "\n".join([*lines, *self.host_lines()])

    def host_lines(self) -> list[str]:
        """The memory of the host for memory checkpoints; empty without them."""
        return describe_host_memory(self.host)


def plan_memory(
    config: Config, world_size: int, *, pp_rank: int, device: str, schedule: Schedule | None = None
) -> MemoryPlan:
    """The memory of each rank with one pipeline coordinate.

    Args:
        config: a validated configuration with the vocabulary size set.
        world_size: ranks of the run.
        pp_rank: the coordinate.
        device: "cpu" or "cuda".
        schedule: `train_schedule` of these arguments, where it was built before.
    """
    topology, shape = _open(config, world_size)
    return memory_of(
        config, topology, shape=shape, pp_rank=pp_rank, device=device, schedule=schedule
    )


def _open(config: Config, world_size: int) -> tuple[Topology, ModelShape]:
    """The ranks and the model that all ranks of a run share.

    Raises:
        ConfigError: an unknown name, or replays without replicas.
        TopologyError: a layout that does not fit the ranks.
    """
    check_names(config)
    topology = Topology.of(config.parallel, world_size, has_experts=config.model.moe is not None)
    require_replicas(topology, replay_interval=config.train.replay_interval)
    return topology, ModelShape.of(config.model)


def memory_of(
    config: Config,
    topology: Topology,
    *,
    shape: ModelShape,
    pp_rank: int,
    device: str,
    schedule: Schedule | None = None,
) -> MemoryPlan:
    """`plan_memory` of a run whose names were checked.

    Args:
        config: a validated configuration with the vocabulary size set.
        topology: ranks of the run.
        shape: sizes of its model.
        pp_rank: pipeline coordinate.
        device: "cpu" or "cuda".
        schedule: `train_schedule`, where it was built before.
    """
    num_microbatches = count_microbatches(config.train, topology.dense.size("dp"))
    rank = topology.members(0, "pp")[pp_rank]
    plan = plan_model(config, topology, shape=shape, rank=rank)
    kept = SavedBytes(plan, device)
    resident = plan.resident_bytes
    peak = peak_of(plan, kept, schedule=schedule or _schedule(config, num_microbatches))

    token_bytes = 3 * INT64 * kept.sizes.tokens * num_microbatches
    working = PROCESS_BYTES[device] + peak.working + token_bytes
    if device == "cpu" and config.checkpoint.async_save:
        # the largest copy of an asynchronous save: main params and optimizer state, in host memory
        working += resident.params + resident.optimizer
    saved = resident.params + resident.optimizer
    host = memory_checkpoint_bytes(config, topology.world_size, state=saved)
    if device == "cpu":
        working += host
    communication = resident.grad_buckets + resident.units + returned_by_graphs(plan, device)
    if topology.dense.size("pp") > 1:
        hidden_states = kept.sizes.outside * kept.sizes.itemsize
        communication += 2 * MAX_SENDS * hidden_states * max(plan.message_widths)
    runtime = 0
    if device == "cuda":
        runtime = runtime_bytes(_num_communicators(plan))
    params = resident.params + held_by_routers(plan)
    if device == "cuda" and plan.keeps_fp8_weights(num_microbatches):
        params += _fp8_weight_bytes(plan)
    return MemoryPlan(
        pp_rank=pp_rank,
        params=params,
        grads=resident.grads,
        optimizer=resident.optimizer,
        activations=peak.activations,
        working=working,
        communication=communication,
        runtime=runtime,
        host=host,
        in_flight=peak.in_flight,
        recompute=_describe_recompute(config),
        unplanned="the records of --profile" if config.train.profile else "",
    )


def _fp8_weight_bytes(plan: ModelPlan) -> int:
    """Bytes of the fp8 copies of weights, one plain and one transposed, 1 byte per element."""
    numel = 0
    for stage in plan.stages:
        numel += sum(param.box.numel for param in with_fp8_products(stage.params, plan.config))
    return 2 * numel


def _describe_recompute(config: Config) -> str:
    """Recomputation as the user sets it; empty for none."""
    granularity = config.memory.recompute_granularity
    if granularity is None:
        return ""
    return " ".join([granularity, *config.memory.recomputed_modules])


def runtime_bytes(num_communicators: int) -> int:
    """The context of a GPU, and NCCL."""
    return CONTEXT_BYTES + num_communicators * NCCL_BYTES


def _num_communicators(plan: ModelPlan) -> int:
    """Distinct sets of several ranks over which a rank communicates."""
    sets = set()
    for name, spec in plan.groups.items():
        if spec.size > 1 and name not in UNCONNECTED:
            sets.add(spec.ranks)
    return len(sets)


def worst_memory(config: Config, world_size: int, *, device: str) -> MemoryPlan:
    """The memory of the pipeline rank that needs the most; arguments as for `plan_memory`."""
    topology, shape = _open(config, world_size)
    schedule = train_schedule(config, world_size)
    plans = []
    for pp_rank in range(topology.dense.size("pp")):
        plan = memory_of(
            config, topology, shape=shape, pp_rank=pp_rank, device=device, schedule=schedule
        )
        plans.append(plan)
    return max(plans, key=lambda plan: plan.total)


def train_schedule(config: Config, world_size: int) -> Schedule:
    """The pipeline schedule of a training step, of all pipeline ranks."""
    dp_size = config.parallel.data_parallel_size(world_size)
    return _schedule(config, count_microbatches(config.train, dp_size))


def _schedule(config: Config, num_microbatches: int) -> Schedule:
    """The pipeline schedule of a step of some microbatches."""
    pipeline = PipelineShape.of(config.parallel, num_microbatches)
    return built_schedule(config.parallel.pipeline_schedule, pipeline)


class Peak(NamedTuple):
    """Activation and working bytes at one moment of a step, and the microbatches in flight."""

    activations: int
    in_flight: int
    working: int

    @property
    def total(self) -> int:
        """All bytes of the moment."""
        return self.activations + self.working


def peak_of(plan: ModelPlan, kept: SavedBytes, *, schedule: Schedule) -> Peak:
    """The peak of a training step, or of a validation."""
    actions = list(schedule.freeing_first(plan.groups["pp"].index))
    graphs = plan_graphs(plan, kept, actions=actions)
    evaluates = plan.config.evaluates and any(stage.spec.has_head for stage in plan.stages)
    evaluation = Peak(0, 0, kept.loss_working(is_training=False) if evaluates else 0)
    step = peak_of_step(actions, graphs.stages)
    peak = max(evaluation, step, key=lambda peak: peak.total)
    activations = peak.activations + graphs.saved
    return Peak(activations, peak.in_flight, peak.working + graphs.working)


def peak_of_step(actions: Iterable[Action], stages: Mapping[int, StageBytes]) -> Peak:
    """The moment of a training step with the most kept bytes and temporaries.

    A backward recomputes first. From I to W as much is kept as without recomputation.

    Args:
        actions: actions of a rank, in order.
        stages: bytes of its stages, by index.
    """
    kept = 0
    in_flight = 0
    peak = Peak(0, 0, 0)
    for action in actions:
        stage = stages[action.stage]
        if action.kind.has_dgrad:
            during = Peak(kept + stage.recomputed - stage.freed, in_flight, stage.working)
            peak = max(peak, during, key=lambda moment: moment.total)
        kept += _kept_change(action.kind, stage)
        in_flight += 1 if action.kind is ActionKind.forward else 0
        in_flight -= 1 if action.kind.has_wgrad else 0
        loss = stage.loss if action.kind is ActionKind.forward else 0
        peak = max(peak, Peak(kept, in_flight, loss), key=lambda moment: moment.total)
    return peak


def _kept_change(kind: ActionKind, stage: StageBytes) -> int:
    """Change of the kept bytes by an action."""
    changes = {
        ActionKind.forward: stage.kept,
        ActionKind.full_backward: -stage.kept,
        ActionKind.backward_input: stage.complete - stage.kept,
        ActionKind.backward_weight: -stage.complete,
    }
    return changes[kind]


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
    """The bytes of the graphs of a rank; all tensors that blocks save count as those of graphs.

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
        temporaries = max(temporaries, blocks.recomputed + kept.block_working())
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


def memory_checkpoint_bytes(config: Config, world_size: int, *, state: int) -> int:
    """Bytes in the memory of the host of a rank for memory checkpoints, at most.

    The copy from which a save is written, and two checkpoints: the last one and the one that is
    being written, each with the shard of a rank of another host.

    Args:
        config: configuration of the run.
        world_size: ranks of the run; one rank has no partner.
        state: bytes that the rank saves.
    """
    if not config.checkpoint.memory_checkpoint_interval:
        return 0
    num_copies = 2 if world_size > 1 else 1
    return state + 2 * num_copies * state


def describe_host_memory(nbytes: int) -> list[str]:
    """A line below the table of planned memory; none for no bytes."""
    if not nbytes:
        return []
    return [f"  {'host memory':<14}{describe_bytes(nbytes):>12}  at most, per rank"]
