"""All-gathers of parameter buckets in a training step.

bucket_gathers   all-gathers of every bucket of a buffer of a stage
first_backward   the first module of a stage that has a backward
stage_units      buckets that each module of a stage reads
step_gathers     all-gathers of the actions of one stage
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from nanotrain.memory.block_transforms import recomputed_groups
from nanotrain.parallel.dp.layout import BufferLayout
from nanotrain.parallel.dp.units import GatherOrder
from nanotrain.parallel.pp.actions import ActionKind
from nanotrain.plan.model_plan import StagePlan
from nanotrain.plan.plan import Plan


def bucket_gathers(plan: Plan, stage: StagePlan, *, layout: BufferLayout) -> list[int]:
    """All-gathers per step of every bucket of one buffer of a stage."""
    options = plan.data_parallel
    if not options.strategy.shard_params:
        num_gathers = 1 if layout.is_trainable else 0
        return [num_gathers] * len(layout.buckets)
    spec = stage.spec
    units = stage_units(stage, layout)
    has_lookup = spec.has_embedding and len(units[0]) > 0  # the embedding is in this buffer
    lookups = range(1) if has_lookup else range(0)
    groups = []
    if plan.config.memory.recompute_granularity == "full":
        num_before = len(_modules_before_layers(stage))
        for group in recomputed_groups(plan.config, len(spec.layers)):
            groups.append(range(group.start + num_before, group.stop + num_before))
    kinds = [action.kind for action in plan.train_schedule.actions if action.stage == spec.index]
    counts = step_gathers(
        kinds,
        units,
        order=GatherOrder.of(filter(None, units), layout, options=options, lookups=lookups),
        groups=groups,
        has_loss=spec.has_head and bool(units[-1]),
        first_backward=first_backward(plan, stage),
    )
    return [counts[index] for index in range(len(layout.buckets))]


def first_backward(plan: Plan, stage: StagePlan) -> int:
    """The first module of a stage whose output has a gradient: 0, unless all before are frozen."""
    if stage.spec.index > plan.train_schedule.first_trained_stage:
        return 0
    names = module_names(stage)
    trained = {param.spec.unit for param in stage.params if param.spec.is_trainable}
    for module, name in enumerate(names):
        if name in trained:
            return module
    return len(names)


def stage_units(stage: StagePlan, layout: BufferLayout) -> list[tuple[int, ...]]:
    """Buckets of one buffer that each module of a stage reads, in forward order (`child_units`)."""
    buckets = layout.buckets
    shared = tuple(index for index, bucket in enumerate(buckets) if bucket.is_shared)
    has_tied_head = all(param.spec.name != "head.weight" for param in stage.params)
    units = []
    for name in module_names(stage):
        unit_buckets = tuple(index for index, bucket in enumerate(buckets) if name in bucket.units)
        is_tied_head = name == "head" and has_tied_head
        reads_shared = is_tied_head or name.startswith("mtp.")
        units.append(unit_buckets + shared if reads_shared else unit_buckets)
    return units


def module_names(stage: StagePlan) -> list[str]:
    """FSDP units of the modules of a stage, in forward order."""
    names = _modules_before_layers(stage)
    names += [f"layers.{layer}" for layer in stage.spec.layers]
    if stage.spec.has_head:
        names.append("head")
    names += [f"mtp.{depth}" for depth in range(len(stage.mtp_layers))]
    return names


def _modules_before_layers(stage: StagePlan) -> list[str]:
    """The embedding, and the inputs of layers where the model has them."""
    if not stage.spec.has_embedding:
        return []
    has_inputs = any(param.spec.unit == "layer_inputs" for param in stage.params)
    return ["embedding", "layer_inputs"] if has_inputs else ["embedding"]


def step_gathers(
    kinds: Iterable[ActionKind],
    units: Sequence[tuple[int, ...]],
    *,
    order: GatherOrder,
    groups: Sequence[range] = (),
    has_loss: bool = False,
    first_backward: int = 0,
) -> Counter[int]:
    """All-gathers by bucket.

    Args:
        kinds: kinds of the actions of one stage, in their order.
        units: buckets that each module reads, in forward order; none for a module of another
            buffer.
        order: gather order of the units that are not empty.
        groups: ranges of modules that are recomputed together.
        has_loss: whether the last unit returns a loss.
        first_backward: index of the first module that has a backward.
    """
    gathers = StageGathers(order, units, groups=groups, first_backward=first_backward)
    for kind in kinds:
        if kind is ActionKind.forward:
            gathers.forward(has_loss=has_loss)
            continue
        # the first unit of an I action stays until W or another forward
        if kind is not ActionKind.backward_input:
            order.free()
        if kind.has_dgrad:
            gathers.backward()
        if kind is not ActionKind.backward_input:
            order.free()
    return gathers.counts


class StageGathers:
    """A counter of the all-gathers of the actions of one stage.

    Args:
        order: gather order of the units that are not empty.
        units: buckets that each module reads, in forward order.
        groups: ranges of modules that are recomputed together.
        first_backward: index of the first module that has a backward.
    """

    def __init__(
        self,
        order: GatherOrder,
        units: Sequence[tuple[int, ...]],
        *,
        groups: Sequence[range],
        first_backward: int = 0,
    ) -> None:
        self.order = order
        self.first_backward = first_backward
        self.counts: Counter[int] = Counter()
        full = [module for module, unit in enumerate(units) if unit]
        self.num_modules = len(units)
        self.unit_of_module = {module: index for index, module in enumerate(full)}
        self.recomputed_before: dict[int, list[int]] = {}  # units by the last module of a group
        for group in groups:
            modules = [module for module in group if module in self.unit_of_module]
            self.recomputed_before[group[-1]] = [self.unit_of_module[m] for m in modules]

    def forward(self, *, has_loss: bool) -> None:
        """A forward of all units."""
        for module, index in self.unit_of_module.items():
            self.counts.update(self.order.before_forward(index).started)
            has_backward = module >= self.first_backward
            self.order.after_forward(index, has_backward=has_backward, is_loss=has_loss)

    def backward(self) -> None:
        """A backward of all units, with the recomputation of groups."""
        for module in reversed(range(self.first_backward, self.num_modules)):
            if module in self.unit_of_module:
                index = self.unit_of_module[module]
                self.counts.update(self.order.before_backward(index).started)
            for index in self.recomputed_before.get(module, ()):
                self.counts.update(self.order.before_recomputation(index).started)
