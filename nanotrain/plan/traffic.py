"""Bytes that a rank sends per training step, by (group, operation), in closed form from a `Plan`.

    data_parallel   gradients and parameters: dp_shard, dp_replicate, expert_dp_shard, expert_dp_replicate
    embedding       gradients of the tied embedding: embed
    pipeline        hidden states and their gradients: pp
    attention       keys, values, outputs and states: cp, by kind of layer
    experts         tokens: ep, etp; padded, or for routers that choose every expert equally often, and as many nodes
                    per token as there can be
    matrices        hidden matrices of Muon: shard and replicate groups, tp, etp

The counts equal those of `comm/group.py` in a run; a recomputed forward counts twice. Not included:
tensor parallelism, fp8 amaxes over its groups, router statistics, attention logits of QK-clip and
control traffic.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from nanotrain.comm.group import reduced_bytes
from nanotrain.config.model import MoEConfig
from nanotrain.memory.block_transforms import recomputed_groups
from nanotrain.optim.matrix_update import MatrixRoutes, grid_groups, plan_matrices
from nanotrain.parallel.dp.fp8_weights import scales_shape
from nanotrain.parallel.dp.layout import BufferLayout
from nanotrain.parallel.dp.units import GatherOrder
from nanotrain.parallel.ep.token_dispatcher import DispatchOptions
from nanotrain.parallel.pp.actions import ActionKind
from nanotrain.parallel.pp.transfers import TransferBatch
from nanotrain.plan.plan import BufferPlan, Plan, StagePlan
from nanotrain.plan.saved_bytes import layer_sizes
from nanotrain.precision.dtypes import Precision
from nanotrain.precision.fp8 import RECIPES
from nanotrain.spec.kinds.block import block_operators
from nanotrain.topology.groups import GroupName

Key = tuple[str, str]  # group, operation
COUNT_BYTES = 4  # token counts are int32
TOKEN_TRIPS = 4  # dispatch and combine, forward and backward


def sent_bytes(plan: Plan) -> dict[Key, int]:
    """Bytes that this rank sends per training step, by (group, operation); operations without bytes
    are left out.
    """
    total: Counter[Key] = Counter()
    for part in (data_parallel, embedding, pipeline, attention, experts, matrices):
        for key, num_bytes in part(plan):
            total[key] += num_bytes
    return {key: num_bytes for key, num_bytes in total.items() if num_bytes}


def data_parallel(plan: Plan) -> Iterator[tuple[Key, int]]:
    """Reduce-scatter and all-gather in the shard group, and the collectives across instances, per
    bucket.

    Across instances shards are all-reduced, or reduce-scattered and all-gathered if they are
    sharded across instances.
    """
    precision, strategy = Precision.of(plan.config.precision), plan.data_parallel.strategy
    num_scatters = plan.num_microbatches if strategy.shard_grads else 1
    keeps_full = plan.config.parallel.force_all_reduce
    reduce_scatter = "all_to_all" if plan.data_parallel.by_all_to_all else "reduce_scatter"
    for stage, buffer in ((each, buffer) for each in plan.stages for buffer in each.buffers):
        shard, replicate = buffer.shard, buffer.replicate
        num_gathers = bucket_gathers(plan, stage, layout=buffer.layout)
        for bucket, gathers in zip(buffer.layout.buckets, num_gathers, strict=True):
            grads, params = (
                bucket.numel * precision.grads.itemsize,
                bucket.numel * buffer.param_size(precision),
            )
            inside = reduced_bytes(grads, shard.size)
            across = reduced_bytes(grads if keeps_full else grads // shard.size, replicate.size)
            if keeps_full:
                yield (shard.name, "all_reduce"), 2 * inside
            else:
                yield (shard.name, reduce_scatter), num_scatters * inside
            yield (shard.name, "all_gather"), gathers * reduced_bytes(params, shard.size)
            if bucket.num_outer_shards > 1:
                yield (
                    (replicate.name, "all_gather"),
                    reduced_bytes(params // shard.size, replicate.size),
                )
            if bucket.num_outer_shards > 1 and not keeps_full:
                yield (replicate.name, reduce_scatter), across
            else:
                yield (replicate.name, "all_reduce"), 2 * across
        if buffer.is_fp8:
            yield from _amaxes(plan, buffer)


def _amaxes(plan: Plan, buffer: BufferPlan) -> Iterator[tuple[Key, int]]:
    """Amaxes of fp8 weights, all-reduced in fp32 before they are quantized."""
    assert (fp8 := plan.config.precision.fp8) is not None, "callers have fp8 weights"
    block = RECIPES[fp8.recipe].weight_block
    num_bytes = sum(
        4 * math.prod(scales_shape(param.box.shape, block)) for param in buffer.layout.params
    )
    for group in (
        (buffer.shard, buffer.replicate) if buffer.layout.num_outer_shards > 1 else (buffer.shard,)
    ):
        yield (group.name, "all_reduce"), 2 * reduced_bytes(num_bytes, group.size)


def embedding(plan: Plan) -> Iterator[tuple[Key, int]]:
    """One all-reduce of this rank's gradient shard of the tied embedding."""
    if (group := plan.groups.get("embed")) is None:
        return
    itemsize = Precision.of(plan.config.precision).main_grads.itemsize
    for buffer in plan.buffers:
        outer_index = buffer.replicate.index % buffer.layout.num_outer_shards
        for bucket in buffer.layout.buckets:
            for part in bucket.update_ranges(buffer.shard.index, outer_index=outer_index):
                if "embed" in part.param.spec.grad_sum_axes:
                    yield (
                        ("embed", "all_reduce"),
                        2 * reduced_bytes(part.numel * itemsize, group.size),
                    )


def pipeline(plan: Plan) -> Iterator[tuple[Key, int]]:
    """Hidden states to the next stage, gradients to the previous one."""
    message_bytes = (
        math.prod(plan.hidden_shape) * Precision.of(plan.config.precision).params.itemsize
    )
    num_messages = sum(
        len(step.sends) for step in plan.train_schedule.steps if isinstance(step, TransferBatch)
    )
    yield ("pp", "p2p"), num_messages * message_bytes


def attention(plan: Plan) -> Iterator[tuple[Key, int]]:
    """Every attention layer of this rank, or other token mixer, forward and backward."""
    sizes = layer_sizes(plan, "cpu")
    if sizes.cp == 1:
        return
    is_full = plan.config.memory.recompute_granularity == "full"
    unsent = 0
    if sizes.cp_comm_type == "a2a" and not is_full:
        # a core attention that runs again alone, not in a layer, ends at its last saved tensor: the
        # output is not sent
        heads = plan.shape.num_heads // sizes.tp
        output = sizes.tokens * heads * plan.shape.value_head_dim * sizes.itemsize
        unsent = reduced_bytes(output, sizes.cp)
    num_again = Counter(recomputed_layers(plan, "core_attn"))
    for layer in _layers(plan):
        for operator in block_operators(sizes, layer):
            is_again = is_full or operator.module == "core_attn"
            for sent in operator.over_cp:
                num_bytes = sent.forward + sent.backward
                if is_again:
                    num_bytes += num_again[layer] * max(0, sent.forward - unsent)
                yield ("cp", sent.operation), plan.num_microbatches * num_bytes


def experts(plan: Plan) -> Iterator[tuple[Key, int]]:
    """Every mixture-of-experts layer of this rank, forward and backward."""
    moe, train = plan.shape.moe, plan.config.train
    if moe is None:
        return
    num_tokens = (
        train.micro_batch_size
        * plan.config.data.seq_length
        // (plan.groups["cp"].size * plan.groups["tp"].size)
    )
    # what experts read of all tokens of this rank, once per expert they are sent to
    row = plan.shape.expert_input_size * Precision.of(plan.config.precision).params.itemsize
    sizes = {"num_experts": moe.num_experts, "ep": plan.groups["ep"].size}
    routed = DispatchOptions.of(plan.config).num_rows(num_tokens, moe.router_topk, **sizes) * row
    counts = moe.num_experts * COUNT_BYTES  # known where layers are recomputed
    passes = (
        (_layers(plan), TOKEN_TRIPS, counts),
        (recomputed_layers(plan, "moe"), TOKEN_TRIPS // 2, 0),
    )
    for layers, trips, counted in passes:
        number = plan.num_microbatches * sum(map(plan.shape.has_experts, layers))
        nodes = plan.groups["ep"].size // (
            plan.config.parallel.moe_hierarchical_dispatch or plan.groups["ep"].size
        )
        # one row per token and node, with the numbers and weights of its experts in fp32
        if nodes > 1:
            rows = num_tokens * reached_nodes(moe, nodes)
            row_bytes = (
                trips * routed // (num_tokens * moe.router_topk) + trips // 2 * 8 * moe.router_topk
            )
            across = rows * row_bytes + (nodes * COUNT_BYTES if counted else 0)
            yield ("ep", "all_to_all_across"), number * reduced_bytes(across, nodes)
        for (group, operation), count in EXPERT_BYTES.items():
            # ranks of a node, experts of a node
            size, shared = plan.groups[group].size, nodes if group == "ep" else 1
            yield (
                (group, operation),
                number * count(trips * routed, counted // nodes, size // shared),
            )


def reached_nodes(moe: MoEConfig, num_nodes: int) -> int:
    """The most nodes that hold experts of one token; experts are chosen from a few groups where
    there are groups.

    >>> reached_nodes(MoEConfig(num_experts=64, router_topk=8, router_num_groups=8, router_group_topk=4), 8)
    4
    """
    groups, group_topk = moe.router_num_groups or 1, moe.router_group_topk or 1
    is_inside = groups % num_nodes == 0  # every group on one node
    return min(num_nodes, moe.router_topk, group_topk if is_inside else num_nodes)


def recomputed_layers(plan: Plan, module: str) -> list[int]:
    """The layers of this rank in which a module runs again in the backward."""
    config = plan.config
    if config.memory.recompute_granularity == "full":
        return [
            layers[i]
            for stage in plan.stages
            for layers in (stage.spec.layers, *([layer] for layer in stage.mtp_layers))
            for group in recomputed_groups(config, len(layers))
            for i in group
        ]
    return _layers(plan) if module in config.memory.recomputed_modules else []


def _layers(plan: Plan) -> list[int]:
    """The layers of this rank, including multi-token prediction."""
    return [layer for stage in plan.stages for layer in (*stage.spec.layers, *stage.mtp_layers)]


def matrices(plan: Plan) -> Iterator[tuple[Key, int]]:
    """Directions of hidden matrices to their owners, and transformed matrices back."""
    rule, config = plan.rule.matrix, plan.config.optim
    if rule is None:
        return
    for name in dict.fromkeys(buffer.shard.name for buffer in plan.buffers):
        buffers = [buffer for buffer in plan.buffers if buffer.shard.name == name]
        groups = grid_groups(
            buffers[0].shard,
            buffers[0].replicate,
            groups=plan.groups,
            config=config,
            shards_across=buffers[0].layout.num_outer_shards > 1,
        )
        placed = plan_matrices(
            [buffer.layout for buffer in buffers], rule, config=config, groups=groups
        )
        for axis, numel in MatrixRoutes(placed, groups).sent_numel().items():
            yield (getattr(groups, axis).name, "all_to_all"), numel * rule.dtype(config).itemsize


# bytes of a layer, from those of its tokens over all trips, those of the counts and the size of the
# group: tokens go to the ranks of their experts and back, with the counts, and to every shard of an
# expert and back
EXPERT_BYTES: dict[tuple[GroupName, str], Callable[[int, int, int], int]] = {
    ("ep", "all_to_all"): lambda tokens, counts, size: reduced_bytes(tokens + counts, size),
    ("etp", "all_to_all"): lambda tokens, counts, size: tokens * (size - 1),
    ("etp", "all_gather"): lambda tokens, counts, size: counts * (size - 1),
}


def bucket_gathers(plan: Plan, stage: StagePlan, *, layout: BufferLayout) -> list[int]:
    """All-gathers per step of every bucket of one buffer of a stage."""
    options = plan.data_parallel
    if not options.strategy.shard_params:
        return [1] * len(layout.buckets)
    first, groups = int(stage.spec.has_embedding), []
    if plan.config.memory.recompute_granularity == "full":
        groups = recomputed_groups(plan.config, len(stage.spec.layers))
    units = stage_units(stage, layout)
    lookups = range(bool(first and units[0]))  # the embedding, where it is in this buffer
    counts = step_gathers(
        (action.kind for action in plan.train_schedule.actions if action.stage == stage.spec.index),
        units,
        order=GatherOrder.of(filter(None, units), layout, options=options, lookups=lookups),
        groups=[range(group.start + first, group.stop + first) for group in groups],
        has_loss=stage.spec.has_head and bool(units[-1]),
    )
    return [counts[index] for index in range(len(layout.buckets))]


def stage_units(stage: StagePlan, layout: BufferLayout) -> list[tuple[int, ...]]:
    """The buckets of one buffer that each module of a stage reads, by index, in forward order; see
    `child_units`.
    """
    spec = stage.spec
    mtp = [f"mtp.{depth}" for depth in range(len(stage.mtp_layers))]
    names = [f"layers.{layer}" for layer in spec.layers]
    names = ["embedding"] * spec.has_embedding + names + ["head"] * spec.has_head + mtp
    by_name = {
        name: tuple(i for i, bucket in enumerate(layout.buckets) if name in bucket.units)
        for name in names
    }
    shared = tuple(i for i, bucket in enumerate(layout.buckets) if bucket.is_shared)
    if spec.has_head and all(param.spec.name != "head.weight" for param in stage.params):
        by_name["head"] += shared
    by_name |= {name: by_name[name] + shared for name in mtp}
    return [by_name[name] for name in names]


def step_gathers(
    kinds: Iterable[ActionKind],
    units: Sequence[tuple[int, ...]],
    *,
    order: GatherOrder,
    groups: Sequence[range] = (),
    has_loss: bool = False,
) -> Counter[int]:
    """All-gathers by bucket.

    Args:
        kinds: kinds of the actions of one stage, in their order.
        units: buckets that each module reads, in forward order; none for a module of another
            buffer.
        order: gather order of the units that are not empty.
        groups: ranges of modules that are recomputed together.
        has_loss: whether the last unit returns a loss.
    """
    unit_of = {
        module: index for index, module in enumerate(m for m, unit in enumerate(units) if unit)
    }
    again = {
        group[-1]: [unit_of[module] for module in group if module in unit_of] for group in groups
    }
    counts: Counter[int] = Counter()
    for kind in kinds:
        if kind is ActionKind.forward:
            for index in range(len(order.units)):
                counts.update(order.before_forward(index).started)
                order.after_forward(index, has_backward=True, is_loss=has_loss)
            continue
        # the first unit of an I action stays until W or another forward
        if kind is not ActionKind.backward_input:
            order.free()
        for module in reversed(range(len(units))) if kind.has_dgrad else ():
            if module in unit_of:
                counts.update(order.before_backward(unit_of[module]).started)
            for index in again.get(module, ()):
                counts.update(order.before_recomputation(index).started)
        if kind is not ActionKind.backward_input:
            order.free()
    return counts
