"""Products in pieces: the values of whole products, their order, and the calls of torch's operators."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nanotrain.comm import pieces as comm_pieces
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.kernels.deferred_wgrad import WgradQueue, accumulate_wgrads
from nanotrain.parallel.tp import overlap
from nanotrain.parallel.tp.layers import TensorParallel
from nanotrain.parallel.tp.overlap import gather_products, scatter_product
from tests.harness import ranks, run_ranks
from tests.parallel.tp.networks import Passed, ShardedNetwork, sharded_pass
from tests.parallel.tp.test_layers import compare

BATCH, LENGTH, WIDTH, OUTPUTS = 2, 3, 16, 24


def numbers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).float()


def gathered_and_scattered(ctx: ParallelContext, batch: int) -> None:
    """Integers are added without rounding, so that the values are exact."""
    group = ctx.group("tp")
    length = LENGTH * group.size
    x = numbers(batch, length, WIDTH, seed=1)
    matrices = [numbers(WIDTH, OUTPUTS, seed=seed) for seed in (2, 3)]
    local = x[:, group.index * LENGTH : (group.index + 1) * LENGTH]
    for keeps_input in (False, True):
        result = gather_products(
            "pieces", local, matrices=matrices, group=group, keeps_input=keeps_input
        )
        for output, matrix in zip(result.outputs, matrices, strict=True):
            assert torch.equal(output, x @ matrix)
        assert result.gathered is None or torch.equal(result.gathered, x)
        assert (result.gathered is not None) == keeps_input
    # every rank has other inputs and another matrix
    inputs = [numbers(batch, length, WIDTH, seed=10 + rank) for rank in range(group.size)]
    weights = [numbers(WIDTH, OUTPUTS, seed=20 + rank) for rank in range(group.size)]
    expected = sum((a @ b for a, b in zip(inputs, weights, strict=True)), torch.zeros(()))
    found = scatter_product("pieces", inputs[group.index], matrix=weights[group.index], group=group)
    assert torch.equal(found, expected[:, group.index * LENGTH : (group.index + 1) * LENGTH])
    sent = (group.size - 1) * local.nbytes
    assert group.traffic.bytes("tp", "all_gather") == 2 * sent
    assert group.traffic.bytes("tp", "reduce_scatter") == sent // WIDTH * OUTPUTS


@pytest.mark.parametrize("batch", [1, BATCH])
@pytest.mark.parametrize("tp", [2, 3])
def test_pieces_are_the_whole_products_to_the_bit(tp: int, batch: int) -> None:
    run_ranks(tp, gathered_and_scattered, batch, tp=tp, threads=False)


def pass_in_pieces(ctx: ParallelContext, num_groups: int) -> None:
    tensor_parallel = TensorParallel(ctx.group("tp"), True, overlap="pieces")
    network = ShardedNetwork(tensor_parallel, num_groups)
    compare(network, sharded_pass(network))


@pytest.mark.parametrize(("tp", "num_groups"), [(2, 4), (2, 1), (4, 4)])
def test_outputs_and_gradients_equal_the_reference(tp: int, num_groups: int) -> None:
    run_ranks(tp, pass_in_pieces, num_groups, tp=tp, threads=False)


def deferred_pass(ctx: ParallelContext) -> None:
    """Weight gradients of a zero-bubble schedule follow later: dgrad and its sum are in pieces."""
    queue = WgradQueue()
    tensor_parallel = TensorParallel(ctx.group("tp"), True, queue, overlap="pieces")
    network = ShardedNetwork(tensor_parallel, 4)
    with queue.defer():
        passed = sharded_pass(network)
    assert passed.grads["query.weight"] is None
    accumulate_wgrads(queue.take())
    later = {name: parameter.grad for name, parameter in network.named_parameters()}
    compare(network, Passed(passed.out, passed.grads | later))
    traffic = ctx.group("tp").traffic
    # the sum of the output, and that of the input gradient of query, key and value
    pieces = (tensor_parallel.group.size - 1) * passed.grads["x"].nbytes
    assert traffic.bytes("tp", "reduce_scatter") == 2 * pieces


@pytest.mark.parametrize("tp", [2, 4])
def test_deferred_weight_gradients_leave_the_sum_of_the_input_gradient_in_pieces(tp: int) -> None:
    run_ranks(tp, deferred_pass, tp=tp, threads=False)


def events_of(ctx: ParallelContext, action: str) -> list[str]:
    """Products and transfers of a rank in the order in which they are started."""
    group = ctx.group("tp")
    events: list[str] = []
    start = comm_pieces.start_shift
    multiply = overlap._multiply

    def start_recorded(tensor: Tensor, *args: Any, distance: int, op: str) -> Any:
        events.append(f"start {distance:+d}")
        work = start(tensor, *args, distance=distance, op=op)

        def wait() -> Tensor:
            events.append(f"wait {distance:+d}")
            return work.wait()

        return SimpleNamespace(wait=wait)

    def multiply_recorded(*args: Any, out: Tensor) -> None:
        events.append("product")
        multiply(*args, out=out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "start_shift", start_recorded)
        patch.setattr(overlap, "_multiply", multiply_recorded)
        matrix = torch.ones(WIDTH, OUTPUTS)
        if action == "gather":
            local = torch.ones(1, LENGTH, WIDTH)
            gather_products("pieces", local, matrices=[matrix], group=group)
        else:
            full = torch.ones(1, group.size * LENGTH, WIDTH)
            scatter_product("pieces", full, matrix=matrix, group=group)
    return events


def both_orders(ctx: ParallelContext) -> tuple[list[str], list[str]]:
    return events_of(ctx, "gather"), events_of(ctx, "scatter")


def test_each_transfer_has_a_product_beside_it_in_the_same_order_on_all_ranks() -> None:
    by_rank = run_ranks(3, both_orders, tp=3, threads=False)
    gather = ["start +1", "start +2", "product", "wait +1", "product", "wait +2", "product"]
    scatter = ["product", "start -1", "product", "start -2", "product", "wait -1", "wait -2"]
    assert by_rank == [(gather, scatter)] * 3


@ranks(2, tp=2, threads=False)
def test_symmetric_memory_gets_the_arguments_of_torch(ctx: ParallelContext) -> None:
    """By torch's own functions for other devices, which gather first and multiply then."""
    from torch.distributed import _symmetric_memory as torch_symmetric

    group = ctx.group("tp")
    operators = SimpleNamespace(
        fused_all_gather_matmul=torch_symmetric._fused_all_gather_matmul_fallback,
        fused_matmul_reduce_scatter=torch_symmetric._fused_matmul_reduce_scatter_fallback,
    )
    x = numbers(BATCH, LENGTH * group.size, WIDTH, seed=group.index)
    matrix = numbers(WIDTH, OUTPUTS, seed=7)
    local = numbers(BATCH, LENGTH, WIDTH, seed=8 + group.index)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            overlap,
            "torch",
            SimpleNamespace(ops=SimpleNamespace(symm_mem=operators), Tensor=Tensor),
        )
        symmetric = gather_products(
            "symmetric", local, matrices=[matrix], group=group, keeps_input=True
        )
        scattered = scatter_product("symmetric", x, matrix=matrix, group=group)
    pieces = gather_products("pieces", local, matrices=[matrix], group=group, keeps_input=True)
    assert torch.equal(symmetric.outputs[0], pieces.outputs[0])
    assert symmetric.gathered is not None and pieces.gathered is not None
    assert torch.equal(symmetric.gathered, pieces.gathered)
    assert torch.equal(scattered, scatter_product("pieces", x, matrix=matrix, group=group))
    assert group.traffic.bytes("tp", "all_gather") == 2 * local.nbytes
    assert group.traffic.bytes("tp", "reduce_scatter") == 2 * scattered.nbytes
