"""Every core attention sends the bytes of its closed form; what a whole step sends is compared in
test_plan.py.
"""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanotrain.config.load import load
from nanotrain.parallel.cp import CORE_ATTENTIONS, build_core_attention
from nanotrain.plan.plan import plan_run
from nanotrain.plan.traffic import data_parallel
from nanotrain.spec.kinds.core_attention import key_values_over_cp
from nanotrain.spec.layer_sizes import LayerSizes
from tests.harness import run_ranks
from tests.parallel.cp.sequences import Shape, random_inputs, shard

SHAPES = [Shape(), Shape(heads=8, groups=2, head_dim=12), Shape(heads=12, groups=6, batch=1)]
OPS = ("all_gather", "reduce_scatter", "p2p", "all_to_all")


def sent_by_this_rank(ctx, comm_type, shape, dtype):
    group = ctx.group("cp")
    given = shard(random_inputs(shape, dtype=dtype), group)
    core_attention = build_core_attention(comm_type, group)
    query, key, value = (
        tensor.requires_grad_() for tensor in (given.query, given.key, given.value)
    )
    ctx.traffic.reset()
    mask = core_attention.plan_mask(None, tokens=query[:, :, 0, 0])
    out = core_attention(query, key=key, value=value, mask=mask, scores=None)
    out.backward(given.out)
    sent = {op: ctx.traffic.bytes("cp", op) for op in OPS if ctx.traffic.bytes("cp", op)}
    assert sum(sent.values()) == ctx.traffic.bytes(), "nothing else is sent"
    return sent


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("comm_type", list(CORE_ATTENTIONS))
def test_measured_bytes_are_those_of_the_closed_form(comm_type, size):
    for shape, dtype in zip(SHAPES, (torch.float32, torch.bfloat16, torch.float64), strict=True):
        heads = {"num_heads": shape.heads, "query_groups": shape.groups}
        sizes: Any = SimpleNamespace(
            **heads, head_dim=shape.head_dim, value_head_dim=shape.value_head_dim
        )
        rank = LayerSizes(
            sizes,
            batch_size=shape.batch,
            seq_length=shape.length // size,
            itemsize=dtype.itemsize,
            cp=size,
            cp_comm_type=comm_type,
        )
        sent = run_ranks(size, sent_by_this_rank, comm_type, shape, dtype, cp=size)
        operations = key_values_over_cp(rank, heads=shape.heads, groups=shape.groups)
        planned = {each.operation: each.forward + each.backward for each in operations}
        assert sent == [planned] * size, shape


def test_a_way_that_is_added_from_outside_needs_no_closed_form():
    sizes: Any = SimpleNamespace(num_heads=4, query_groups=2, head_dim=8, value_head_dim=8)
    rank = LayerSizes(sizes, batch_size=1, seq_length=8, cp=2, cp_comm_type="mine")
    assert key_values_over_cp(rank, heads=4, groups=2) == ()


@pytest.mark.parametrize("recipe", ["tiny", "tiny_moe"])
@pytest.mark.parametrize("instances", [1, 2, 4])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_a_rank_sends_all_parameters_and_gradients_but_its_own_part(
    recipe: str, instances: int, strategy: str
) -> None:
    """In closed form whatever the groups are: a ring sends each byte once but the part of the rank,
    and an all-reduce is a reduce-scatter and an all-gather.
    """
    for outer in ("no_shard", "optim")[: 1 + (instances > 1 and strategy != "no_shard")]:
        words = f"+config={recipe} --vocab-size 2048 --global-batch-size 32 --micro-batch-size 4"
        words += f" --data-parallel-sharding-strategy {strategy}"
        words += f" --num-distributed-optimizer-instances {instances}"
        words += f" --outer-dp-sharding-strategy {outer}"
        plan = plan_run(load(words.split(), to_train=False).config, 8, rank=5)
        gradients: Counter[str] = Counter()
        parameters: Counter[str] = Counter()
        for (group, operation), num_bytes in data_parallel(plan):
            kind = "expert" if group.startswith("expert") else "dense"
            is_sum = operation in ("all_reduce", "reduce_scatter")
            share = num_bytes // 2 if operation == "all_reduce" else num_bytes
            if is_sum:
                gradients[kind] += share
            if operation in ("all_reduce", "all_gather"):
                parameters[kind] += share
        expected: Counter[str] = Counter()
        for buffer in plan.buffers:
            ranks = buffer.shard.size * buffer.replicate.size
            kind = "expert" if buffer.shard.name.startswith("expert") else "dense"
            num_bytes = 4 * sum(bucket.numel for bucket in buffer.layout.buckets)
            expected[kind] += num_bytes * (ranks - 1) // ranks
        assert gradients == expected, (words, gradients, expected)
        assert parameters == expected, (words, parameters, expected)
