"""Linear layers in blocks: the same bits on any number of ranks, and the values of plain layers."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.comm.group import Group
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.parallel.tp.invariant import UnitBlocks, invariant_functions, look_up, multiply
from nanotrain.parallel.tp.layers import ColumnParallelLinear, RowParallelLinear, TensorParallel
from tests.harness import run_ranks

BLOCKS = UnitBlocks(4, block_length=4, num_tokens=16)
HIDDEN, INNER = 12, 20


def param(tensor: Tensor) -> nn.Parameter:
    """A parameter with fp64 gradients, as those of a stage."""
    parameter = nn.Parameter(tensor.clone())
    parameter.grad_dtype = torch.float64
    return parameter


def weights() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """up [F, H] and its bias, down [H, F] and its bias."""
    draw = torch.Generator().manual_seed(0)
    shapes = ((INNER, HIDDEN), (INNER,), (HIDDEN, INNER), (HIDDEN,))
    up, up_bias, down, down_bias = (torch.randn(shape, generator=draw) for shape in shapes)
    return up, up_bias, down, down_bias


def inputs() -> Tensor:
    return torch.randn((3, 8, HIDDEN), generator=torch.Generator().manual_seed(1))


def run_mlp(ctx: ParallelContext, is_sequence_parallel: bool) -> list[Tensor]:
    """Output, gradient of the input and of all parameters of this rank, gathered by the test."""
    group = ctx.group("tp")
    tensor_parallel = TensorParallel(
        group, is_sequence_parallel, functions=invariant_functions(BLOCKS)
    )
    up, up_bias, down, down_bias = weights()
    shards = [
        param(tensor.chunk(group.size, dim)[group.index])
        for tensor, dim in ((up, 0), (up_bias, 0), (down, 1))
    ]
    last = param(down_bias)
    x = tensor_parallel.local_slice(inputs()).clone().requires_grad_()
    column = ColumnParallelLinear(shards[0], shards[1], tensor_parallel=tensor_parallel)
    row = RowParallelLinear(shards[2], last, tensor_parallel=tensor_parallel)
    out = row(F.relu(column(x)))
    out.backward(torch.cos(out.detach()))
    grads = [parameter.grad for parameter in (*shards, last)]
    return [out.detach(), x.grad, *grads]


def joined(by_rank: list[list[Tensor]], *, is_sequence_parallel: bool) -> list[Tensor]:
    """Full tensors from those of the ranks."""
    out, grad_x, up, up_bias, down, down_bias = zip(*by_rank, strict=True)
    sums = [torch.cat(up), torch.cat(up_bias), torch.cat(down, 1)]
    if is_sequence_parallel:  # the gradients of a replicated bias are summed over tp
        return [torch.cat(out, 1), torch.cat(grad_x, 1), *sums, torch.stack(down_bias).sum(0)]
    return [out[0], grad_x[0], *sums, down_bias[0]]


@pytest.mark.parametrize("is_sequence_parallel", [False, True])
def test_any_number_of_ranks_has_the_bits_of_one(is_sequence_parallel: bool) -> None:
    reference = joined(run_ranks(1, run_mlp, False, shares=True), is_sequence_parallel=False)
    for tp in (2, 4):
        by_rank = run_ranks(tp, run_mlp, is_sequence_parallel, shares=True, tp=tp)
        tensors = joined(by_rank, is_sequence_parallel=is_sequence_parallel)
        for tensor, expected in zip(tensors, reference, strict=True):
            assert torch.equal(tensor, expected)


def test_the_values_are_those_of_plain_layers() -> None:
    reference = run_ranks(1, run_mlp, False, shares=True)[0]
    up, up_bias, down, down_bias = (tensor.double().requires_grad_() for tensor in weights())
    x = inputs().double().requires_grad_()
    out = F.linear(F.relu(F.linear(x, up, up_bias)), down, down_bias)
    out.backward(torch.cos(out.detach()))
    expected = [out, x.grad, up.grad, up_bias.grad, down.grad, down_bias.grad]
    for tensor, other in zip(reference, expected, strict=True):
        torch.testing.assert_close(tensor.double(), other.detach(), rtol=1e-5, atol=5e-5)


def test_a_sample_alone_has_the_bits_that_it_has_among_others() -> None:
    rows = BLOCKS.rows(inputs())
    matrix = weights()[0].t()
    together = multiply(rows, matrix)
    one_by_one = torch.cat([multiply(block[None], matrix) for block in rows])
    assert torch.equal(together, one_by_one)


def test_other_lengths_are_one_block() -> None:
    assert BLOCKS.rows(torch.zeros(2, 7, 3)).shape == (2, 7, 3)
    assert BLOCKS.rows(torch.zeros(2, 8, 3)).shape == (4, 4, 3)


def test_gradients_of_a_table_do_not_depend_on_the_order_of_tokens() -> None:
    table = torch.randn(6, 5)
    tokens = torch.randint(0, 10, (2, 50))
    grads = torch.randn(2, 50, 5) * 0.1
    order = torch.randperm(50)
    found = []
    for columns in (torch.arange(50), order):
        weight = param(table)
        out = look_up(tokens[:, columns], weight, first=2, num_addends=100)
        out.backward(grads[:, columns])
        found.append(weight.grad)
    assert torch.equal(found[0], found[1])
    is_inside = (tokens >= 2) & (tokens < 8)
    assert torch.equal(out, table[(tokens[:, order] - 2).clamp(0, 5)] * is_inside[:, order, None])


def test_layers_without_other_functions_keep_theirs() -> None:
    plain = TensorParallel.single_rank()
    assert plain.functions is None
    assert replace(plain, functions=invariant_functions(BLOCKS)).functions is not None


@pytest.mark.parametrize("first", [1, 4, 8])
def test_bits_do_not_depend_on_where_operands_lie(first: int) -> None:
    draw = torch.Generator().manual_seed(2)
    for num_inputs, num_outputs in ((64, 8), (32, 4), (64, 1)):
        weight = torch.randn((num_outputs, num_inputs), generator=draw)
        rows = torch.randn((3, 8, num_inputs), generator=draw)
        expected = multiply(rows, weight.t())
        wide = torch.zeros((num_outputs, 2 * num_inputs + first))
        part = wide[:, first : first + num_inputs].copy_(weight)
        shifted = torch.zeros(rows.numel() + first)[first:].view_as(rows).copy_(rows)
        assert torch.equal(multiply(rows, part.t()), expected)
        assert torch.equal(multiply(shifted, weight.t()), expected)
        assert torch.equal(multiply(rows[:1], weight.t()), expected[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("length", "inputs", "outputs"), [(3, 24, 6), (1, 64, 7), (3, 20, 10)])
def test_a_product_has_the_same_bits_at_any_place_of_a_batch(
    dtype: torch.dtype, length: int, inputs: int, outputs: int
) -> None:
    """Sizes at which torch's products differ with where their result lies (AVX2)."""
    draw = torch.Generator().manual_seed(3)
    rows = torch.randn(9, length, inputs, generator=draw).to(dtype)
    matrix = torch.randn(inputs, outputs, generator=draw).to(dtype)
    together = multiply(rows, matrix)
    order = torch.randperm(9, generator=draw)
    assert torch.equal(multiply(rows[order], matrix), together[order])
    torch.testing.assert_close(together, rows @ matrix)


def test_a_sequence_with_gradients_has_whole_blocks() -> None:
    """Generation has any length; a gradient of one block of another length has other bits."""
    functions = invariant_functions(BLOCKS)
    single = TensorParallel(Group.single_rank("tp"), False, functions=functions)
    up, up_bias, *_ = weights()
    layer = ColumnParallelLinear(param(up), param(up_bias), tensor_parallel=single)
    out = layer(inputs()[:, :7])
    assert out.shape == (3, 7, INNER)
    with pytest.raises(AssertionError, match="7 positions .* whole blocks of 4"):
        out.sum().backward()
