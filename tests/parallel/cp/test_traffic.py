"""Every core sends the bytes that the closed form says, no more and no fewer."""

import pytest
import torch

from nanotrain.parallel.cp.attention import CORE_ATTENTIONS, build_core_attention
from nanotrain.parallel.cp.traffic import SENT_BYTES, AttentionShape, Sent
from tests.harness import run_ranks
from tests.parallel.cp.sequences import Shape, random_inputs, shard

SHAPES = [Shape(), Shape(heads=8, groups=2, head_dim=12), Shape(heads=12, groups=6, batch=1)]
OPS = {"allgather": {"all_gather", "reduce_scatter"}, "p2p": {"p2p"}, "a2a": {"all_to_all"}}


def sent_by_this_rank(ctx, comm_type, shape, dtype):
    group = ctx.group("cp")
    given = shard(random_inputs(shape, dtype=dtype), group)
    core_attention = build_core_attention(comm_type, group)
    query, key, value = (tensor.requires_grad_() for tensor in (given.query, given.key, given.value))
    ctx.traffic.reset()
    out = core_attention(query, key=key, value=value, mask=core_attention.plan_mask(None, tokens=query[:, :, 0, 0]))
    forward = ctx.traffic.bytes()
    out.backward(given.out)
    booked = sum(ctx.traffic.bytes("cp", op) for op in OPS[comm_type])
    assert booked == ctx.traffic.bytes(), "everything is booked under the core's own operations"
    return Sent(forward, ctx.traffic.bytes() - forward)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("comm_type", list(CORE_ATTENTIONS))
def test_measured_bytes_are_those_of_the_closed_form(comm_type, size):
    for shape, dtype in zip(SHAPES, (torch.float32, torch.bfloat16, torch.float64), strict=True):
        layer = AttentionShape(
            positions=shape.batch * shape.length // size,
            heads=shape.heads,
            groups=shape.groups,
            width=shape.head_dim,
            value_width=shape.value_head_dim,
            itemsize=dtype.itemsize,
        )
        found = run_ranks(size, sent_by_this_rank, comm_type, shape, dtype, cp=size)
        assert found == [SENT_BYTES[comm_type](layer, size)] * size


def test_every_core_has_a_closed_form():
    assert SENT_BYTES.keys() == CORE_ATTENTIONS.keys()
