"""Weight gradients that were put off are the ones autograd would have delivered, hooks and all."""

import gc
import weakref

import pytest
import torch
from torch import nn

from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.group import Group
from nanotrain.parallel.tp.tensor_parallel import TensorParallel
from nanotrain.parallel.tp.weight_grads import WeightGradQueue
from tests.harness import ranks, run_ranks
from tests.parallel.tp.whole import CutNetwork, cut_pass, draw, whole_pass

ALONE = Group.single_rank("tp")


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
    queue = WeightGradQueue()
    now = CutNetwork(TensorParallel(ctx.group("tp"), sequence_parallel, WeightGradQueue()), num_groups)
    later = CutNetwork(TensorParallel(ctx.group("tp"), sequence_parallel, queue), num_groups)
    expected, received = cut_pass(now), watch(later)
    for _ in range(2):
        with queue.defer():
            found = cut_pass(later)
        assert torch.equal(found.out, expected.out)
        assert torch.equal(found.grads["x"], expected.grads["x"])
        assert received == []
        queue.take()()
        assert sorted(received) == sorted(name for name, _ in later.named_parameters())
        for name, parameter in later.named_parameters():
            assert torch.equal(parameter.grad, expected.grads[name])
            parameter.grad = None
        received.clear()
    found = cut_pass(later)  # outside `defer` nothing waits
    assert all(torch.equal(found.grads[name], grad) for name, grad in expected.grads.items())


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize(("tp", "num_groups"), [(1, 4), (2, 2), (4, 1)])
def test_later_is_now_to_the_bit_and_every_hook_fires_once(tp, num_groups, sequence_parallel):
    run_ranks(tp, defer_and_compare, sequence_parallel, num_groups, tp=tp)


@ranks(2, tp=2)
def test_gradients_of_two_microbatches_add_up_in_the_order_they_are_run(ctx):
    queue = WeightGradQueue()
    network = CutNetwork(TensorParallel(ctx.group("tp"), True, queue), 2)
    work = []
    for _ in range(2):
        with queue.defer():
            cut_pass(network)
        work.append(queue.take())
    for run in work:
        run()
    for name, parameter in network.named_parameters():
        found = parameter.grad / 2
        if name in network.partial_names():
            all_reduce(found, ctx.group("tp"))
        torch.testing.assert_close(found, network.own(name, whole_pass(2).grads[name]), rtol=1e-5, atol=1e-5)


def test_a_parameter_that_autograd_serves_waits_with_the_others():
    queue, scale = WeightGradQueue(), nn.Parameter(torch.ones(3))
    received = watch(nn.ParameterDict({"scale": scale}))
    with queue.defer():
        (queue.late(scale) * torch.arange(3.0)).sum().backward()
    assert scale.grad is None
    queue.take()()
    assert torch.equal(scale.grad, torch.arange(3.0)) and received == ["scale"]
    (queue.late(scale) * torch.arange(3.0)).sum().backward()
    assert torch.equal(scale.grad, 2 * torch.arange(3.0))


def test_a_weight_used_twice_receives_the_sum_and_its_hook_fires_once():
    queue = WeightGradQueue()
    network = CutNetwork(TensorParallel(ALONE, weight_grads=queue), 2)
    tied = network.query.weight
    received = watch(network)
    with queue.defer():
        (network(draw("x", 2, 8, 6)).sum() + (queue.late(tied) * 2).sum()).backward()
    queue.take()()
    assert received.count("query.weight") == 1
    once = tied.grad
    tied.grad = None
    network(draw("x", 2, 8, 6)).sum().backward()
    assert torch.equal(once, tied.grad + 2)


def test_gradients_keep_the_dtype_asked_for():
    network = CutNetwork(TensorParallel(ALONE, weight_grads=WeightGradQueue()), 2).bfloat16()
    queue, weight = network.tensor_parallel.weight_grads, network.query.weight
    weight.grad_dtype = torch.float32
    weight.grad = torch.zeros(weight.shape)
    buffer = weight.grad
    with queue.defer():
        network(draw("x", 2, 8, 6).bfloat16()).sum().backward()
    queue.take()()
    assert weight.grad is buffer and buffer.any()


def test_what_waits_does_not_keep_the_graph_alive():
    queue = WeightGradQueue()
    network = CutNetwork(TensorParallel(ALONE, weight_grads=queue), 2)
    source = draw("x", 2, 8, 6).requires_grad_()
    middle = source * 2

    def hung_on_the_graph(*_grads: object) -> None:
        pass

    middle.grad_fn.register_hook(hung_on_the_graph)
    graph = weakref.ref(hung_on_the_graph)
    with queue.defer():
        network(middle).sum().backward()
    del middle, hung_on_the_graph
    gc.collect()
    assert graph() is None
    queue.take()()


def test_work_that_nobody_took_is_an_error_before_the_next_microbatch():
    queue = WeightGradQueue()
    network = CutNetwork(TensorParallel(ALONE, weight_grads=queue), 2)
    with queue.defer():
        cut_pass(network)
    with pytest.raises(AssertionError, match="nobody took"), queue.defer():
        pass


def test_a_failed_backward_ends_the_deferring():
    queue = WeightGradQueue()
    with pytest.raises(ZeroDivisionError), queue.defer():
        _ = 1 / 0
    assert not queue.is_deferring


def test_a_layer_gathers_while_the_one_before_multiplies():
    events: list[str] = []

    class Work:
        parameters = ()

        def __init__(self, name: str) -> None:
            self.name = name

        def start(self) -> None:
            events.append(f"start {self.name}")

        def finish(self) -> tuple[()]:
            events.append(f"finish {self.name}")
            return ()

    queue = WeightGradQueue()
    for name in "abc":
        queue.put(Work(name))
    queue.take()()
    assert events == ["start a", "start b", "finish a", "start c", "finish b", "finish c"]
