"""Bytes that a rank sends per training step, by (group, operation), in closed form from a `Plan`.

    data_parallel   gradients and parameters: (expert_)dp_shard, (expert_)dp_replicate
    embedding       gradients of the tied embedding: embed
    pipeline        hidden states and their gradients: pp
    attention       keys, values, outputs and states: cp, by kind of layer
    experts         tokens: ep, etp; padded, or for routers that choose every expert equally often,
                    and as many nodes per token as there can be
    routing         logits and experts of a sequence, where its ranks choose together: tp_cp
    matrices        hidden matrices of Muon: shard and replicate groups, tp, etp

The counts equal those of `comm/group.py` in a run; a recomputed forward counts twice. Below the
first layer with trained parameters no backward sends anything; that layer counts as a whole. Not
included:
tensor parallelism, fp8 amaxes over its groups, router statistics, attention logits of QK-clip,
norms of Hyperball's matrices and control traffic.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from nanotrain.comm.group import reduced_bytes
from nanotrain.config.model import MoEConfig
from nanotrain.kernels.fp8.layer import layers_in_bf16
from nanotrain.memory.block_transforms import recomputed_groups
from nanotrain.optim.matrix_routes import MatrixRoutes
from nanotrain.parallel.dp.fp8_weights import scales_shape
from nanotrain.parallel.dp.layout import BucketLayout
from nanotrain.parallel.ep.fp8_dispatch import row_bytes
from nanotrain.parallel.ep.token_dispatcher import DispatchOptions, reached_nodes
from nanotrain.parallel.pp.actions import ActionKind
from nanotrain.parallel.pp.transfers import TransferBatch
from nanotrain.plan.buffers import BufferPlan
from nanotrain.plan.gathers import bucket_gathers, first_backward, module_names
from nanotrain.plan.plan import Plan
from nanotrain.plan.saved_bytes import layer_sizes
from nanotrain.precision.dtypes import Precision
from nanotrain.precision.fp8 import RECIPES
from nanotrain.spec.kinds.block import block_operators
from nanotrain.topology.groups import GroupName, GroupSpec

Key = tuple[str, str]  # group, operation
COUNT_BYTES = 4  # token counts are int32
COLUMN_BYTES = 4  # logits, weights, experts and positions are gathered as int32
TOKEN_TRANSFERS = 4  # dispatch and combine, forward and backward


def sent_bytes(plan: Plan) -> dict[Key, int]:
    """Bytes that this rank sends per training step, without operations that send nothing."""
    total: Counter[Key] = Counter()
    for part in PARTS:
        for key, num_bytes in part(plan):
            total[key] += num_bytes
    return {key: num_bytes for key, num_bytes in total.items() if num_bytes}


def data_parallel(plan: Plan) -> Iterator[tuple[Key, int]]:
    """Collectives of gradients and parameters per bucket, in the shard group and across instances.

    Across instances shards are all-reduced, or reduce-scattered and all-gathered if they are
    sharded across instances.
    """
    for stage in plan.stages:
        for buffer in stage.buffers:
            num_gathers = bucket_gathers(plan, stage, layout=buffer.layout)
            for bucket, gathers in zip(buffer.layout.buckets, num_gathers, strict=True):
                yield from _bucket(plan, buffer, bucket=bucket, num_gathers=gathers)
            if buffer.is_fp8:
                yield from _amaxes(plan, buffer)


def _bucket(
    plan: Plan, buffer: BufferPlan, *, bucket: BucketLayout, num_gathers: int
) -> Iterator[tuple[Key, int]]:
    """Collectives of one bucket."""
    shard = buffer.shard
    replicate = buffer.replicate
    precision = Precision.of(plan.config.precision)
    keeps_full = plan.config.parallel.force_all_reduce
    reduce_scatter = "all_to_all" if plan.data_parallel.by_all_to_all else "reduce_scatter"
    grads = bucket.numel * precision.grads.itemsize
    params = bucket.numel * buffer.param_size(precision)
    yield (shard.name, "all_gather"), num_gathers * reduced_bytes(params, shard.size)
    if not buffer.layout.is_trainable:
        return

    inside = reduced_bytes(grads, shard.size)
    if keeps_full:
        yield (shard.name, "all_reduce"), 2 * inside
    else:
        num_scatters = plan.num_microbatches if plan.data_parallel.strategy.shard_grads else 1
        yield (shard.name, reduce_scatter), num_scatters * inside

    if bucket.num_outer_shards > 1:
        gathered = reduced_bytes(params // shard.size, replicate.size)
        yield (replicate.name, "all_gather"), gathered
    across = reduced_bytes(grads if keeps_full else grads // shard.size, replicate.size)
    if bucket.num_outer_shards > 1 and not keeps_full:
        yield (replicate.name, reduce_scatter), across
    else:
        yield (replicate.name, "all_reduce"), 2 * across


def _amaxes(plan: Plan, buffer: BufferPlan) -> Iterator[tuple[Key, int]]:
    """Amaxes of fp8 weights, all-reduced in fp32 before they are quantized."""
    fp8 = plan.config.precision.fp8
    assert fp8 is not None, "callers have fp8 weights"
    block = RECIPES[fp8.recipe].weight_block
    num_scales = 0
    for param in buffer.layout.params:
        num_scales += math.prod(scales_shape(param.box.shape, block))
    groups = [buffer.shard]
    if buffer.layout.num_outer_shards > 1:
        groups.append(buffer.replicate)
    for group in groups:
        yield (group.name, "all_reduce"), 2 * reduced_bytes(4 * num_scales, group.size)


def embedding(plan: Plan) -> Iterator[tuple[Key, int]]:
    """One all-reduce of this rank's gradient shard of the tied embedding."""
    group = plan.groups.get("embed")
    if group is None:
        return
    itemsize = Precision.of(plan.config.precision).main_grads.itemsize
    for buffer in plan.trained_buffers:
        outer_index = buffer.replicate.index % buffer.layout.num_outer_shards
        for bucket in buffer.layout.buckets:
            for part in bucket.update_ranges(buffer.shard.index, outer_index=outer_index):
                if "embed" in part.param.spec.grad_sum_axes:
                    num_bytes = reduced_bytes(part.numel * itemsize, group.size)
                    yield ("embed", "all_reduce"), 2 * num_bytes


def pipeline(plan: Plan) -> Iterator[tuple[Key, int]]:
    """Hidden states with state of layers to the next stage, gradients to the previous one."""
    itemsize = Precision.of(plan.config.precision).params.itemsize
    num_hidden = math.prod(plan.hidden_shape[:-1])
    widths = plan.message_widths
    num_bytes = 0
    for step in plan.train_schedule.steps:
        if not isinstance(step, TransferBatch):
            continue
        for send in step.sends:
            is_forward = send.to.kind is ActionKind.forward
            # a gradient has the shape of what its stage has sent
            stage = send.to.stage if is_forward else send.to.stage + 1
            num_bytes += num_hidden * widths[stage] * itemsize
    yield ("pp", "p2p"), num_bytes


def attention(plan: Plan) -> Iterator[tuple[Key, int]]:
    """Bytes sent by the token mixers (attention or other) of this rank's layers, both passes."""
    sizes = layer_sizes(plan, "cpu")
    if sizes.cp == 1:
        return
    is_full = plan.config.memory.recompute_granularity == "full"
    num_again = Counter(recomputed_layers(plan, "core_attn"))
    with_backward = set(_layers_with_backward(plan))
    for layer in plan.layers:
        unsent = 0
        if sizes.all_to_all_ranks > 1 and not is_full:
            # a core attention that runs again alone, not in a layer, ends at its last saved tensor:
            # the output is not sent
            shape = plan.shape.for_layer(layer)
            heads = shape.num_heads // sizes.tp
            output = sizes.tokens * heads * shape.value_head_dim * sizes.itemsize
            unsent = reduced_bytes(output, sizes.all_to_all_ranks)
        for operator in block_operators(sizes, layer):
            is_again = is_full or operator.module == "core_attn"
            for sent in operator.over_cp:
                num_bytes = sent.forward
                if layer in with_backward:
                    num_bytes += sent.backward
                if is_again:
                    not_again = unsent if sent.operation == "all_to_all" else 0
                    num_bytes += num_again[layer] * max(0, sent.forward - not_again)
                yield ("cp", sent.operation), plan.num_microbatches * num_bytes


def experts(plan: Plan) -> Iterator[tuple[Key, int]]:
    """Bytes sent by the mixture-of-experts layers of this rank, forward and backward."""
    moe = plan.shape.moe
    if moe is None:
        return
    counts = moe.num_experts * COUNT_BYTES  # known where layers are recomputed
    in_bf16 = layers_in_bf16(plan.config.precision.fp8, plan.config.model.num_layers)
    with_backward = _layers_with_backward(plan)
    forward_only = [layer for layer in plan.layers if layer not in with_backward]
    passes = [
        (with_backward, TOKEN_TRANSFERS, counts),
        (forward_only, TOKEN_TRANSFERS // 2, counts),
        (recomputed_layers(plan, "moe"), TOKEN_TRANSFERS // 2, 0),
    ]
    for layers, num_transfers, num_counts in passes:
        for has_fp8 in (False, True):
            yield from _expert_pass(
                plan,
                moe,
                layers=[layer for layer in layers if (layer not in in_bf16) == has_fp8],
                num_transfers=num_transfers,
                counts=num_counts,
                has_fp8=has_fp8,
            )


def routing(plan: Plan) -> Iterator[tuple[Key, int]]:
    """Gathers over the ranks of a sequence before they choose experts, in every forward.

    Sinkhorn routing needs the logits and the position of each token, a capacity of experts its
    experts, their weights and its position.
    """
    moe = plan.shape.moe
    if moe is None:
        return
    sequence = plan.groups["tp_cp"]
    num_tokens = plan.config.train.micro_batch_size * plan.config.data.seq_length
    for layer in [*plan.layers, *recomputed_layers(plan, "moe")]:
        if not plan.shape.has_experts(layer):
            continue
        columns = 0
        if plan.config.model.router_kind(layer) == "sinkhorn":
            columns += moe.num_choices + 1
        if moe.expert_capacity_factor is not None:
            columns += 2 * moe.router_topk + 1
        gathered = reduced_bytes(num_tokens * columns * COLUMN_BYTES, sequence.size)
        yield ("tp_cp", "all_gather"), plan.num_microbatches * gathered


def dispatched_row_bytes(plan: Plan) -> int:
    """Bytes of a token as it is sent to an expert: in fp8 with scales, or as parameters."""
    width = plan.shape.expert_input_size
    config = plan.config
    if config.precision.fp8 is None or config.parallel.moe_dispatch_fwd_dtype == "bf16":
        return width * Precision.of(config.precision).params.itemsize
    return row_bytes(width, RECIPES[config.precision.fp8.recipe].block)


def _expert_pass(
    plan: Plan,
    moe: MoEConfig,
    *,
    layers: Sequence[int],
    num_transfers: int,
    counts: int,
    has_fp8: bool,
) -> Iterator[tuple[Key, int]]:
    """Tokens and token counts of some layers.

    Args:
        plan: plan of the rank.
        moe: section of the configuration.
        layers: indices of layers, of which some have experts.
        num_transfers: how often tokens are sent, there and back counting twice.
        counts: bytes of the token counts.
        has_fp8: whether these layers may have fp8 products.
    """
    ep = plan.groups["ep"].size
    num_tokens = plan.config.train.micro_batch_size * plan.config.data.seq_length
    num_tokens //= plan.groups["cp"].size * plan.groups["tp"].size
    # inputs of the experts of all tokens of this rank, once per expert they are sent to
    row = plan.shape.expert_input_size * Precision.of(plan.config.precision).params.itemsize
    num_rows = DispatchOptions.of(plan.config).num_rows(
        num_tokens, moe.router_topk, num_experts=moe.num_experts, ep=ep
    )
    routed = num_transfers * num_rows * row
    sent = routed  # one of the transfers goes to the experts in the forward
    if has_fp8:
        sent -= num_rows * (row - dispatched_row_bytes(plan))
    expert_layers = [layer for layer in layers if plan.shape.has_experts(layer)]
    num_passes = plan.num_microbatches * len(expert_layers)
    nodes = ep // (plan.config.parallel.dispatch_ranks_per_node or ep)
    if nodes > 1:
        # one row per token and node, with the numbers and weights of its experts in fp32
        token_bytes = sent // (num_tokens * moe.router_topk)
        weight_bytes = num_transfers // 2 * 8 * moe.router_topk
        across = num_tokens * reached_nodes(moe, nodes) * (token_bytes + weight_bytes)
        if counts:
            # its tokens for each node, and the pairs of each expert
            across += nodes * COUNT_BYTES + counts
        yield ("ep", "all_to_all_across"), num_passes * reduced_bytes(across, nodes)
    for (group, operation), count in EXPERT_BYTES.items():
        size = plan.groups[group].size
        if group == "ep":
            size //= nodes  # ranks of a node, which send counts of the experts of a node
        num_bytes = count(sent if group == "ep" else routed, counts // nodes, size)
        yield (group, operation), num_passes * num_bytes


def recomputed_layers(plan: Plan, module: str) -> list[int]:
    """The layers of this rank in which a module runs again in the backward."""
    config = plan.config
    with_backward = _layers_with_backward(plan)
    if config.memory.recompute_granularity != "full":
        return with_backward if module in config.memory.recomputed_modules else []
    recomputed = []
    for stage in plan.stages:
        for layers in (stage.spec.layers, *([layer] for layer in stage.mtp_predictions)):
            for group in recomputed_groups(config, len(layers)):
                if layers[group[-1]] in with_backward:
                    recomputed += [layers[index] for index in group]
    return recomputed


def _layers_with_backward(plan: Plan) -> list[int]:
    """The layers of this rank whose output has a gradient."""
    layers = []
    for stage in plan.stages:
        modules = set(module_names(stage)[first_backward(plan, stage) :])
        layers += [layer for layer in stage.spec.layers if f"layers.{layer}" in modules]
        for layer in stage.mtp_predictions:
            if f"mtp.{layer - plan.shape.num_layers}" in modules:
                layers.append(layer)
    return layers


def matrices(plan: Plan) -> Iterator[tuple[Key, int]]:
    """Directions of hidden matrices to their owners, and transformed matrices back."""
    rule = plan.rule.matrix
    if rule is None or rule.transform is None:
        return
    itemsize = rule.dtype(plan.config.optim).itemsize
    for groups, owned in plan.matrix_grids():
        for axis, numel in MatrixRoutes(owned, groups).sent_numel().items():
            group: GroupSpec = getattr(groups, axis)
            yield (group.name, "all_to_all"), numel * itemsize


# Bytes of a layer, from the bytes of its tokens over all transfers, the bytes of the counts and the
# group size: tokens and counts go to the ranks of their experts and back, and tokens go to every
# shard of an expert and back.
EXPERT_BYTES: dict[tuple[GroupName, str], Callable[[int, int, int], int]] = {
    ("ep", "all_to_all"): lambda tokens, counts, size: reduced_bytes(tokens + counts, size),
    ("etp", "all_to_all"): lambda tokens, counts, size: tokens * (size - 1),
    ("etp", "all_gather"): lambda tokens, counts, size: counts * (size - 1),
}
# what a step sends, in the order of the table at the top
PARTS = (data_parallel, embedding, pipeline, attention, experts, routing, matrices)
