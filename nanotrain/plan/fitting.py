"""`require_memory`: the memory of a run, or an error with settings that fit (docs/memory.md)."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import prod
from typing import Any, NamedTuple, get_args

from nanotrain.config.config import Config
from nanotrain.config.parallel import ShardingStrategy
from nanotrain.config.rules.check import check_layout
from nanotrain.config.schema import with_values
from nanotrain.errors import ConfigError, NanotrainError
from nanotrain.plan.compile import with_compile
from nanotrain.plan.memory_plan import MemoryPlan, plan_memory, worst_memory
from nanotrain.quantities import describe_bytes
from nanotrain.spec.operators import POINTWISE

# A run is refused only if the exact part and this share of the activations exceed the memory: the
# estimate is within 10 %, and a compiled block may save only half.
CERTAIN_SHARE = 0.8
CERTAIN_SHARE_COMPILED = 0.4
SEARCH_S = 4.0  # CPU time after which the search for settings that fit ends


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
