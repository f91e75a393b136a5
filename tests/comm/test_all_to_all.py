"""All-to-all: rows reach their rank, gradients return to the sender, sent bytes are counted."""

import pytest
import torch

from nanotrain.comm.all_to_all import all_to_all, start_all_to_all, start_differentiable_all_to_all
from nanotrain.comm.group import Group
from tests.harness import ranks, run_ranks

# COUNTS[from][to]: uneven, a rank that receives nothing (2), one that sends nothing (3)
COUNTS = [[1, 2, 0, 3], [0, 1, 0, 1], [4, 0, 0, 2], [0, 0, 0, 0]]
WIDTH = 3


def rows_of(source: int, target: int, *, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows from `source` to `target`; their values depend on both."""
    count = COUNTS[source][target] if size == 4 else source + 2 * target
    return (torch.arange(count * WIDTH).view(count, WIDTH) + 16 * source + 64 * target).to(dtype)


def send_both_ways(ctx, dtype):
    group = ctx.group("world")
    size, rank = group.size, ctx.rank
    out = [rows_of(rank, target, size=size, dtype=dtype) for target in range(size)]
    back = [rows_of(source, rank, size=size, dtype=dtype) for source in range(size)]
    sent, expected = torch.cat(out), torch.cat(back)
    received = torch.empty_like(expected)
    splits = {
        "input_splits": [len(rows) for rows in out],
        "output_splits": [len(rows) for rows in back],
    }
    start_all_to_all(received, sent, group=group, **splits).wait()
    assert torch.equal(received, expected)
    num_sent = sum(len(rows) for target, rows in enumerate(out) if target != rank)
    assert ctx.traffic.bytes("world", "all_to_all") == num_sent * WIDTH * dtype.itemsize


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_every_row_reaches_its_rank(size, dtype):
    run_ranks(size, send_both_ways, dtype, threads=False)


@ranks(4, threads=False)
def test_the_gradient_of_a_row_returns_to_its_source(ctx):
    group, rank = ctx.group("world"), ctx.rank
    send, receive = COUNTS[rank], [row[rank] for row in COUNTS]
    x = torch.arange(sum(send) * WIDTH, dtype=torch.float32).view(-1, WIDTH).requires_grad_()
    received = all_to_all(x, group, input_splits=send, output_splits=receive)
    (received * (rank + 1)).sum().backward()  # a factor that depends on the receiver
    factors = torch.tensor(
        [float(target + 1) for target, count in enumerate(send) for _ in range(count)]
    )
    assert torch.equal(x.grad, factors[:, None].expand(-1, WIDTH))
    received = start_differentiable_all_to_all(
        x, group, input_splits=send, output_splits=receive
    ).wait()
    (gradient,) = torch.autograd.grad(received.sum(), x)
    assert torch.equal(gradient, torch.ones_like(x)), "an expanded gradient is sent too"


def test_in_a_group_of_one_the_output_is_the_input():
    single, x = Group.single_rank("ep"), torch.ones(3, 2, requires_grad=True)
    assert all_to_all(x, single, input_splits=[3], output_splits=[3]) is x
    output = torch.zeros(3, 2)
    assert (
        start_all_to_all(
            output, x.detach(), input_splits=[3], output_splits=[3], group=single
        ).wait()
        is output
    )
    assert torch.equal(output, torch.ones(3, 2))
    assert single.traffic.calls() == 0


@ranks(2, threads=False)
def test_wrong_split_sizes_raise_before_anything_is_sent(ctx):
    group, x = ctx.group("world"), torch.ones(3, 2)
    with pytest.raises(AssertionError, match="wrong rank"):
        start_all_to_all(
            torch.empty(2, 2), x, input_splits=[1, 1], output_splits=[1, 1], group=group
        )
    with pytest.raises(AssertionError, match="one split size"):
        start_all_to_all(torch.empty(3, 2), x, input_splits=[3], output_splits=[3], group=group)
    with pytest.raises(AssertionError, match="not by strides"):
        start_all_to_all(
            torch.empty(2, 3).t(), x, input_splits=[1, 2], output_splits=[1, 2], group=group
        )
    assert ctx.traffic.calls() == 0
