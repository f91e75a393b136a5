"""Entering and leaving a tensor-parallel region: values, gradients and the asynchronous forms."""

import pytest
import torch

from nanotrain.kernels.deferred_wgrad import WgradQueue
from nanotrain.parallel.tp.layers import TensorParallel
from tests.harness import ranks

B, S, H, TP = 2, 4, 3, 2
BOTH = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])


def draw(seed: int) -> torch.Tensor:
    return torch.randn(B, S, H, generator=torch.Generator().manual_seed(seed))


@BOTH
@ranks(TP, tp=TP, shares=True)
def test_enter_gives_every_rank_all_tokens_and_sums_their_gradients(ctx, sequence_parallel):
    tensor_parallel = TensorParallel(ctx.group("tp"), sequence_parallel)
    x, grads = draw(0), [draw(1 + rank) for rank in range(TP)]
    local = tensor_parallel.local_slice(x).clone().requires_grad_()

    entered = tensor_parallel.enter(local)
    entered.backward(grads[ctx.rank])

    assert torch.equal(entered, x)
    assert torch.equal(tensor_parallel.start_enter(local.detach()).wait(), x)
    expected = tensor_parallel.local_slice(grads[0] + grads[1])
    torch.testing.assert_close(local.grad, expected)
    torch.testing.assert_close(
        tensor_parallel.start_leave(grads[ctx.rank].clone()).wait(), expected
    )


@BOTH
@ranks(TP, tp=TP, shares=True)
def test_leave_sums_partial_results_and_gives_every_rank_the_gradient_of_all_tokens(
    ctx, sequence_parallel
):
    tensor_parallel = TensorParallel(ctx.group("tp"), sequence_parallel)
    partials, grad = [draw(rank) for rank in range(TP)], draw(5)
    partial = partials[ctx.rank].requires_grad_()

    left = tensor_parallel.leave(partial)
    left.backward(tensor_parallel.local_slice(grad))

    torch.testing.assert_close(left, tensor_parallel.local_slice(partials[0] + partials[1]))
    assert torch.equal(partial.grad, grad)


@ranks(TP, tp=TP, shares=True)
def test_unsharded_layers_share_the_queue_and_send_nothing(ctx):
    queue = WgradQueue()
    unsharded = TensorParallel(ctx.group("tp"), True, queue).unsharded
    x = draw(0)
    assert unsharded.wgrad_queue is queue
    assert unsharded.enter(x) is x and unsharded.leave(x) is x and unsharded.local_slice(x) is x
