"""Memory of a run before it starts: what the worst rank needs, and the error with settings that fit
(docs/memory.md).

Parameters, gradients and optimizer state are exact, the rest is estimated. Pure: nothing is
allocated.
"""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, product
from math import prod
from typing import Any, NamedTuple, get_args

from nanotrain.config.config import Config
from nanotrain.config.parallel import ShardingStrategy
from nanotrain.config.rules.check import check_layout
from nanotrain.config.schedules import num_microbatches, with_batch_size
from nanotrain.config.schema import with_values
from nanotrain.errors import ConfigError, NanotrainError
from nanotrain.parallel.dp.units import traced_units
from nanotrain.parallel.pp.actions import Action, ActionKind, PipelineShape, Schedule
from nanotrain.parallel.pp.executor import MAX_SENDS
from nanotrain.parallel.pp.schedules import build_schedule
from nanotrain.plan.compile import with_compile
from nanotrain.plan.plan import Plan, plan_run, with_fp8_products
from nanotrain.plan.saved_bytes import SavedBytes, StageBytes
from nanotrain.precision.dtypes import Precision
from nanotrain.quantities import describe_bytes
from nanotrain.spec.layer_sizes import INT64
from nanotrain.topology.groups import UNCONNECTED
from nanotrain.topology.topology import Topology

# A run is refused only if the exact part and this share of the activations exceed the memory: the
# estimate is within 10 %, and a compiled block may save only half.
CERTAIN_SHARE, CERTAIN_SHARE_COMPILED = 0.8, 0.4
# cpu: measured with a tiny model, libraries in its first steps; cuda: workspaces of cuBLAS, which
# torch allocates on compute capability 9.0 once for the thread of the forward and once for that of
# the backward, and what is left of blocks that its allocator does not split (0 to 15 MB over the
# layouts of docs/gpu.md)
PROCESS_BYTES = {"cpu": 75_000_000, "cuda": 2 * 32 * 2**20 + 16_000_000}
# What a process takes of a GPU besides tensors. The context, with the kernels of torch, cuBLAS and
# cuDNN that are loaded as they are used: 0.5 to 0.8 GB. The channels of a communicator of NCCL: 0.2
# to 0.4 GB.
CONTEXT_BYTES, NCCL_BYTES = 700 * 2**20, 256 * 2**20
FRAGMENTS = (
    # of the tensors: reserved memory exceeds allocated memory by 2 to 7 % in the runs that SimuMax
    # measured
    0.03
)
ROWS = ("params", "grads", "optimizer", "activations", "working", "communication", "overhead")
SEARCH_S = 4.0  # of CPU time, after which the search for settings that fit ends
built_schedule = lru_cache(maxsize=64)(build_schedule)  # layouts that differ elsewhere share one


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank at the peak of a step."""

    pp_rank: int
    params: int
    grads: int
    optimizer: int
    activations: int  # kept from forward to backward, at the peak of the schedule
    working: int  # temporaries, the tokens of a step, and libraries of the process on a CPU
    communication: int  # pipeline messages, full-size gradient buckets, gathered units
    runtime: int  # on a GPU its context and NCCL
    in_flight: int = 0  # forwards whose activations are kept at that peak
    recompute: str = ""  # what is recomputed, as the user sets it; empty for nothing
    unplanned: str = ""  # what the plan leaves out, and is large

    @property
    def total(self) -> int:
        """All tensors."""
        return self.certain(1.0) - self.runtime + self.working + self.communication

    @property
    def overhead(self) -> int:
        """What tensors do not use: `runtime` and the fragments of a GPU's allocator."""
        return self.runtime + int(FRAGMENTS * self.total) * (self.runtime > 0)

    @property
    def reserved(self) -> int:
        """All of them."""
        return self.total + self.overhead

    def certain(self, share: float) -> int:
        """The exact part, the runtime and a share of the activations."""
        return (
            self.params + self.grads + self.optimizer + self.runtime + int(share * self.activations)
        )

    def rows(self) -> dict[str, str]:
        """The rows of the table by name; without communication and overhead if there is none."""
        sizes = {name: getattr(self, name) for name in ROWS}
        return {
            name: describe_bytes(size)
            for name, size in sizes.items()
            if size or name not in ROWS[-2:]
        }

    def table(self, available: int | None, *, pp_size: int = 1) -> str:
        """A small table; with more than one pipeline rank the title names the one that needs the
        most.
        """
        lines = [f"  {name:<14}{text:>12}" for name, text in self.rows().items()]
        lines[3] += f"  {self.in_flight} in flight" + (
            f", recompute {self.recompute}" if self.recompute else ""
        )
        lines.append(f"  {'total':<14}{describe_bytes(self.reserved):>12}")
        lines[-1] += f" of {describe_bytes(available)}" if available else ""
        lines += [f"  without {self.unplanned}"] if self.unplanned else []
        worst = f" (pipeline rank {self.pp_rank} needs the most)" if pp_size > 1 else ""
        return "\n".join([f"planned memory per rank{worst}:", *lines])


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
    parallel, dp_size = config.parallel, config.parallel.data_parallel_size(world_size)
    pp_size, count = parallel.pipeline_model_parallel_size, num_microbatches(config.train, dp_size)
    # Planning the transfers of many microbatches takes seconds. A plan for few has the same stages,
    # buffers and groups. Schedules of the batch size change only the number of microbatches.
    few = with_batch_size(config, config.train.micro_batch_size * dp_size * pp_size)
    topology = Topology.of(parallel, world_size, has_experts=config.model.moe is not None)
    rank = topology.group_specs(0)["pp"].ranks[pp_rank]
    plan = plan_run(few, world_size, rank=rank)
    kept, resident = SavedBytes(plan, device), plan.resident_bytes
    peak = peak_of(plan, kept, schedule=schedule or train_schedule(config, world_size))
    # the largest copy of an asynchronous save: main params and optimizer state, in host memory
    staged = (
        resident.params + resident.optimizer
        if device == "cpu" and config.checkpoint.async_save
        else 0
    )
    granularity = config.memory.recompute_granularity
    messages = 2 * MAX_SENDS * kept.sizes.outside * kept.sizes.width if pp_size > 1 else 0
    in_fp8 = 0  # weights as they are and transposed
    if device == "cuda" and plan.keeps_fp8_weights(count):
        in_fp8 = 2 * sum(
            p.box.numel for stage in plan.stages for p in with_fp8_products(stage.params, config)
        )
    return MemoryPlan(
        pp_rank=pp_rank,
        params=resident.params + in_fp8,
        grads=resident.grads,
        optimizer=resident.optimizer,
        activations=peak.activations,
        in_flight=peak.in_flight,
        recompute=" ".join([granularity, *config.memory.recomputed_modules]) if granularity else "",
        working=PROCESS_BYTES[device]
        + staged
        + peak.working
        + 3 * INT64 * kept.sizes.tokens * count,
        communication=messages
        + resident.grad_buckets
        + resident.units
        + _returned_by_graphs(plan, device),
        runtime=runtime_bytes(_num_communicators(plan)) if device == "cuda" else 0,
        unplanned="the records of --profile" if config.train.profile else "",
    )


def runtime_bytes(num_communicators: int) -> int:
    """The context of a GPU, and NCCL."""
    return CONTEXT_BYTES + num_communicators * NCCL_BYTES


def _num_communicators(plan: Plan) -> int:
    """Distinct sets of several ranks over which a rank communicates."""
    groups = plan.groups.items()
    return len({spec.ranks for name, spec in groups if spec.size > 1 and name not in UNCONNECTED})


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
    parallel, dp_size = config.parallel, config.parallel.data_parallel_size(world_size)
    shape = PipelineShape.of(parallel, num_microbatches(config.train, dp_size))
    return built_schedule(parallel.pipeline_schedule, shape)


def require_memory(
    config: Config, world_size: int, *, device: str, available: int | None
) -> MemoryPlan:
    """The memory of the worst rank.

    Args:
        config: a validated configuration with the vocabulary size set.
        world_size: ranks of the run.
        device: "cpu" or "cuda".
        available: bytes per rank; None if unknown.

    Raises:
        ConfigError: it cannot fit.
    """
    worst = worst_memory(config, world_size, device=device)
    share = (
        CERTAIN_SHARE_COMPILED
        if with_compile(config, device).train.torch_compile
        else CERTAIN_SHARE
    )
    share *= config.train.train_iters > 0  # without steps everything is built, nothing is computed
    if available is None or worst.certain(share) <= available:
        return worst
    fitting = _find_fitting(
        config, world_size, pp_rank=worst.pp_rank, device=device, available=available
    )
    rows = ", ".join(f"{name} {text}" for name, text in worst.rows().items())
    advice = "choose a smaller model or --seq-length"
    raise ConfigError(
        f"a rank needs {describe_bytes(worst.reserved)} of memory and has {describe_bytes(available)}",
        why=rows,
        fix=f"with the same memory per rank it fits with {', or '.join(fitting)}"
        if fitting
        else advice,
    )


def _returned_by_graphs(plan: Plan, device: str) -> int:
    """Gradients of the largest compiled block that its graph returns to hooks, which run after its
    whole backward.
    """
    if not with_compile(plan.config, device).train.torch_compile:
        return 0
    options, num_bytes = plan.data_parallel, 0
    for buffer in plan.buffers:
        layout, num_blocks = buffer.layout, options.num_gather_blocks
        traced = traced_units(
            layout, is_transient=options.strategy.shard_grads, num_blocks=num_blocks
        )
        returned: Counter[str] = Counter()
        for spec, numel in ((param.spec, param.box.numel) for param in layout.params):
            returned[spec.unit] += numel * (
                spec.unit.startswith("layers.") and not spec.is_expert and spec.unit not in traced
            )
        num_bytes += max(returned.values()) * Precision.of(plan.config.precision).params.itemsize
    return num_bytes


class Peak(NamedTuple):
    """Bytes at a moment of a step, and the number of forwards that they belong to."""

    activations: int
    in_flight: int
    working: int

    @property
    def total(self) -> int:
        return self.activations + self.working


def peak_of(plan: Plan, kept: SavedBytes, *, schedule: Schedule) -> Peak:
    """The peak of a training step, or of a validation."""
    stages = {stage.spec.index: kept.stage(stage.spec) for stage in plan.stages}
    evaluates = plan.config.evaluates and any(stage.spec.has_head for stage in plan.stages)
    evaluation = Peak(0, 0, kept.loss_working(is_training=False) if evaluates else 0)
    step = peak_of_step(schedule.freeing_first(plan.groups["pp"].index), stages)
    return max(evaluation, step, key=lambda peak: peak.total)


def peak_of_step(actions: Iterable[Action], stages: Mapping[int, StageBytes]) -> Peak:
    """The moment of a training step with the most kept bytes and temporaries.

    A backward recomputes first. From I to W as much is kept as without recomputation.

    Args:
        actions: what a rank runs, in order.
        stages: bytes of its stages, by index.
    """
    now, count, moments = 0, 0, [Peak(0, 0, 0)]
    for action in actions:
        stage, is_forward = stages[action.stage], action.kind is ActionKind.forward
        changes = {
            ActionKind.forward: stage.kept,
            ActionKind.full_backward: -stage.kept,
            ActionKind.backward_input: stage.complete - stage.kept,
            ActionKind.backward_weight: -stage.complete,
        }
        if action.kind.has_dgrad:
            moments.append(Peak(now + stage.recomputed - stage.freed, count, stage.working))
        now, count = now + changes[action.kind], count + is_forward - action.kind.has_wgrad
        moments.append(Peak(now, count, stage.loss * is_forward))
    return max(moments, key=lambda moment: moment.total)


class _Change(NamedTuple):
    """A change of a run: as the user writes it, as values by key, and as a factor of the number of
    ranks.
    """

    text: str
    values: Mapping[str, Any]
    factor: int = 1


def _changes(config: Config, world_size: int) -> tuple[list[_Change], ...]:
    """Changes of strategy, recomputation, micro-batch, tensor parallelism and ranks; per kind the
    smallest first.
    """
    parallel, strategies = config.parallel, get_args(ShardingStrategy)
    stronger = strategies[strategies.index(parallel.data_parallel_sharding_strategy) + 1 :]
    flag, doubled = "--data-parallel-sharding-strategy", [2**power for power in range(1, 9)]
    smaller = [
        config.train.micro_batch_size // n
        for n in doubled
        if config.train.micro_batch_size % n == 0
    ]
    tp_sizes = [n for n in doubled[:4] if n > parallel.tensor_model_parallel_size]
    granularities: list[str | None] = [None, "selective", "full"]
    more = granularities[granularities.index(config.memory.recompute_granularity) + 1 :]
    return (
        [
            _Change(f"{flag} {each}", {"parallel.data_parallel_sharding_strategy": each})
            for each in stronger
        ],
        [
            _Change(
                f"--recompute-granularity {each}",
                {"memory.recompute_granularity": each, "memory.recompute_modules": []},
            )
            for each in more
        ],
        [_Change(f"--micro-batch-size {n}", {"train.micro_batch_size": n}) for n in smaller],
        [
            _Change(
                f"--tensor-model-parallel-size {n} --sequence-parallel",
                {"parallel.tensor_model_parallel_size": n, "parallel.sequence_parallel": True},
            )
            for n in tp_sizes
        ],
        [_Change(f"{n * world_size} ranks", {}, n) for n in doubled],
    )


def _find_fitting(
    config: Config, world_size: int, *, pp_rank: int, device: str, available: int
) -> list[str]:
    """The smallest change of each kind with which the run fits; if none fits, several changes on
    the fewest ranks.
    """
    end, kinds = time.thread_time() + SEARCH_S, _changes(config, world_size)

    def fits(*changes: _Change) -> str | None:
        if time.thread_time() > end:
            return None
        changed = with_values(
            config, {key: value for each in changes for key, value in each.values.items()}
        )
        num_ranks = world_size * prod(each.factor for each in changes)
        try:
            check_layout(changed)
            needed = plan_memory(changed, num_ranks, pp_rank=pp_rank, device=device).reserved
        except NanotrainError:
            return None
        return (
            f"{', '.join(each.text for each in changes)} ({describe_bytes(needed)})"
            if needed <= available
            else None
        )

    fitting = [
        next((text for change in changes if (text := fits(change))), None) for changes in kinds
    ]
    if not any(fitting):
        strategies, recompute, _, tp, num_ranks = (
            [(each,) for each in changes] for changes in kinds
        )
        several = product(num_ranks, [(), *tp], [(), *strategies[-1:]], [(), *recompute[-1:]])
        fitting = [next((text for parts in several if (text := fits(*chain(*parts)))), None)]
    return [text for text in fitting if text]
