"""All-gathers of parameters per step: one after the update, or with ZeRO-3 one whenever a unit is needed but not there.

    num_gathers        of one bucket
    stage_units        the buckets that each module of a stage reads, in forward order
    BackwardGathers    the all-gathers of one backward: `parallel/dp/unit_gather.py` without tensors

In a backward every unit is gathered once. If a group of several layers is recomputed, the backward of its last layer
first runs the group forward, which gathers each layer that is not there. Besides the running layer only the layer whose
backward waits, and the units that it has gathered ahead, stay in memory:

    group 1 2 3    backward 3: gather 3 | forward 1: gather 1 | forward 2: gather 2, free 1 | forward 3, backward 3
                   backward 2: gather 2, if it was not kept as the one ahead | backward 1: gather 1
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from nanotrain.config.config import RecomputeGranularity
from nanotrain.memory.block_transforms import recomputed_groups
from nanotrain.parallel.dp.layout import BucketLayout, BufferLayout
from nanotrain.parallel.pp.actions import Action, ActionKind
from nanotrain.train.plans.plan import Plan, StagePlan


def num_gathers(plan: Plan, bucket: BucketLayout, *, stage: int) -> int:
    """All-gathers of one bucket per step.

    After an I action the first unit of a stage stays gathered until W or another forward.
    """
    options = plan.data_parallel
    if not options.strategy.shard_params:
        return 1
    staged = next(each for each in plan.stages if each.spec.index == stage)
    layout = next(buffer.layout for buffer in staged.buffers if bucket in buffer.layout.buckets)
    index, units = layout.buckets.index(bucket), stage_units(staged, layout)
    is_first = index in next(filter(None, units))
    reshards = plan.config.parallel.reshard_after_forward
    per_forward = forward_gathers(units, num_prefetched=options.num_prefetched_units)[index] if reshards else 1
    per_backward = backward_gathers(plan, staged, layout=layout)[index] if reshards else 0
    count, between, is_gathered = 0, 0, False  # microbatches between their forward and their backward
    for action in plan.train_schedule.steps:
        if not isinstance(action, Action) or action.stage != stage:
            continue
        if action.kind is ActionKind.forward:
            count, between = count + per_forward - is_gathered, between + 1
            is_gathered = not reshards
            continue
        between -= action.kind.has_dgrad
        count += per_backward * action.kind.has_dgrad
        is_gathered = not reshards and between > 0 or is_first and action.kind is ActionKind.backward_input
    return count


def stage_units(stage: StagePlan, layout: BufferLayout) -> list[tuple[int, ...]]:
    """The buckets of one buffer that each module of a stage reads, by index, in forward order; see `child_units`."""
    spec = stage.spec
    mtp = [f"mtp.{depth}" for depth in range(len(stage.mtp_layers))]
    names = [f"layers.{layer}" for layer in spec.layers]
    names = ["embedding"] * spec.has_embedding + names + ["final_norm", "head"] * spec.has_head + mtp
    by_name = {name: tuple(i for i, bucket in enumerate(layout.buckets) if name in bucket.units) for name in names}
    shared = tuple(i for i, bucket in enumerate(layout.buckets) if bucket.is_shared)
    if spec.has_head:
        by_name["head"] = by_name["head"] or shared
    by_name |= {name: by_name[name] + shared for name in mtp}
    return [by_name[name] for name in names]


def forward_gathers(units: Sequence[tuple[int, ...]], *, num_prefetched: int) -> Counter[int]:
    """The all-gathers of one forward whose units are freed after it, by bucket.

    Successive units may read the same bucket; a bucket that was gathered ahead is not gathered again.

    >>> forward_gathers([(2,), (1, 0), (0,)], num_prefetched=0)[0]
    2
    """
    units = [unit for unit in units if unit]
    counts: Counter[int] = Counter()
    there: set[int] = set()
    for index in range(len(units)):
        ahead = {bucket for unit in units[index + 1 : index + 1 + num_prefetched] for bucket in unit}
        wanted = ahead.union(units[index])
        counts.update(wanted - there)
        there = ahead
    return counts


def backward_gathers(plan: Plan, stage: StagePlan, *, layout: BufferLayout) -> Counter[int]:
    """The all-gathers of one backward of a stage, by bucket."""
    first, groups = int(stage.spec.has_embedding), []
    if plan.config.memory.recompute_granularity is RecomputeGranularity.full:
        groups = recomputed_groups(plan.config, len(stage.spec.layers))
    options = plan.data_parallel
    blocks = layout.gather_blocks(options.num_gather_blocks).places if options.num_gather_blocks else ()
    gathers = BackwardGathers(
        stage_units(stage, layout),
        num_prefetched=options.num_prefetched_units,
        blocks=[name for name, _ in blocks],
    )
    return gathers.run([range(group.start + first, group.stop + first) for group in groups])


class BackwardGathers:
    """Counts the all-gathers of one backward whose units are freed after their forward.

    Args:
        units: the buckets that each module reads, by index, in forward order; none for a module of another buffer.
        num_prefetched: units gathered ahead.
        blocks: of every bucket, the block of memory that it shares with others; empty where each has its own.
    """

    def __init__(self, units: Sequence[tuple[int, ...]], *, num_prefetched: int, blocks: Sequence[str] = ()) -> None:
        self._modules = [module for module, unit in enumerate(units) if unit]
        self._units = [unit for unit in units if unit]
        self._num_next, self._blocks, self._num_modules = num_prefetched, blocks, len(units)
        self._there: set[int] = set()
        self._last = 0  # the unit whose backward began last; a backward ends with the first one
        self._counts: Counter[int] = Counter()

    def run(self, groups: Iterable[range]) -> Counter[int]:
        """The all-gathers by bucket, if these groups of modules are recomputed together."""
        group_of = {group[-1]: group for group in groups}
        for module in reversed(range(self._num_modules)):
            if module in self._modules:
                self._begin_backward(self._modules.index(module))
            for again in group_of.get(module, ()):
                if again in self._modules:
                    self._run_again(self._modules.index(again))
        return self._counts

    def _begin_backward(self, index: int) -> None:
        self._last = index
        self._gather(self._buckets(range(index - self._num_next, index + 1)))

    def _run_again(self, index: int) -> None:
        current, ahead = set(self._units[index]), self._num_next if index == self._last else 0
        in_use = self._buckets(range(self._last - ahead, self._last + 1)) & self._there
        self._there &= current | {bucket for bucket in in_use if not self._is_excluded(bucket, current)}
        self._gather(self._there | current)

    def _gather(self, buckets: set[int]) -> None:
        self._counts.update(buckets - self._there)
        self._there = buckets

    def _buckets(self, indices: range) -> set[int]:
        return {bucket for index in indices if index >= 0 for bucket in self._units[index]}

    def _is_excluded(self, bucket: int, current: set[int]) -> bool:
        """Whether a bucket lies in the memory of another unit that is to be gathered."""
        return bucket not in current and any(
            self._blocks[bucket] == self._blocks[other] for other in current if self._blocks
        )
