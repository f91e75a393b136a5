"""`search`: the layouts of a model on a number of GPUs that fit into memory, the fastest first.

    sizes --rules of configurations, memory of the first pipeline rank--> layouts --predict_step-->
          ordered by time --memory of all ranks, the fastest first--> Search

Settings that the caller fixes are not varied. Of the ways to save memory every layout gets, for
each amount of recomputation, the sharding strategy with the least communication whose first
pipeline rank fits.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, product
from math import inf
from typing import Any

from nanotrain.config.config import Config
from nanotrain.config.rules.check import check_layout
from nanotrain.config.schedules import global_batch_size
from nanotrain.config.schema import ENTRIES, KEYS, value_of, with_values
from nanotrain.errors import ConfigError, NanotrainError
from nanotrain.planner.hardware import GPU, read_data
from nanotrain.planner.memory import memory_of_rank
from nanotrain.planner.prediction import Prediction, predict
from nanotrain.planner.scenario import scenario_of
from nanotrain.planner.step_time import predict_step

Values = Mapping[str, Any]  # settings by unique name

MAX_TOKENS = 65_536  # of a microbatch
MIN_SLICE = 1024  # tokens of a sequence per context-parallel rank
FIRST_SLICE = 4096  # the same, of the layouts that the search begins with
# strategies that are tried, by rising communication
SHARDED = ("optim", "optim_grads", "optim_grads_params")
LAYOUTS = read_data("layouts")
FIRST: Values = LAYOUTS["first"]
NAMES = (*FIRST, "cp_comm_type")  # settings of a layout
SHARD_RANKS = (8, 64, 512)  # of an optimizer instance, where state is sharded inside instances only
NUM_IMPROVED, NUM_ROUNDS = 16, 4  # layouts of which every single change is tried, and how often
NUM_BEST = 5  # layouts of the result
FRONTIER_STEP = 0.8  # of the memory, from one layout of the frontier to the next


@dataclass(frozen=True)
class Search:
    """The result of a search."""

    best: tuple[Prediction, ...]  # the fastest first
    # those that no other layout beats in both time and memory, the fastest first
    frontier: tuple[Prediction, ...]
    num_formed: int  # layouts that the rules allow
    num_timed: int  # of these, those whose first pipeline rank fits


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
        config = with_values(
            config, {"train.global_batch_size": global_batch_size(config.train, dp)}
        )
    kept = {KEYS[key].name: value_of(config, key) for key in fixed if key in KEYS}
    max_tp = max_tensor_parallel_size or gpu.gpus_per_node
    space = Space(config, world_size, gpu=gpu, engine=engine, kept=kept, max_tp=max_tp)
    candidates = list(space.candidates())
    if not space.num_formed:
        raise ConfigError(
            f"no layout of {world_size:,} GPUs can be formed",
            why=f"a global batch of {config.train.global_batch_size:,} samples and the fixed settings leave none",
            fix="change the number of GPUs or --global-batch-size, or fix fewer settings",
        )
    candidates = space.improved(candidates)
    best = tuple(islice(_fitting(candidates), NUM_BEST))
    if not best:
        raise ConfigError(
            f"no layout fits on {world_size:,} GPUs of {gpu.memory_bytes / 1e9:.0f} GB",
            why=f"each of {space.num_formed:,} layouts needs at least {space.least_bytes / 1e9:.1f} GB",
            fix="add GPUs, choose GPUs with more memory, or shorten --seq-length",
        )
    lighter = _fitting(_lighter(candidates, factor=FRONTIER_STEP))
    return Search(best, tuple(_lighter([best[0], *lighter])), space.num_formed, len(candidates))


def next_change(prediction: Prediction) -> Prediction | None:
    """The single change of a layout that makes the step the shortest and fits; None if none is
    faster.
    """
    scenario, gpu = prediction.scenario, prediction.scenario.gpu
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
    return next(_fitting(faster), None)


def layout_of(config: Config) -> dict[str, Any]:
    """The settings of the layout of a configuration."""
    return {name: value_of(config, ENTRIES[name].key) for name in NAMES}


def _fitting(candidates: Iterable[Prediction]) -> Iterator[Prediction]:
    """The layouts of which every pipeline rank fits, as the first of every candidate does."""
    for candidate in candidates:
        scenario = candidate.scenario
        plans = (memory_of_rank(scenario, rank) for rank in range(1, scenario.sizes["pp"]))
        if all(plan.reserved <= scenario.gpu.memory_bytes for plan in plans):
            yield predict(scenario)


def _lighter(predictions: Iterable[Prediction], *, factor: float = 1.0) -> Iterator[Prediction]:
    """Of layouts by rising time those with less than a share of the memory of all before."""
    least: float = inf
    for each in predictions:
        if each.memory.total < factor * least:
            least = each.memory.total
            yield each


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
    least_bytes: float = inf  # least memory of the first pipeline rank
    tried: set[str] = field(default_factory=set)  # layouts so far

    def candidates(self) -> Iterator[Prediction]:
        """Layouts of all sizes; for each amount of recomputation the first strategy that may fit."""
        for sizes in self._sizes():
            for recompute in LAYOUTS["recomputed"][::2]:
                for strategy in SHARDED:
                    values = {**sizes, **recompute, "data_parallel_sharding_strategy": strategy}
                    if (candidate := self.candidate(values)) is not None:
                        yield candidate
                        break

    def improved(self, candidates: Iterable[Prediction]) -> list[Prediction]:
        """All candidates and single changes of the fastest, round by round; the fastest first."""
        known = list(candidates)
        for _ in range(NUM_ROUNDS):
            # other schedules shrink the bubble
            promising = sorted(known, key=lambda each: each.time.total - each.time.bubble / 2)
            known += [
                new
                for each in promising[:NUM_IMPROVED]
                for new in self.changes(each.scenario.config)
            ]
        return sorted(known, key=lambda candidate: candidate.time.total)

    def changes(self, config: Config) -> Iterator[Prediction]:
        """Every single change of the layout of a configuration that may fit."""
        values = layout_of(config)
        for change in self._single_changes(values):
            new = {**values, **change}
            new["sequence_parallel"] = new["tensor_model_parallel_size"] > 1
            is_free = self.kept.keys().isdisjoint(change)
            if is_free and new != values and (candidate := self.candidate(new)) is not None:
                yield candidate

    def _single_changes(self, values: Values) -> Iterator[Values]:
        """Other settings where they have an effect; sizes twice or half as large."""
        yield from LAYOUTS["recomputed"]
        yield from ({"data_parallel_sharding_strategy": strategy} for strategy in SHARDED)
        limits = self.max_tp, max(1, self.config.data.seq_length // MIN_SLICE), inf
        names = "tensor_model_parallel_size", "context_parallel_size", "micro_batch_size"
        for name, limit in zip(names, limits, strict=True):
            yield from (
                {name: size} for size in (2 * values[name], values[name] // 2) if 0 < size <= limit
            )
        num_ranks = self.world_size // (
            values["tensor_model_parallel_size"] * values["pipeline_model_parallel_size"]
        )
        yield from (
            {"num_distributed_optimizer_instances": max(1, num_ranks // size)}
            for size in SHARD_RANKS
        )
        if values["pipeline_model_parallel_size"] > 1:
            yield from LAYOUTS["schedules"]
        if values["context_parallel_size"] > 1:
            yield from ({"cp_comm_type": kind} for kind in ("p2p", "a2a"))
        if self.config.model.moe:
            yield from (
                {"expert_tensor_parallel_size": n}
                for n in (1, values["tensor_model_parallel_size"])
            )

    def candidate(self, values: Values) -> Prediction | None:
        """A layout with its time and the memory of its first pipeline rank.

        None if it is forbidden, cannot fit, or was formed before, as by a third of all changes.
        """
        layout = {**layout_of(self.config), **values, **self.kept}
        if (key := str(layout)) in self.tried:
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
        return (
            None
            if memory.reserved > self.gpu.memory_bytes
            else Prediction(scenario, memory, predict_step(scenario))
        )

    def _sizes(self) -> Iterator[Values]:
        """Layouts of all sizes of tp, cp, pp, ep and the micro-batch that divide the GPUs and the
        global batch.
        """
        model, seq_length = self.config.model, self.config.data.seq_length
        batch_size = self.config.train.global_batch_size or 0
        num_experts, etp = (model.moe.num_experts, 1) if model.moe else (1, None)
        choices: dict[str, Iterable[int]] = {
            "tensor_model_parallel_size": _powers(min(self.max_tp, model.num_attention_heads)),
            "context_parallel_size": _powers(seq_length // FIRST_SLICE),
            "pipeline_model_parallel_size": range(1, model.num_layers + 1),
            "expert_model_parallel_size": _powers(num_experts),
            "micro_batch_size": _powers(MAX_TOKENS // seq_length)[::2],
        }
        choices |= {name: [self.kept[name]] for name in choices if name in self.kept}
        for tp, cp, pp, ep, micro_batch in product(*choices.values()):
            num_ranks, rest = divmod(self.world_size, tp * cp * pp)  # of data parallelism
            if not rest and num_experts % ep == 0 and batch_size % (num_ranks * micro_batch) == 0:
                sizes = dict(zip(choices, (tp, cp, pp, ep, micro_batch), strict=True))
                yield {
                    **FIRST,
                    **sizes,
                    "expert_tensor_parallel_size": etp,
                    "sequence_parallel": tp > 1,
                }


def _powers(limit: int) -> list[int]:
    """Powers of two up to a limit.

    >>> _powers(9)
    [1, 2, 4, 8]
    """
    return [1 << power for power in range(max(1, limit).bit_length())]
