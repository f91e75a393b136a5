"""Sharded layers equal torch's: outputs and all gradients, on 1, 2 and 4 ranks, with replicated
heads.
"""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.kernels.deferred_wgrad import WgradQueue
from nanotrain.parallel.tp.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallel,
    VocabParallelEmbedding,
    column_parallel,
)
from tests.harness import ranks, run_ranks
from tests.parallel.tp.networks import (
    B,
    D,
    H,
    N,
    Passed,
    S,
    ShardedNetwork,
    draw,
    reference_pass,
    sharded_pass,
)

BOTH = pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
VOCAB, WIDTH = 12, 5


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def compare(network: ShardedNetwork, actual: Passed) -> None:
    """Compare the local shards with the reference network."""
    tensor_parallel, expected = network.tensor_parallel, reference_pass(network.num_groups)
    close(actual.out, tensor_parallel.local_slice(expected.out))
    close(actual.grads["x"], tensor_parallel.local_slice(expected.grads["x"]))
    for name in dict(network.named_parameters()):
        grad = actual.grads[name].clone()
        if name in network.partial_names():
            all_reduce(grad, tensor_parallel.group)
        close(grad, network.shard(name, expected.grads[name]))


def pass_and_compare(ctx: ParallelContext, sequence_parallel: bool, num_groups: int) -> None:
    network = ShardedNetwork(TensorParallel(ctx.group("tp"), sequence_parallel), num_groups)
    compare(network, sharded_pass(network))


@BOTH
@pytest.mark.parametrize("num_groups", [4, 2, 1])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_outputs_and_all_gradients_equal_the_reference(tp, num_groups, sequence_parallel):
    run_ranks(tp, pass_and_compare, sequence_parallel, num_groups, tp=tp, shares=True)


@BOTH
@ranks(4, tp=2, shares=True)
def test_tp_groups_are_independent(ctx, sequence_parallel):
    pass_and_compare(ctx, sequence_parallel, 2)


@BOTH
@ranks(2, tp=2, shares=True)
def test_a_layer_called_on_its_own_gives_the_same_as_with_others(ctx, sequence_parallel):
    network = ShardedNetwork(TensorParallel(ctx.group("tp"), sequence_parallel), 2)
    x = network.tensor_parallel.local_slice(draw("x", B, S, H))
    query, key = column_parallel(x, (network.query, network.key))
    assert torch.equal(network.query(x), query) and torch.equal(network.key(x), key)


@BOTH
@ranks(2, tp=2, shares=True)
def test_several_layers_send_no_more_than_one(ctx, sequence_parallel):
    """One collective each way for query, key and value together; sequence parallelism gathers the
    input once more.
    """
    network = ShardedNetwork(TensorParallel(ctx.group("tp"), sequence_parallel), 2)
    ctx.traffic.reset()
    sharded_pass(network)
    activation = B * S * H * 4  # bytes
    half = activation // 2
    sent = {
        op: ctx.traffic.bytes("tp", op) for op in ("all_reduce", "all_gather", "reduce_scatter")
    }
    if sequence_parallel:
        # enter, enter again for the weight gradients, leave's backward | leave, enter's backward
        assert sent == {"all_reduce": 0, "all_gather": 3 * half, "reduce_scatter": 2 * half}
    else:
        assert sent == {"all_reduce": 2 * activation, "all_gather": 0, "reduce_scatter": 0}


@BOTH
@ranks(2, tp=2, shares=True)
def test_a_frozen_weight_and_an_input_without_gradient_are_left_out(ctx, sequence_parallel):
    network = ShardedNetwork(TensorParallel(ctx.group("tp"), sequence_parallel), 2)
    network.key.requires_grad_(False)
    network(network.tensor_parallel.local_slice(draw("x", B, S, H))).sum().backward()
    assert network.key.weight.grad is None and network.key.bias.grad is None
    assert network.query.weight.grad is not None


@BOTH
@ranks(2, tp=2, shares=True)
def test_bf16_layers_round_like_the_reference(ctx, sequence_parallel):
    network = ShardedNetwork(TensorParallel(ctx.group("tp"), sequence_parallel), 2).to(
        torch.bfloat16
    )
    x = network.tensor_parallel.local_slice(draw("x", B, S, H)).bfloat16()
    out = network(x)
    assert out.dtype is torch.bfloat16
    exact = network.tensor_parallel.local_slice(reference_pass(2).out)
    torch.testing.assert_close(out.float(), exact, rtol=0.05, atol=0.3)


def embed(ctx: ParallelContext, sequence_parallel: bool, is_queued: bool) -> None:
    queue = WgradQueue() if is_queued else None
    tensor_parallel = TensorParallel(ctx.group("tp"), sequence_parallel, queue)
    group = tensor_parallel.group
    shard = nn.Parameter(draw("word", VOCAB, WIDTH).chunk(group.size)[group.index].clone())
    layer = VocabParallelEmbedding(shard, tensor_parallel=tensor_parallel)
    tokens = torch.randint(0, VOCAB, (B, S), generator=torch.Generator().manual_seed(1))
    table, upstream = draw("word", VOCAB, WIDTH).requires_grad_(), draw("words", B, S, WIDTH)
    expected = F.embedding(tokens, table)
    expected.backward(upstream)
    actual = layer(tokens)
    actual.backward(tensor_parallel.local_slice(upstream))
    assert torch.equal(actual, tensor_parallel.local_slice(expected))
    assert torch.equal(layer.weight.grad, table.grad.chunk(group.size)[group.index])


@BOTH
@pytest.mark.parametrize("is_queued", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_embedding_is_bit_equal_to_the_full_table(tp, is_queued, sequence_parallel):
    run_ranks(tp, embed, sequence_parallel, is_queued, tp=tp, shares=True)


def test_on_one_rank_every_layer_is_torchs_operator_with_one_graph_node():
    single_rank = TensorParallel.single_rank()
    up, down = nn.Linear(H, N * D), nn.Linear(N * D, H)
    column = ColumnParallelLinear(up.weight, up.bias, tensor_parallel=single_rank)
    row = RowParallelLinear(down.weight, down.bias, tensor_parallel=single_rank)
    x = torch.zeros(B, S, H, requires_grad=True)
    names = [
        type(y.grad_fn).__name__ for y in (*column_parallel(x, (column, column)), row(column(x)))
    ]
    plain = type(up(x).grad_fn).__name__
    assert names == [plain] * 3


def test_on_one_rank_layers_trace_into_one_graph():
    network = ShardedNetwork(TensorParallel.single_rank(), 2)
    traced = torch.compile(network.forward, fullgraph=True, backend="eager")
    close(traced(draw("x", B, S, H)), reference_pass(2).out)


@ranks(2, tp=2, threads=False)
def test_sharded_layers_trace_into_one_graph_that_equals_the_reference(ctx):
    """In one world: what the compiler does once per process takes longer than a trace."""
    for num_groups, sequence_parallel in product([2, 1], [False, True]):
        torch._dynamo.reset()
        network = ShardedNetwork(TensorParallel(ctx.group("tp"), sequence_parallel), num_groups)
        network.forward = torch.compile(network.forward, backend="aot_eager", fullgraph=True)
        compare(network, sharded_pass(network))


@ranks(4, tp=4, shares=True)
def test_recomputed_layers_give_the_same_gradients(ctx):
    network = ShardedNetwork(TensorParallel(ctx.group("tp"), True), 2)
    forward = network.forward
    network.forward = lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)
    compare(network, sharded_pass(network))
