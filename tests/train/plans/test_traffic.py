"""Every core attention sends the bytes of its closed form; what a whole step sends is compared in test_plan.py."""

import pytest
import torch

from nanotrain.parallel.cp.attention import CORE_ATTENTIONS, build_core_attention
from nanotrain.train.plans.traffic import ATTENTION_BYTES, AttentionShape
from tests.harness import run_ranks
from tests.parallel.cp.sequences import Shape, random_inputs, shard

SHAPES = [Shape(), Shape(heads=8, groups=2, head_dim=12), Shape(heads=12, groups=6, batch=1)]
OPS = ("all_gather", "reduce_scatter", "p2p", "all_to_all")


def sent_by_this_rank(ctx, comm_type, shape, dtype):
    group = ctx.group("cp")
    given = shard(random_inputs(shape, dtype=dtype), group)
    core_attention = build_core_attention(comm_type, group)
    query, key, value = (tensor.requires_grad_() for tensor in (given.query, given.key, given.value))
    ctx.traffic.reset()
    out = core_attention(query, key=key, value=value, mask=core_attention.plan_mask(None, tokens=query[:, :, 0, 0]))
    out.backward(given.out)
    sent = {op: ctx.traffic.bytes("cp", op) for op in OPS if ctx.traffic.bytes("cp", op)}
    assert sum(sent.values()) == ctx.traffic.bytes(), "nothing else is sent"
    return sent


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("comm_type", list(CORE_ATTENTIONS))
def test_measured_bytes_are_those_of_the_closed_form(comm_type, size):
    for shape, dtype in zip(SHAPES, (torch.float32, torch.bfloat16, torch.float64), strict=True):
        layer = AttentionShape(
            positions=shape.batch * shape.length // size,
            num_heads=shape.heads,
            num_groups=shape.groups,
            head_dim=shape.head_dim,
            value_head_dim=shape.value_head_dim,
            itemsize=dtype.itemsize,
        )
        found = run_ranks(size, sent_by_this_rank, comm_type, shape, dtype, cp=size)
        assert found == [ATTENTION_BYTES[comm_type](layer, size)] * size


def test_closed_forms_belong_to_core_attentions():
    assert ATTENTION_BYTES.keys() <= CORE_ATTENTIONS.keys()  # one added from outside needs no closed form
