"""`search`: the layouts of a model on a number of GPUs that fit into memory, the fastest first.

    sizes --rules of configurations, memory of the first pipeline rank--> layouts --predict_step-->
          ordered by time --memory of all ranks, the fastest first--> Search

Settings that the caller fixes are not varied. For each amount of recomputation every layout gets
the sharding strategy with the least communication whose first pipeline rank fits.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import inf
from typing import Any

from nanotrain.config.config import Config
from nanotrain.config.rules.check import check_layout
from nanotrain.config.schedules import global_batch_size
from nanotrain.config.schema import ENTRIES, KEYS, value_of, with_values
from nanotrain.errors import ConfigError, NanotrainError
from nanotrain.planner.hardware import GPU, read_data
from nanotrain.planner.prediction import Prediction, memory_of_rank, predict
from nanotrain.planner.scenario import scenario_of
from nanotrain.planner.step_time import predict_step
from nanotrain.spec.operators import POINTWISE

Values = Mapping[str, Any]  # settings by unique name

MAX_TOKENS = 65_536  # largest microbatch
MIN_SLICE = 1024  # tokens of a sequence per context-parallel rank
FIRST_SLICE = 4096  # the same, of the layouts that the search begins with
# strategies that are tried, by rising communication
SHARDED = ("optim", "optim_grads", "optim_grads_params")
LAYOUTS = read_data("layouts")
FIRST: Values = LAYOUTS["first"]
RECOMPUTED: list[dict[str, Any]] = LAYOUTS["recomputed"]
NAMES = (*FIRST, "cp_comm_type")  # settings of a layout
SHARD_RANKS = (
    8,
    64,
    512,
)  # sizes of an optimizer instance, where state is sharded inside instances only
NUM_IMPROVED = 16  # layouts of which every single change is tried
NUM_ROUNDS = 4  # rounds of changes
NUM_BEST = 5  # layouts of the result
TIE = 1.05  # layouts within this factor of the fastest are alike: predictions cannot rank them
MAX_TIES = 24  # most ties that are looked at
FRONTIER_STEP = 0.8  # factor on the memory, from one layout of the frontier to the next


@dataclass(frozen=True)
class Search:
    """The result of a search."""

    best: tuple[Prediction, ...]  # the fastest first
    ties: tuple[Prediction, ...]  # within TIE of the fastest, the simplest first
    # layouts that no other beats in both time and memory, the fastest first
    frontier: tuple[Prediction, ...]
    num_formed: int  # layouts that the rules allow
    num_timed: int  # layouts whose first pipeline rank fits


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
    if config.train.global_batch_size is None:
        dp = config.parallel.data_parallel_size(world_size)
        batch_size = global_batch_size(config.train, dp)
        config = with_values(config, {"train.global_batch_size": batch_size})
    kept = {KEYS[key].name: value_of(config, key) for key in fixed if key in KEYS}
    max_tp = max_tensor_parallel_size or gpu.gpus_per_node
    space = Space(config, world_size, gpu=gpu, engine=engine, kept=kept, max_tp=max_tp)
    candidates = list(space.candidates())
    if not space.num_formed:
        batch = f"a global batch of {config.train.global_batch_size:,} samples"
        raise ConfigError(
            f"no layout of {world_size:,} GPUs can be formed",
            why=f"{batch} and the fixed settings leave none",
            fix="change the number of GPUs or --global-batch-size, or fix fewer settings",
        )
    candidates = space.improved(candidates)
    alike, best = _fastest_layouts(candidates)
    if not best:
        least = f"{space.least_bytes / 1e9:.1f} GB"
        raise ConfigError(
            f"no layout fits on {world_size:,} GPUs of {gpu.memory_bytes / 1e9:.0f} GB",
            why=f"each of {space.num_formed:,} layouts needs at least {least}",
            fix="add GPUs, choose GPUs with more memory, or shorten --seq-length",
        )
    lighter = _predictions_that_fit(_lighter_layouts(candidates, factor=FRONTIER_STEP))
    frontier = tuple(_lighter_layouts([best[0], *lighter]))
    return Search(
        best, alike, frontier=frontier, num_formed=space.num_formed, num_timed=len(candidates)
    )


def next_change(prediction: Prediction) -> Prediction | None:
    """The fitting single change of a layout with the shortest step; None if none is faster."""
    scenario = prediction.scenario
    gpu = scenario.gpu
    space = Space(
        scenario.config,
        scenario.world_size,
        gpu=gpu,
        engine=scenario.engine.name,
        max_tp=gpu.gpus_per_node,
    )
    longest = prediction.time.total if prediction.headroom >= 0 else inf
    changes = sorted(space.changes(scenario.config), key=lambda candidate: candidate.time.total)
    faster = (candidate for candidate in changes if candidate.time.total < longest)
    return next(_predictions_that_fit(faster), None)


def layout_of(config: Config) -> dict[str, Any]:
    """The settings of the layout of a configuration."""
    return {name: value_of(config, ENTRIES[name].key) for name in NAMES}


def _predictions_that_fit(candidates: Iterable[Prediction]) -> Iterator[Prediction]:
    """The candidates whose pipeline ranks all fit, with the memory of the rank that needs the most.

    A candidate was formed with the memory of its first pipeline rank, which fits.
    """
    for candidate in candidates:
        scenario = candidate.scenario
        plans = (memory_of_rank(scenario, rank) for rank in range(1, scenario.sizes["pp"]))
        if all(plan.reserved <= scenario.gpu.memory_bytes for plan in plans):
            yield predict(scenario)


def _fastest_layouts(
    candidates: Iterable[Prediction],
) -> tuple[tuple[Prediction, ...], tuple[Prediction, ...]]:
    """The ties of the fastest fitting layout, the simplest first, and the NUM_BEST fastest."""
    fitting: list[Prediction] = []
    for prediction in _predictions_that_fit(candidates):
        is_tie = not fitting or prediction.time.total <= TIE * fitting[0].time.total
        if len(fitting) >= (MAX_TIES if is_tie else NUM_BEST):
            break
        fitting.append(prediction)
    limit = TIE * fitting[0].time.total if fitting else 0.0
    alike = [prediction for prediction in fitting if prediction.time.total <= limit]
    alike.sort(key=lambda prediction: (complexity(prediction), prediction.time.total))
    return tuple(alike), tuple(fitting[:NUM_BEST])


def complexity(prediction: Prediction) -> int:
    """How much a layout asks for: kinds of parallelism, and gradients that are reduced often.

    Recipes take the simplest of the layouts that are nearly as fast (docs/recipes.md).
    """
    parallel = prediction.scenario.config.parallel
    sizes = prediction.scenario.sizes
    num_axes = sum(sizes[axis] > 1 for axis in ("tp", "cp", "pp"))
    num_axes += parallel.num_virtual_stages_per_pipeline_rank > 2
    num_axes += parallel.num_distributed_optimizer_instances > 1
    # gradients are reduced at every microbatch
    is_sharded = parallel.data_parallel_sharding_strategy == "optim_grads"
    return num_axes + 2 if is_sharded else num_axes


def _lighter_layouts(
    predictions: Iterable[Prediction], *, factor: float = 1.0
) -> Iterator[Prediction]:
    """Pareto front: keep a layout if it needs less than `factor` times any faster one's memory."""
    least: float = inf
    for prediction in predictions:
        if prediction.memory.total < factor * least:
            least = prediction.memory.total
            yield prediction


@dataclass(eq=False)
class Space:
    """The layouts of a configuration."""

    config: Config  # validated
    world_size: int  # GPUs of the run
    gpu: GPU  # device of every rank
    engine: str  # training program
    max_tp: int  # largest size of tensor parallelism
    kept: Values = field(default_factory=dict)  # settings that stay as they are
    num_formed: int = 0  # layouts so far that the rules allow
    least_bytes: float = inf  # least memory of the first pipeline rank
    tried: set[str] = field(default_factory=set)  # layouts so far

    def candidates(self) -> Iterator[Prediction]:
        """Layouts of all sizes with the first strategy that may fit, per recomputation."""
        for sizes in self._sizes():
            for recompute in (RECOMPUTED[0], RECOMPUTED[-1]):
                candidate = self._first_fitting_strategy({**sizes, **recompute})
                if candidate is not None:
                    yield candidate

    def _first_fitting_strategy(self, values: Values) -> Prediction | None:
        """The layout with the first strategy of SHARDED, least communication first, that fits."""
        for strategy in SHARDED:
            candidate = self.candidate({**values, "data_parallel_sharding_strategy": strategy})
            if candidate is not None:
                return candidate
        return None

    def improved(self, candidates: Iterable[Prediction]) -> list[Prediction]:
        """All candidates and single changes of the fastest, round by round; the fastest first."""
        known = list(candidates)
        for _ in range(NUM_ROUNDS):
            # half of the bubble is forgiven: a change of the schedule may shrink it
            promising = sorted(known, key=lambda one: one.time.total - one.time.bubble / 2)
            for candidate in promising[:NUM_IMPROVED]:
                known += self.changes(candidate.scenario.config)
        return sorted(known, key=lambda candidate: candidate.time.total)

    def changes(self, config: Config) -> Iterator[Prediction]:
        """Every single change of the layout of a configuration that may fit."""
        values = layout_of(config)
        for change in self._single_changes(values):
            changed = {**values, **change}
            changed["sequence_parallel"] = changed["tensor_model_parallel_size"] > 1
            is_kept = not self.kept.keys().isdisjoint(change)
            if is_kept or changed == values:
                continue
            candidate = self.candidate(changed)
            if candidate is not None:
                yield candidate

    def _recomputations(self) -> Iterator[Values]:
        """The recomputation settings to try; only nanotrain recomputes all pointwise operators."""
        for recomputation in RECOMPUTED:
            is_own = POINTWISE in recomputation["recompute_modules"]
            if self.engine == "nanotrain" or not is_own:
                yield recomputation

    def _single_changes(self, values: Values) -> Iterator[Values]:
        """Other settings where they have an effect; sizes twice or half as large."""
        yield from self._recomputations()
        for strategy in SHARDED:
            yield {"data_parallel_sharding_strategy": strategy}
        yield from self._size_changes(values)
        tp = values["tensor_model_parallel_size"]
        pp = values["pipeline_model_parallel_size"]
        num_ranks = self.world_size // (tp * pp)
        for size in SHARD_RANKS:
            yield {"num_distributed_optimizer_instances": max(1, num_ranks // size)}
        if pp > 1:
            yield from LAYOUTS["schedules"]
        if values["context_parallel_size"] > 1:
            yield {"cp_comm_type": "p2p"}
            yield {"cp_comm_type": "a2a"}
        if self.config.model.moe:
            yield {"expert_tensor_parallel_size": 1}
            yield {"expert_tensor_parallel_size": tp}

    def _size_changes(self, values: Values) -> Iterator[Values]:
        """Sizes of tp, cp and the micro-batch twice or half as large."""
        limits = {
            "tensor_model_parallel_size": self.max_tp,
            "context_parallel_size": max(1, self.config.data.seq_length // MIN_SLICE),
            "micro_batch_size": inf,
        }
        for name, limit in limits.items():
            for size in (2 * values[name], values[name] // 2):
                if 0 < size <= limit:
                    yield {name: size}

    def candidate(self, values: Values) -> Prediction | None:
        """A layout with its time and the memory of its first pipeline rank.

        None if it is forbidden, cannot fit, or was formed before, as by a third of all changes.
        """
        layout = {**layout_of(self.config), **values, **self.kept}
        key = str(layout)
        if key in self.tried:
            return None
        self.tried.add(key)
        try:
            config = with_values(
                self.config, {ENTRIES[name].key: value for name, value in layout.items()}
            )
            check_layout(config)
            scenario = scenario_of(config, self.world_size, gpu=self.gpu, engine=self.engine)
        except NanotrainError:
            return None
        self.num_formed += 1
        memory = memory_of_rank(scenario, 0)
        self.least_bytes = min(self.least_bytes, memory.reserved)
        if memory.reserved > self.gpu.memory_bytes:
            return None
        return Prediction(scenario, memory, predict_step(scenario))

    def _sizes(self) -> Iterator[Values]:
        """Layouts of all sizes that divide the GPUs and the global batch."""
        num_experts = self.config.model.moe.num_experts if self.config.model.moe else 1
        batch_size = self.config.train.global_batch_size or 0
        choices = self._size_choices(num_experts)
        for tp, cp, pp, ep, micro_batch in product(*choices.values()):
            num_ranks, rest = divmod(self.world_size, tp * cp * pp)  # ranks of data parallelism
            if rest or num_experts % ep or batch_size % (num_ranks * micro_batch):
                continue
            yield {
                **FIRST,
                "tensor_model_parallel_size": tp,
                "context_parallel_size": cp,
                "pipeline_model_parallel_size": pp,
                "expert_model_parallel_size": ep,
                "micro_batch_size": micro_batch,
                "expert_tensor_parallel_size": 1 if self.config.model.moe else None,
                "sequence_parallel": tp > 1,
            }

    def _size_choices(self, num_experts: int) -> dict[str, Iterable[int]]:
        """Sizes of tp, cp, pp, ep and the micro-batch with which the search begins."""
        model = self.config.model
        seq_length = self.config.data.seq_length
        choices: dict[str, Iterable[int]] = {
            "tensor_model_parallel_size": _powers(min(self.max_tp, model.num_attention_heads)),
            "context_parallel_size": _powers(seq_length // FIRST_SLICE),
            "pipeline_model_parallel_size": range(1, model.num_layers + 1),
            "expert_model_parallel_size": _powers(num_experts),
            "micro_batch_size": _powers(MAX_TOKENS // seq_length)[::2],
        }
        for name in choices:
            if name in self.kept:
                choices[name] = [self.kept[name]]
        return choices


def _powers(limit: int) -> list[int]:
    """Powers of two up to a limit.

    >>> _powers(9)
    [1, 2, 4, 8]
    """
    return [1 << power for power in range(max(1, limit).bit_length())]
