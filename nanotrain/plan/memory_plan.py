"""Memory of a run before it starts, and the error with settings that fit (docs/memory.md).

    plan_memory      MemoryPlan of one rank
    worst_memory     MemoryPlan of the pipeline rank that needs the most
    require_memory   the same, or an error if it cannot fit
    peak_of_step     the moment of a schedule with the most activations and temporaries

Parameters, gradients and optimizer state are exact, the rest is estimated. Pure: nothing is
allocated.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from math import prod
from typing import Any, NamedTuple, get_args

from nanotrain.config.config import Config
from nanotrain.config.parallel import ShardingStrategy
from nanotrain.config.rules.check import check_layout
from nanotrain.config.schedules import num_microbatches as count_microbatches
from nanotrain.config.schedules import with_batch_size
from nanotrain.config.schema import with_values
from nanotrain.errors import ConfigError, NanotrainError
from nanotrain.parallel.pp.actions import Action, ActionKind, PipelineShape, Schedule
from nanotrain.parallel.pp.executor import MAX_SENDS
from nanotrain.parallel.pp.schedules import build_schedule
from nanotrain.plan.buffers import with_fp8_products
from nanotrain.plan.compile import with_compile
from nanotrain.plan.graph_memory import plan_graphs, returned_by_graphs
from nanotrain.plan.host_memory import describe_host_memory, memory_checkpoint_bytes
from nanotrain.plan.plan import Plan, plan_run
from nanotrain.plan.saved_bytes import SavedBytes, StageBytes, held_by_routers
from nanotrain.quantities import describe_bytes
from nanotrain.spec.layer_sizes import INT64
from nanotrain.spec.operators import POINTWISE
from nanotrain.topology.groups import UNCONNECTED
from nanotrain.topology.topology import Topology

# A run is refused only if the exact part and this share of the activations exceed the memory: the
# estimate is within 10 %, and a compiled block may save only half.
CERTAIN_SHARE = 0.8
CERTAIN_SHARE_COMPILED = 0.4
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
SEARCH_S = 4.0  # CPU time after which the search for settings that fit ends
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
    parallel = config.parallel
    dp_size = parallel.data_parallel_size(world_size)
    pp_size = parallel.pipeline_model_parallel_size
    num_microbatches = count_microbatches(config.train, dp_size)
    # Planning the transfers of many microbatches takes seconds. A plan for few has the same stages,
    # buffers and groups. Schedules of the batch size change only the number of microbatches.
    few = with_batch_size(config, config.train.micro_batch_size * dp_size * pp_size)
    topology = Topology.of(parallel, world_size, has_experts=config.model.moe is not None)
    rank = topology.group_specs(0)["pp"].ranks[pp_rank]
    plan = plan_run(few, world_size, rank=rank)
    kept = SavedBytes(plan, device)
    resident = plan.resident_bytes
    peak = peak_of(plan, kept, schedule=schedule or train_schedule(config, world_size))

    token_bytes = 3 * INT64 * kept.sizes.tokens * num_microbatches
    working = PROCESS_BYTES[device] + peak.working + token_bytes
    if device == "cpu" and config.checkpoint.async_save:
        # the largest copy of an asynchronous save: main params and optimizer state, in host memory
        working += resident.params + resident.optimizer
    host = memory_checkpoint_bytes(config, world_size, state=resident.params + resident.optimizer)
    if device == "cpu":
        working += host
    communication = resident.grad_buckets + resident.units + returned_by_graphs(plan, device)
    if pp_size > 1:
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


def _fp8_weight_bytes(plan: Plan) -> int:
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


def _num_communicators(plan: Plan) -> int:
    """Distinct sets of several ranks over which a rank communicates."""
    sets = set()
    for name, spec in plan.groups.items():
        if spec.size > 1 and name not in UNCONNECTED:
            sets.add(spec.ranks)
    return len(sets)


def worst_memory(config: Config, world_size: int, *, device: str) -> MemoryPlan:
    """The memory of the pipeline rank that needs the most; arguments as for `plan_memory`."""
    schedule = train_schedule(config, world_size)
    plans = (
        plan_memory(config, world_size, pp_rank=pp_rank, device=device, schedule=schedule)
        for pp_rank in range(config.parallel.pipeline_model_parallel_size)
    )
    return max(plans, key=lambda plan: plan.total)


def train_schedule(config: Config, world_size: int) -> Schedule:
    """The pipeline schedule of a training step, of all pipeline ranks."""
    dp_size = config.parallel.data_parallel_size(world_size)
    shape = PipelineShape.of(config.parallel, count_microbatches(config.train, dp_size))
    return built_schedule(config.parallel.pipeline_schedule, shape)


def require_memory(
    config: Config, world_size: int, *, device: str, available: int | None
) -> MemoryPlan:
    """Plan the memory of the rank that needs the most, and check that it fits.

    Args:
        config: a validated configuration with the vocabulary size set.
        world_size: ranks of the run.
        device: "cpu" or "cuda".
        available: bytes per rank; None if unknown.

    Raises:
        ConfigError: it cannot fit.
    """
    worst = worst_memory(config, world_size, device=device)
    if available is None or worst.certain(_certain_share(config, device)) <= available:
        return worst
    fitting = _find_fitting(
        config, world_size, pp_rank=worst.pp_rank, device=device, available=available
    )
    fix = "choose a smaller model or --seq-length"
    if fitting:
        fix = f"with the same memory per rank it fits with {', or '.join(fitting)}"
    needed = describe_bytes(worst.reserved)
    raise ConfigError(
        f"a rank needs {needed} of memory and has {describe_bytes(available)}",
        why=", ".join(f"{name} {text}" for name, text in worst.rows().items()),
        fix=fix,
    )


def _certain_share(config: Config, device: str) -> float:
    """The share of the activations that a run needs with certainty."""
    if config.train.train_iters <= 0:  # everything is built, nothing is computed
        return 0.0
    is_compiled = with_compile(config, device).train.torch_compile
    return CERTAIN_SHARE_COMPILED if is_compiled else CERTAIN_SHARE


class Peak(NamedTuple):
    """Activation and working bytes at one moment of a step, and the microbatches in flight."""

    activations: int
    in_flight: int
    working: int

    @property
    def total(self) -> int:
        """All bytes of the moment."""
        return self.activations + self.working


def peak_of(plan: Plan, kept: SavedBytes, *, schedule: Schedule) -> Peak:
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


class _Change(NamedTuple):
    """A change of a run."""

    text: str  # the setting as a user writes it
    values: Mapping[str, Any]  # settings by key
    rank_factor: int = 1  # factor of the number of ranks


class _Changes(NamedTuple):
    """Changes of a run by kind, the smallest first."""

    strategies: list[_Change]
    recomputation: list[_Change]
    micro_batch: list[_Change]
    tensor_parallel: list[_Change]
    ranks: list[_Change]


def _changes(config: Config, world_size: int) -> _Changes:
    """Changes that need less memory per rank."""
    doubled = [2**power for power in range(1, 9)]
    micro_batch = []
    for factor in doubled:
        if config.train.micro_batch_size % factor == 0:
            size = config.train.micro_batch_size // factor
            change = _Change(f"--micro-batch-size {size}", {"train.micro_batch_size": size})
            micro_batch.append(change)
    tensor_parallel = []
    for size in doubled[:4]:
        if size > config.parallel.tensor_model_parallel_size:
            values = {
                "parallel.tensor_model_parallel_size": size,
                "parallel.sequence_parallel": True,
            }
            text = f"--tensor-model-parallel-size {size} --sequence-parallel"
            tensor_parallel.append(_Change(text, values))
    return _Changes(
        strategies=_stronger_strategies(config),
        recomputation=_more_recomputation(config),
        micro_batch=micro_batch,
        tensor_parallel=tensor_parallel,
        ranks=[_Change(f"{factor * world_size} ranks", {}, factor) for factor in doubled],
    )


def _stronger_strategies(config: Config) -> list[_Change]:
    """Sharding strategies that shard more."""
    strategies = get_args(ShardingStrategy)
    now = strategies.index(config.parallel.data_parallel_sharding_strategy)
    changes = []
    for strategy in strategies[now + 1 :]:
        values = {"parallel.data_parallel_sharding_strategy": strategy}
        changes.append(_Change(f"--data-parallel-sharding-strategy {strategy}", values))
    return changes


def _more_recomputation(config: Config) -> list[_Change]:
    """Recomputation of more than now, by rising time."""
    now = config.memory.recompute_granularity
    changes = []
    if now is None:
        changes.append(_recomputation("selective"))
        changes.append(_recomputation("selective", module=POINTWISE))
    if now != "full":
        changes.append(_recomputation("full"))
    return changes


def _recomputation(granularity: str, *, module: str = "") -> _Change:
    """A granularity of recomputation, with one of its modules or the default."""
    text = f"--recompute-granularity {granularity}"
    if module:
        text += f" --recompute-modules {module}"
    modules = [module] if module else []
    values = {"memory.recompute_granularity": granularity, "memory.recompute_modules": modules}
    return _Change(text, values)


def _find_fitting(
    config: Config, world_size: int, *, pp_rank: int, device: str, available: int
) -> list[str]:
    """The smallest change of each kind that fits; if none fits, several on the fewest ranks."""
    search = _FittingSearch(
        config,
        world_size,
        pp_rank=pp_rank,
        device=device,
        available=available,
        end_s=time.thread_time() + SEARCH_S,
    )
    changes = _changes(config, world_size)
    fitting: list[str] = []
    for kind in changes:
        fitting += search.first_that_fits([change] for change in kind)
    return fitting or search.first_that_fits(_several_changes(changes))


@dataclass(frozen=True)
class _FittingSearch:
    """A search for changes with which a run fits."""

    config: Config
    world_size: int
    pp_rank: int  # pipeline rank that needs the most
    device: str
    available: int  # bytes per rank
    end_s: float  # CPU time of the thread at which it ends

    def first_that_fits(self, candidates: Iterable[Sequence[_Change]]) -> list[str]:
        """The description of the first candidate that fits, or nothing."""
        for changes in candidates:
            if time.thread_time() > self.end_s:
                return []
            needed = self.needed_bytes(changes)
            if needed is not None and needed <= self.available:
                texts = ", ".join(change.text for change in changes)
                return [f"{texts} ({describe_bytes(needed)})"]
        return []

    def needed_bytes(self, changes: Sequence[_Change]) -> int | None:
        """Bytes of a rank with some changes; None if they cannot be combined."""
        values = dict(chain.from_iterable(change.values.items() for change in changes))
        changed = with_values(self.config, values)
        num_ranks = self.world_size * prod(change.rank_factor for change in changes)
        try:
            check_layout(changed)
            plan = plan_memory(changed, num_ranks, pp_rank=self.pp_rank, device=self.device)
        except NanotrainError:
            return None
        return plan.reserved


def _several_changes(changes: _Changes) -> Iterator[list[_Change]]:
    """Combinations of changes: ranks, tensor parallelism, the strongest strategy, recomputation."""
    tensor_parallel = [None, *changes.tensor_parallel]
    strategies = [None, *changes.strategies[-1:]]
    recomputation = [None, *changes.recomputation[-1:]]
    for several in product(changes.ranks, tensor_parallel, strategies, recomputation):
        yield [change for change in several if change is not None]
