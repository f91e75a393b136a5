"""Memory of a rank at the peak of a step, before a run starts (docs/memory.md).

    plan_memory      MemoryPlan of one rank
    worst_memory     MemoryPlan of the pipeline rank that needs the most
    memory_of        the same as `plan_memory`, for a topology and a shape that are there
    peak_of_step     the moment of a schedule with the most activations and temporaries

Parameters, gradients and optimizer state are exact, the rest is estimated. Pure: nothing is
allocated. The error of a run that does not fit is in fitting.py.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from nanotrain.config.config import Config
from nanotrain.config.schedules import num_microbatches as count_microbatches
from nanotrain.parallel.pp.actions import Action, ActionKind, PipelineShape, Schedule
from nanotrain.parallel.pp.executor import MAX_SENDS
from nanotrain.parallel.pp.schedules import build_schedule
from nanotrain.plan.buffers import with_fp8_products
from nanotrain.plan.graph_memory import plan_graphs, returned_by_graphs
from nanotrain.plan.host_memory import describe_host_memory, memory_checkpoint_bytes
from nanotrain.plan.model_plan import ModelPlan, plan_model
from nanotrain.plan.plan import plan_topology
from nanotrain.plan.saved_bytes import SavedBytes, StageBytes, held_by_routers
from nanotrain.quantities import describe_bytes
from nanotrain.spec.layer_sizes import INT64
from nanotrain.spec.shape import ModelShape
from nanotrain.topology.groups import UNCONNECTED
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
    recompute: str = ""  # settings of recomputation, as the user writes them; empty for none
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
    topology = plan_topology(config, world_size)
    shape = ModelShape.of(config.model)
    return memory_of(
        config, topology, shape=shape, pp_rank=pp_rank, device=device, schedule=schedule
    )


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
    topology = plan_topology(config, world_size)
    shape = ModelShape.of(config.model)
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
    evaluation = Peak(0, 0, kept.loss_temporaries(is_training=False) if evaluates else 0)
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
