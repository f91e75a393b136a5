"""`search`: the layouts of a model on a number of GPUs that fit into memory, the fastest first.

    sizes --rules of configurations, a lower bound of memory--> scenarios --predict_step--> ordered by time
          --estimate_memory, the fastest first--> Search

Settings that the caller fixes are not varied. Of the ways to save memory every layout gets, for each amount of
recomputation, the sharding strategy with the least communication that may fit.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import islice, product
from math import inf, lcm
from typing import Any, NamedTuple, TypeVar

from nanotrain.config.config import Config
from nanotrain.config.rules.check import check_layout
from nanotrain.config.schedules import global_batch_size, with_batch_size
from nanotrain.config.schema import ENTRIES, KEYS, value_of, with_values
from nanotrain.errors import ConfigError, NanotrainError
from nanotrain.planner.hardware import GPU, read_data
from nanotrain.planner.memory import memory_of_rank
from nanotrain.planner.prediction import Prediction, predict
from nanotrain.planner.scenario import Scenario, scenario_of
from nanotrain.planner.step_time import StepTime, predict_step
from nanotrain.train.plans.activations import Activations
from nanotrain.train.plans.plan import Plan, plan_run

Values = Mapping[str, Any]  # settings by unique name

MAX_TOKENS = 65_536  # of a microbatch
MIN_SLICE = 1024  # tokens of a sequence per context-parallel rank
FIRST_SLICE = 4096  # the same, of the layouts that the search begins with
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")  # by what they shard
SHARDED = STRATEGIES[1:]  # those that are tried, by rising communication
LAYOUTS = read_data("layouts")
FIRST: Values = LAYOUTS["first"]
NAMES = (*FIRST, "cp_comm_type")  # settings of a layout
AXES: Mapping[str, str] = LAYOUTS["axes"]  # whose sizes decide the parameters and the activations of a layer
SHARD_RANKS = (8, 64, 512)  # of an optimizer instance, where state is sharded inside instances only
NUM_IMPROVED, NUM_ROUNDS = 16, 4  # layouts of which every single change is tried, and how often
NUM_BEST = 5  # layouts of the result
NUM_CHECKED = 300  # layouts whose exact memory is computed, at most
FRONTIER_STEP = 0.8  # of the memory, from one layout of the frontier to the next
T = TypeVar("T")


class Candidate(NamedTuple):
    """A layout that may fit."""

    scenario: Scenario
    time: StepTime
    least_bytes: int  # lower bound of the memory


@dataclass(frozen=True)
class Search:
    """The result of a search."""

    best: tuple[Prediction, ...]  # the fastest first
    frontier: tuple[Prediction, ...]  # those that no other layout beats in both time and memory, the fastest first
    num_formed: int  # layouts that the rules allow
    num_timed: int  # of these, those that the lower bound of memory lets fit


def search(
    config: Config,
    world_size: int,
    *,
    gpu: GPU,
    engine: str = "nanotrain",
    fixed: frozenset[str] = frozenset(),
    max_tensor_parallel_size: int | None = None,
) -> Search:
    """Search the layouts of a configuration for a global batch size.

    Args:
        config: a validated configuration with the vocabulary size set.
        world_size: GPUs of the run.
        gpu: GPU of every rank.
        engine: training program.
        fixed: keys of settings that stay as they are ("parallel.tensor_model_parallel_size").
        max_tensor_parallel_size: largest size of tensor parallelism; None: the GPUs of a node.

    Raises:
        ConfigError: no layout can be formed, or none fits.
    """
    kept = {KEYS[key].name: value_of(config, key) for key in fixed if key in KEYS}
    max_tp = max_tensor_parallel_size or gpu.gpus_per_node
    space = Space(config, world_size, gpu=gpu, engine=engine, kept=kept, max_tp=max_tp)
    candidates = list(space.candidates())
    if not space.num_formed:
        raise ConfigError(
            f"no layout of {world_size:,} GPUs can be formed",
            why=f"a global batch of {space.batch_size:,} samples and the fixed settings leave none",
            fix="change the number of GPUs or --global-batch-size, or fix fewer settings",
        )
    candidates = space.improved(candidates)
    fitting = (found for candidate in candidates[:NUM_CHECKED] for found in _checked(candidate))
    best = list(islice(fitting, NUM_BEST))
    if not best:
        least = min((each.least_bytes for each in candidates), default=space.least_bytes)
        raise ConfigError(
            f"no layout fits on {world_size:,} GPUs of {gpu.memory_bytes / 1e9:.0f} GB",
            why=f"each of {space.num_formed:,} layouts needs at least {max(least, space.least_bytes) / 1e9:.1f} GB",
            fix="add GPUs, choose GPUs with more memory, or shorten --seq-length",
        )
    lighter = _falling(candidates, lambda each: each.least_bytes, factor=FRONTIER_STEP)
    found = [best[0], *(found for candidate in lighter for found in _checked(candidate))]
    by_time = sorted(found, key=lambda each: each.time.total)
    frontier = tuple(_falling(by_time, lambda each: each.memory.total))
    return Search(tuple(best), frontier, space.num_formed, len(candidates))


def next_change(prediction: Prediction) -> Prediction | None:
    """The single change of a layout that makes the step the shortest and fits; None if none is faster."""
    scenario, gpu = prediction.scenario, prediction.scenario.gpu
    engine, max_tp = scenario.engine.name, gpu.gpus_per_node
    space = Space(scenario.config, scenario.world_size, gpu=gpu, engine=engine, max_tp=max_tp)
    longest = prediction.time.total if prediction.headroom >= 0 else inf
    changes = sorted(space.changes(scenario.config), key=lambda candidate: candidate.time.total)
    faster = (candidate for candidate in changes if candidate.time.total < longest)
    return next((found for candidate in faster for found in _checked(candidate)), None)


def layout_of(config: Config) -> dict[str, Any]:
    """The settings of the layout of a configuration."""
    return {name: value_of(config, ENTRIES[name].key) for name in NAMES}


def _checked(candidate: Candidate) -> list[Prediction]:
    """The layout, if its exact memory fits."""
    if memory_of_rank(candidate.scenario, 0).reserved > candidate.scenario.gpu.memory_bytes:
        return []
    prediction = predict(candidate.scenario)
    return [prediction] if prediction.headroom >= 0 else []


def _falling(items: Iterable[T], bytes_of: Callable[[T], int], *, factor: float = 1.0) -> Iterator[T]:
    """Of items by rising time those with bytes below a share of those of all before."""
    least: float = inf
    for each in items:
        if bytes_of(each) < factor * least:
            least = bytes_of(each)
            yield each


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


@dataclass(eq=False)
class Space:
    """The layouts of a configuration."""

    config: Config  # validated
    world_size: int  # GPUs of the run
    gpu: GPU  # of every rank
    engine: str  # training program
    max_tp: int  # largest size of tensor parallelism
    kept: Values = field(default_factory=dict)  # settings that stay as they are
    num_formed: int = 0  # layouts so far that the rules allow
    least_bytes: int = 0  # least lower bound of their memory

    @cached_property
    def batch_size(self) -> int:
        """The global batch size."""
        train, parallel = self.config.train, self.config.parallel
        dp = parallel.data_parallel_size(self.world_size) if train.global_batch_size is None else 1
        return global_batch_size(train, dp)

    def candidates(self) -> Iterator[Candidate]:
        """Layouts of all sizes of tp, pp and ep; for each amount of recomputation the first strategy that may fit."""
        for sizes in self._sizes():
            for recompute in LAYOUTS["recomputed"][::2]:
                for strategy in SHARDED:
                    values = {**sizes, **recompute, "data_parallel_sharding_strategy": strategy}
                    if (candidate := self.candidate(values)) is not None:
                        yield candidate
                        break

    def improved(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """All candidates and single changes of the fastest, round by round; the fastest first."""
        known = {str(each.scenario.config): each for each in candidates}
        tried: set[str] = set()
        for _ in range(NUM_ROUNDS):
            # other schedules shrink the bubble
            promising = sorted(known, key=lambda key: known[key].time.total - known[key].time.bubble / 2)
            fresh = [key for key in promising[:NUM_IMPROVED] if key not in tried]
            tried.update(fresh)
            changed = [new for key in fresh for new in self.changes(known[key].scenario.config)]
            known |= {str(new.scenario.config): new for new in changed}
        return sorted(known.values(), key=lambda candidate: candidate.time.total)

    def changes(self, config: Config) -> Iterator[Candidate]:
        """Every single change of the layout of a configuration that may fit."""
        values = layout_of(config)
        for change in self._single_changes(values):
            new = {**values, **change}
            new["sequence_parallel"] = new["tensor_model_parallel_size"] > 1
            if new != values and self._is_allowed(change) and (candidate := self.candidate(new)) is not None:
                yield candidate

    def _single_changes(self, values: Values) -> Iterator[Values]:
        """Other settings where they have an effect; sizes twice or half as large."""
        yield from LAYOUTS["recomputed"]
        yield from ({"data_parallel_sharding_strategy": strategy} for strategy in SHARDED)
        for name in ("tensor_model_parallel_size", "context_parallel_size", "micro_batch_size"):
            yield from ({name: size} for size in (2 * values[name], values[name] // 2) if size)
        num_ranks = self.world_size // (values["tensor_model_parallel_size"] * values["pipeline_model_parallel_size"])
        yield from ({"num_distributed_optimizer_instances": max(1, num_ranks // size)} for size in SHARD_RANKS)
        if values["pipeline_model_parallel_size"] > 1:
            yield from LAYOUTS["schedules"]
        if values["context_parallel_size"] > 1:
            yield from ({"cp_comm_type": kind} for kind in ("p2p", "a2a"))
        if self.config.model.moe:
            yield from ({"expert_tensor_parallel_size": n} for n in (1, values["tensor_model_parallel_size"]))

    def candidate(self, values: Values) -> Candidate | None:
        """A layout with its time; None if rules forbid it or it cannot fit."""
        values = {name: self.kept.get(name, value) for name, value in values.items()}
        try:
            config = with_values(self.config, _by_key(values))
            check_layout(config)
            scenario = scenario_of(config, self.world_size, gpu=self.gpu, engine=self.engine)
        except NanotrainError:
            return None
        self.num_formed += 1
        least = self._bound_of(*(scenario.sizes[axis] for axis in AXES)).of(scenario)
        self.least_bytes = min(self.least_bytes or least, least)
        if least > self.gpu.memory_bytes:
            return None
        return Candidate(scenario, predict_step(scenario), least)

    def _is_allowed(self, change: Values) -> bool:
        """Whether a change keeps what the caller has fixed, and the bounds of the sizes."""
        size, cp = change.get("tensor_model_parallel_size", 1), change.get("context_parallel_size", 1)
        return (
            self.kept.keys().isdisjoint(change)
            and size <= self.max_tp
            and self.config.data.seq_length >= cp * MIN_SLICE
        )

    def _sizes(self) -> Iterator[Values]:
        """Layouts of all sizes of tp, cp, pp, ep and the micro-batch that divide the GPUs and the global batch."""
        model, seq_length = self.config.model, self.config.data.seq_length
        num_experts = model.moe.num_experts if model.moe else 1
        choices: dict[str, Iterable[int]] = {
            "tensor_model_parallel_size": _powers(min(self.max_tp, model.num_attention_heads)),
            "context_parallel_size": _powers(seq_length // FIRST_SLICE),
            "pipeline_model_parallel_size": range(1, model.num_layers + 1),
            "expert_model_parallel_size": _powers(num_experts),
            "micro_batch_size": _powers(MAX_TOKENS // seq_length),
        }
        choices |= {name: [self.kept[name]] for name in choices if name in self.kept}
        for tp, cp, pp, ep, micro_batch in product(*choices.values()):
            num_ranks = self.world_size // (tp * cp * pp)  # of data parallelism
            is_whole = self.world_size % (tp * cp * pp) == 0 and num_experts % ep == 0
            if is_whole and self.batch_size % (num_ranks * micro_batch) == 0:
                yield self._sized(choices, (tp, cp, pp, ep, micro_batch))

    def _sized(self, names: Iterable[str], sizes: Iterable[int | None]) -> dict[str, Any]:
        """The first layout with other sizes."""
        values = {**FIRST, "expert_tensor_parallel_size": 1 if self.config.model.moe else None}
        values |= dict(zip(names, sizes, strict=True))
        return values | {"sequence_parallel": values["tensor_model_parallel_size"] > 1}

    @cached_property
    def _bound_of(self) -> Callable[..., Bound]:
        return cache(self._bound)

    def _bound(self, *sizes: int) -> Bound:
        """The bound of layouts with these sizes of tp, cp, ep and etp."""
        tp, cp, ep, etp = sizes
        world_size = lcm(tp * cp, ep * etp)
        values = self._sized(AXES.values(), (tp, cp, ep, etp if self.config.model.moe else None))
        config = with_batch_size(with_values(self.config, _by_key(values)), world_size // (tp * cp))
        return Bound(plan_run(config, world_size, rank=0))


def _by_key(values: Values) -> dict[str, Any]:
    return {ENTRIES[name].key: value for name, value in values.items()}


def _powers(limit: int) -> list[int]:
    """Powers of two up to a limit.

    >>> _powers(9)
    [1, 2, 4, 8]
    """
    return [1 << power for power in range(max(1, limit).bit_length())]
