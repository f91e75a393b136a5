"""Linear layers whose results do not depend on the layout, in any bit.

A matrix product rounds by its shape, so every product has one of a few shapes that follow from the
model alone: rows are a block of positions of one sample, columns or inputs a block of the weight.

    column    y_k = x W_k^T          one product per block k of the outputs
    dgrad     dx  = tree(dy_k W_k)   summed over k in a fixed tree (exact_sums.tree_sum)
    row       y   = tree(x_k W_k^T)  one product per block k of the inputs
    dgrad     dx_k = dy W_k
    wgrad     dW_k = sum over blocks of positions of dy^T x, exact on a grid (exact_sums.exact_sum)

    blocks     0   1   2   3   4   5   6   7        a rank of tp = 4 owns two blocks, and the node
                \\ /     \\ /     \\ /     \\ /         above them; ranks gather their nodes and add
    tp = 4       r0      r1      r2      r3         them as the tree does
                   \\    /          \\    /
    tp = 2           r0              r1
                       \\          /
    tp = 1                  r0

Layers with replicated weights (`TensorParallel.unsharded`) have one block of weights, and token
blocks as rows, as sequence parallelism leaves no more of a sequence to a rank.

Weight gradients are fp64 multiples of the grid: sums over blocks, samples, microbatches and ranks
are exact in any order.

    B batch   S sequence   I inputs   O outputs   L blocks of positions   b positions of a block
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from nanotrain.comm.collectives import start_all_gather
from nanotrain.comm.group import Group
from nanotrain.kernels.exact_sums import (
    UNITS,
    from_units,
    in_one_form,
    largest_magnitude,
    nan_if_inexact,
    token_sum,
    tree_sum,
)
from nanotrain.kernels.linear import Linear
from nanotrain.parallel.tp.region import LayerFunctions, TensorParallel

# Smaller 16-bit products take another kernel where there are many of them (oneDNN), so they are
# computed in fp32.
MIN_16_BIT_PRODUCT = 16**3
PRODUCT_ALIGNMENT = 16  # bytes
PRODUCTS_AT_ONCE = 2**18  # elements of weight gradients before they are summed, in the cache


@dataclass(frozen=True)
class UnitBlocks:
    """The fixed blocks of a model."""

    num_weight_blocks: int  # of heads, inner widths and the vocabulary; a power of two
    block_length: int  # positions of a block
    num_tokens: int  # of the largest global batch: the addends of a sum over tokens
    num_heads: int = 1  # norms of heads have so many addends per token
    tokens_per_block: int = 1  # positions of a token block, by which experts are computed
    num_expert_blocks: int = 1  # of the inner width of an expert; a power of two

    @property
    def num_rows(self) -> int:
        """The blocks of positions of the largest global batch: the addends of a weight gradient."""
        return max(1, self.num_tokens // self.block_length)

    def by_token_block(self) -> Self:
        """These blocks with the length of a token block, for experts and replicated weights."""
        return replace(self, block_length=self.tokens_per_block)

    def local(self, group: Group) -> int:
        """The blocks of weights of one rank."""
        return self.num_weight_blocks // group.size

    def rows(self, x: Tensor) -> Tensor:
        """[B, S, I] -> [L, b, I]; sequences of other lengths, as in generation, are one block."""
        length = self.block_length if x.shape[1] % self.block_length == 0 else x.shape[1]
        return x.reshape(-1, length, x.shape[2])

    def trained_rows(self, x: Tensor) -> Tensor:
        """`rows` of a sequence with gradients, whose blocks have one length in every layout."""
        assert x.shape[1] % self.block_length == 0, (
            f"a sequence of {x.shape[1]} positions with gradients has no whole blocks of "
            f"{self.block_length}"
        )
        return self.rows(x)


def multiply(rows: Tensor, matrix: Tensor) -> Tensor:
    """[L, b, I], [I, O] or [L, I, O] -> [L, b, O]: one product per block, all of one shape.

    Operands lie in memory as they are or transposed, in every layout alike.
    """
    num_rows, length, num_inputs = rows.shape
    num_outputs = matrix.shape[-1]
    # The kernel, and with it the bits, can depend on where the operands and the result of a product
    # lie. Products of a batch follow one another, so their rows are filled up with zeros.
    unit = PRODUCT_ALIGNMENT // rows.itemsize
    padded_inputs = -num_inputs % unit
    padded_outputs = -num_outputs % unit
    if padded_inputs:
        rows = F.pad(rows, (0, padded_inputs))
    if padded_inputs or padded_outputs:
        matrix = F.pad(matrix, (0, padded_outputs, 0, padded_inputs))
    rows = in_one_form(rows)
    matrices = in_one_form(matrix)
    if matrix.ndim == 2:
        matrices = matrices.expand(num_rows, -1, -1)
    numel = length * (num_inputs + padded_inputs) * (num_outputs + padded_outputs)
    if rows.itemsize == 2 and numel <= MIN_16_BIT_PRODUCT:
        products = torch.bmm(rows.float(), matrices.float()).to(rows.dtype)
    else:
        products = torch.bmm(rows, matrices)
    if padded_outputs:
        return products[..., :num_outputs].contiguous()
    return products


def in_blocks(x: Tensor, num_blocks: int) -> Tensor:
    """[..., O] -> [num_blocks, ..., O / num_blocks], contiguous."""
    return x.unflatten(-1, (num_blocks, -1)).movedim(-2, 0).contiguous()


def sum_over_blocks(parts: Sequence[Tensor], group: Group) -> Tensor:
    """The sum of the blocks of all ranks of a group in the tree, in at least fp32."""
    local = tree_sum(parts)
    if group.size == 1:
        return local
    nodes = start_all_gather(local[None].contiguous(), group, dim=0).wait()
    return tree_sum(nodes.unbind())


def weight_gradient(scaled: Tensor, rows: Tensor, *, num_addends: int) -> Tensor:
    """The gradients of blocks of a weight, one per block of outputs or of inputs.

    Args:
        scaled: [K or 1, L, b, O] in units of the grid.
        rows: [K or 1, L, b, I].
        num_addends: as in `exact_sum`.

    Returns:
        [K, O, I] fp64 in units, an `exact_sum`.
    """
    step = max(1, PRODUCTS_AT_ONCE // (scaled.shape[3] * rows.shape[3]))
    num_rows = rows.shape[1]
    num_blocks = max(scaled.shape[0], rows.shape[0])
    grads = scaled.mT.expand(num_blocks, -1, -1, -1).unbind()
    inputs = rows.expand(num_blocks, -1, -1, -1).unbind()
    totals: list[Tensor] = []
    magnitudes = []
    for left, right in zip(grads, inputs, strict=True):
        total: Tensor | None = None
        for first in range(0, num_rows, step):
            chunk = slice(first, first + step)
            products = multiply(left[chunk], right[chunk]).round_()
            part = products.sum(0, dtype=torch.float64)
            total = part if total is None else total + part
            magnitudes.append(largest_magnitude(products))
        assert total is not None, "a batch has rows"
        totals.append(total)
    magnitude = torch.stack(magnitudes).amax()
    return torch.stack(totals).add_(nan_if_inexact(magnitude, num_addends=num_addends))


class _ColumnParallel(torch.autograd.Function):
    """Layers of one input: [B, S or S/tp, I] -> one [B, S, O/tp] per layer."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        tensor_parallel: TensorParallel,
        blocks: UnitBlocks,
        num_layers: int,
        *params: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """`params` are the weights, then the biases."""
        ctx.tensor_parallel = tensor_parallel
        ctx.blocks = blocks
        ctx.num_layers = num_layers
        weights = [weight for weight in params[:num_layers] if weight is not None]
        biases = params[num_layers:]
        ctx.save_for_backward(x, *weights)
        full = tensor_parallel.start_enter(x).wait()
        rows = blocks.rows(full)
        num_blocks = blocks.local(tensor_parallel.group)
        outputs = []
        for weight, bias in zip(weights, biases, strict=True):
            parts = [multiply(rows, part.t()) for part in weight.chunk(num_blocks)]
            out = torch.cat(parts, dim=2).view(*full.shape[:2], -1)
            outputs.append(out if bias is None else out.add_(bias))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the input, and fp64 gradients of weights and biases."""
        x, *weights = ctx.saved_tensors
        tensor_parallel = ctx.tensor_parallel
        num_blocks = ctx.blocks.local(tensor_parallel.group)
        trains_weights = ctx.needs_input_grad[4 : 4 + ctx.num_layers]
        trains_biases = ctx.needs_input_grad[4 + ctx.num_layers :]
        grad_blocks = [in_blocks(ctx.blocks.trained_rows(grad), num_blocks) for grad in grads]
        grad_x = None
        if ctx.needs_input_grad[0]:
            parts = _input_gradients(grad_blocks, weights)
            total = sum_over_blocks(parts, tensor_parallel.group)
            full = total.view(*grads[0].shape[:2], -1).to(x.dtype)
            grad_x = tensor_parallel.local_slice(full)
        rows = ctx.blocks.trained_rows(tensor_parallel.start_enter(x).wait())[None]
        num_addends = ctx.blocks.num_rows
        grad_weights: list[Tensor | None] = []
        for blocked, is_trained in zip(grad_blocks, trains_weights, strict=True):
            if not is_trained:
                grad_weights.append(None)
                continue
            total = weight_gradient(blocked * UNITS, rows, num_addends=num_addends)
            grad_weights.append(from_units(total).flatten(0, 1))
        grad_biases = [
            token_sum(grad, num_addends=ctx.blocks.num_tokens) if is_trained else None
            for grad, is_trained in zip(grads, trains_biases, strict=True)
        ]
        return grad_x, None, None, None, *grad_weights, *grad_biases


def _input_gradients(grad_blocks: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of the input [L, b, I] by each block of outputs, added over the layers.

    grad_blocks [K, L, b, O / K] and weight [O, I] of every layer.
    """
    num_blocks = len(grad_blocks[0])
    matrices = [weight.chunk(num_blocks) for weight in weights]
    parts = []
    for index in range(num_blocks):
        part = multiply(grad_blocks[0][index], matrices[0][index])
        for blocked, matrix in zip(grad_blocks[1:], matrices[1:], strict=True):
            part = part.add_(multiply(blocked[index], matrix[index]))
        parts.append(part)
    return parts


class _RowParallel(torch.autograd.Function):
    """[B, S, I/tp] -> [B, S or S/tp, O], summed over the blocks of all ranks, then the bias."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tensor_parallel: TensorParallel,
        blocks: UnitBlocks,
    ) -> Tensor:
        """weight [O, I/tp], bias [O] or None."""
        ctx.tensor_parallel = tensor_parallel
        ctx.blocks = blocks
        ctx.save_for_backward(x, weight)
        num_blocks = blocks.local(tensor_parallel.group)
        inputs = in_blocks(blocks.rows(x), num_blocks)
        matrices = in_blocks(weight, num_blocks)
        parts = [multiply(part, matrix.t()) for part, matrix in zip(inputs, matrices, strict=True)]
        total = sum_over_blocks(parts, tensor_parallel.group)
        full = total.view(*x.shape[:2], -1).to(x.dtype)
        out = tensor_parallel.local_slice(full)
        return out if bias is None else out + bias

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of the input, and fp64 gradients of weight and bias."""
        x, weight = ctx.saved_tensors
        needs_dgrad, trains_weight, trains_bias = ctx.needs_input_grad[:3]
        grad_bias = None
        if trains_bias:
            grad_bias = token_sum(grads[0], num_addends=ctx.blocks.num_tokens)
        full = ctx.tensor_parallel.start_enter(grads[0].contiguous()).wait()
        num_blocks = ctx.blocks.local(ctx.tensor_parallel.group)
        grad_x = None
        if needs_dgrad:
            grad_rows = ctx.blocks.trained_rows(full)
            parts = [multiply(grad_rows, part) for part in in_blocks(weight, num_blocks)]
            grad_x = torch.cat(parts, dim=2).view(x.shape)
        grad_weight = None
        if trains_weight:
            scaled = ctx.blocks.trained_rows(full * UNITS)[None]
            inputs = in_blocks(ctx.blocks.trained_rows(x), num_blocks)
            total = weight_gradient(scaled, inputs, num_addends=ctx.blocks.num_rows)
            grad_weight = from_units(total).movedim(0, 1).flatten(1)
        return grad_x, grad_weight, grad_bias, None, None


def invariant_functions(blocks: UnitBlocks) -> LayerFunctions:
    """The implementations of this file for the blocks of a model."""
    sharded = LayerFunctions(
        partial(choose_products, blocks=blocks),
        partial(look_up, num_addends=blocks.num_tokens),
        options=blocks,
    )
    # a rank may have a shard of the sequence, of whole token blocks, and has the whole weight
    replicated = replace(blocks.by_token_block(), num_weight_blocks=1)
    products = partial(choose_products, blocks=replicated)
    return replace(sharded, replicated=replace(sharded, choose_products=products))


def choose_products(
    tensor_parallel: TensorParallel, *, blocks: UnitBlocks
) -> Callable[[Tensor, Sequence[Linear]], tuple[Tensor, ...]]:
    """The implementation of column- or row-parallel layers (`layers.ComputeLinears`)."""

    def column(x: Tensor, layers: Sequence[Linear]) -> tuple[Tensor, ...]:
        weights = [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers]
        outputs: tuple[Tensor, ...] = _ColumnParallel.apply(
            x, tensor_parallel, blocks, len(layers), *weights, *biases
        )
        return outputs

    def row(x: Tensor, layers: Sequence[Linear]) -> tuple[Tensor, ...]:
        (layer,) = layers
        out: Tensor = _RowParallel.apply(x, layer.weight, layer.bias, tensor_parallel, blocks)
        return (out,)

    return row if tensor_parallel.is_row else column


class _Lookup(torch.autograd.Function):
    """Rows of a table, and their gradients summed exactly."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, rows: Tensor, is_masked: Tensor, num_addends: int
    ) -> Tensor:
        """weight [V/tp, H], rows [B, S]; masked rows are -0, which adds nothing to any number."""
        ctx.save_for_backward(rows, is_masked)
        ctx.num_rows = len(weight)
        ctx.num_addends = num_addends
        return F.embedding(rows, weight).masked_fill_(is_masked[..., None], -0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """[B, S, H] -> [V/tp, H] fp64."""
        rows, is_masked = ctx.saved_tensors
        units = (grads[0] * UNITS).round_().masked_fill_(is_masked[..., None], 0.0)
        total = units.new_zeros((ctx.num_rows, units.shape[-1]), dtype=torch.float64)
        total.index_add_(0, rows.flatten(), units.flatten(0, -2).double())
        total += nan_if_inexact(largest_magnitude(units), num_addends=ctx.num_addends)
        return from_units(total), None, None, None


def look_up(tokens: Tensor, weight: Tensor, *, first: int, num_addends: int) -> Tensor:
    """[B, S] -> [B, S, H] by the rows of a shard that starts at token `first`."""
    rows = tokens - first
    is_masked = (rows < 0) | (rows >= len(weight))
    out: Tensor = _Lookup.apply(weight, rows.masked_fill(is_masked, 0), is_masked, num_addends)
    return out
