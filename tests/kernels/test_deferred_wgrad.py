"""Deferred weight gradients equal those of autograd, hooks included."""

import gc
import weakref

import pytest
import torch
from torch import nn

from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.group import Group
from nanotrain.kernels.deferred_wgrad import WgradQueue, accumulate_wgrads
from nanotrain.parallel.tp.layers import TensorParallel
from tests.harness import ranks, run_ranks
from tests.parallel.tp.networks import ShardedNetwork, draw, reference_pass, sharded_pass

SINGLE_RANK = Group.single_rank("tp")


def watch(network: nn.Module) -> list[str]:
    """The names of parameters that receive a gradient, as their hooks fire."""
    received: list[str] = []
    for name, parameter in network.named_parameters():

        def note(parameter: nn.Parameter, name: str = name) -> None:
            if parameter.grad is not None:
                received.append(name)

        parameter.register_post_accumulate_grad_hook(note)
    return received


def defer_and_compare(ctx, sequence_parallel: bool, num_groups: int) -> None:
    queue = WgradQueue()
    now = ShardedNetwork(
        TensorParallel(ctx.group("tp"), sequence_parallel, WgradQueue()), num_groups
    )
    later = ShardedNetwork(TensorParallel(ctx.group("tp"), sequence_parallel, queue), num_groups)
    expected, received = sharded_pass(now), watch(later)
    for _ in range(2):
        with queue.defer():
            actual = sharded_pass(later)
        assert torch.equal(actual.out, expected.out)
        assert torch.equal(actual.grads["x"], expected.grads["x"])
        assert received == ["output.bias"], "added after the reduction, by autograd"
        accumulate_wgrads(queue.take())
        assert sorted(received) == sorted(name for name, _ in later.named_parameters())
        for name, parameter in later.named_parameters():
            assert torch.equal(parameter.grad, expected.grads[name])
            parameter.grad = None
        received.clear()
    actual = sharded_pass(later)  # outside `defer` nothing is deferred
    assert all(torch.equal(actual.grads[name], grad) for name, grad in expected.grads.items())


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize(("tp", "num_groups"), [(1, 4), (2, 2), (4, 1)])
def test_deferred_gradients_are_bit_equal_and_every_hook_fires_once(
    tp, num_groups, sequence_parallel
):
    run_ranks(tp, defer_and_compare, sequence_parallel, num_groups, tp=tp)


@ranks(2, tp=2)
def test_gradients_of_two_microbatches_add_up_in_the_order_they_are_run(ctx):
    queue = WgradQueue()
    network = ShardedNetwork(TensorParallel(ctx.group("tp"), True, queue), 2)
    work = []
    for _ in range(2):
        with queue.defer():
            sharded_pass(network)
        work.append(queue.take())
    for wgrads in work:
        accumulate_wgrads(wgrads)
    for name, parameter in network.named_parameters():
        actual = parameter.grad / 2
        if name in network.partial_names():
            all_reduce(actual, ctx.group("tp"))
        torch.testing.assert_close(
            actual, network.shard(name, reference_pass(2).grads[name]), rtol=1e-5, atol=1e-5
        )


def test_gradients_that_are_ready_are_accumulated_with_their_hooks():
    scale = nn.Parameter(torch.ones(3))
    received = watch(nn.ParameterDict({"scale": scale}))
    accumulate_wgrads([], ready=[(scale, torch.arange(3.0))])
    assert torch.equal(scale.grad, torch.arange(3.0)) and received == ["scale"]


def test_a_ready_fp32_gradient_of_a_bf16_weight_keeps_its_precision():
    weight = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    grad = torch.tensor([1.0, 1.0 + 2**-12, 3.0])  # the second is no bf16 number
    accumulate_wgrads([], ready=[(weight, grad)])
    assert torch.equal(weight.grad, grad)


def test_a_weight_used_twice_receives_the_sum_and_its_hook_fires_once():
    queue = WgradQueue()
    network = ShardedNetwork(TensorParallel(SINGLE_RANK, wgrad_queue=queue), 2)
    tied = network.query.weight
    received = watch(network)
    with queue.defer():
        network(draw("x", 2, 8, 6)).sum().backward()
        network(draw("x", 2, 8, 6)).sum().backward()
    accumulate_wgrads(queue.take(), ready=[(tied, torch.full_like(tied, 2))])
    assert received.count("query.weight") == received.count("key.weight") == 1
    once = tied.grad
    tied.grad = None
    network(draw("x", 2, 8, 6)).sum().backward()
    torch.testing.assert_close(once, 2 * tied.grad + 2)


def test_gradients_keep_the_dtype_asked_for():
    network = ShardedNetwork(TensorParallel(SINGLE_RANK, wgrad_queue=WgradQueue()), 2).bfloat16()
    queue, weight = network.tensor_parallel.wgrad_queue, network.query.weight
    weight.grad_dtype = torch.float32
    weight.grad = torch.zeros(weight.shape)
    buffer = weight.grad
    with queue.defer():
        network(draw("x", 2, 8, 6).bfloat16()).sum().backward()
    accumulate_wgrads(queue.take())
    assert weight.grad is buffer and buffer.any()


def test_deferred_work_does_not_keep_the_graph_alive():
    queue = WgradQueue()
    network = ShardedNetwork(TensorParallel(SINGLE_RANK, wgrad_queue=queue), 2)
    source = draw("x", 2, 8, 6).requires_grad_()
    middle = source * 2

    def hook_of_the_graph(*_grads: object) -> None:
        pass

    middle.grad_fn.register_hook(hook_of_the_graph)
    graph = weakref.ref(hook_of_the_graph)
    with queue.defer():
        network(middle).sum().backward()
    del middle, hook_of_the_graph
    gc.collect()
    assert graph() is None
    accumulate_wgrads(queue.take())


def test_work_that_was_not_taken_is_an_error_at_the_next_microbatch():
    queue = WgradQueue()
    network = ShardedNetwork(TensorParallel(SINGLE_RANK, wgrad_queue=queue), 2)
    with queue.defer():
        sharded_pass(network)
    with pytest.raises(AssertionError, match="not taken"), queue.defer():
        pass


def test_a_failed_backward_ends_the_deferring():
    queue = WgradQueue()
    with pytest.raises(ZeroDivisionError), queue.defer():
        _ = 1 / 0
    assert not queue.is_deferring


def test_a_layer_gathers_while_the_previous_one_multiplies():
    events: list[str] = []

    class Work:
        params = ()

        def __init__(self, name: str) -> None:
            self.name = name

        def start(self) -> None:
            events.append(f"start {self.name}")

        def compute(self) -> tuple[()]:
            events.append(f"compute {self.name}")
            return ()

    queue = WgradQueue()
    for name in "abc":
        queue.put(Work(name))
    accumulate_wgrads(queue.take())
    assert events == ["start a", "start b", "compute a", "start c", "compute b", "compute c"]
