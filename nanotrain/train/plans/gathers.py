"""All-gathers of parameters per step: one after the update, or with ZeRO-3 those of a `GatherOrder`.

bucket_gathers   of every bucket of a buffer
stage_units      the buckets that each module of a stage reads, in forward order
step_gathers     of a sequence of actions
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from nanotrain.config.config import RecomputeGranularity
from nanotrain.memory.block_transforms import recomputed_groups
from nanotrain.parallel.dp.layout import BufferLayout
from nanotrain.parallel.dp.units import GatherChange, GatherOrder
from nanotrain.parallel.pp.actions import Action, ActionKind
from nanotrain.train.plans.plan import Plan, StagePlan


def bucket_gathers(plan: Plan, stage: StagePlan, *, layout: BufferLayout) -> list[int]:
    """All-gathers per step of every bucket of one buffer of a stage."""
    options, steps = plan.data_parallel, plan.train_schedule.steps
    if not options.strategy.shard_params:
        return [1] * len(layout.buckets)
    first, groups = int(stage.spec.has_embedding), []
    if plan.config.memory.recompute_granularity is RecomputeGranularity.full:
        groups = recomputed_groups(plan.config, len(stage.spec.layers))
    units = stage_units(stage, layout)
    counts = step_gathers(
        (step.kind for step in steps if isinstance(step, Action) and step.stage == stage.spec.index),
        units,
        order=GatherOrder.of(filter(None, units), layout, options=options),
        groups=[range(group.start + first, group.stop + first) for group in groups],
    )
    return [counts[index] for index in range(len(layout.buckets))]


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


def step_gathers(
    kinds: Iterable[ActionKind],
    units: Sequence[tuple[int, ...]],
    *,
    order: GatherOrder,
    groups: Sequence[range] = (),
) -> Counter[int]:
    """All-gathers by bucket.

    Args:
        kinds: of the actions of one stage, in their order.
        units: the buckets that each module reads, in forward order; none for a module of another buffer.
        order: of the units that are not empty.
        groups: modules that are recomputed together.
    """
    unit_of = {module: index for index, module in enumerate(m for m, unit in enumerate(units) if unit)}
    again = {group[-1]: [unit_of[module] for module in group if module in unit_of] for group in groups}
    backward = [(unit_of.get(module), again.get(module, [])) for module in reversed(range(len(units)))]
    counts: Counter[int] = Counter()
    for kind in kinds:
        for change in _changes(kind, order, backward=backward):
            counts.update(change.started)
    return counts


def _changes(
    kind: ActionKind, order: GatherOrder, *, backward: Sequence[tuple[int | None, Sequence[int]]]
) -> Iterator[GatherChange]:
    """What one action gathers; `backward`: the unit of each module, last first, and those that run again after it."""
    if kind is ActionKind.forward:
        for index in range(len(order.units)):
            yield order.before_forward(index)
            yield order.after_forward(index, has_backward=True)
        return
    if kind is not ActionKind.backward_input:  # the first unit of an I action stays until W or another forward
        yield order.free()
    for own, again in backward if kind.has_dgrad else ():
        if own is not None:
            yield order.before_backward(own)
        for index in again:
            yield order.before_recomputation(index)
    if kind is not ActionKind.backward_input:
        yield order.free()
