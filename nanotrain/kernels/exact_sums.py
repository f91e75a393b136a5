"""Sums whose bits do not depend on their order, and sums in a fixed order.

    to_grid        values in units of a grid, rounded; such values are integers
    exact_sum      their sum in fp64: exact, so that any order and any split has the same bits
    square_bins    the squares of numbers in bins of fp64, each summed exactly; `join_bins`
    product_bins   products of numbers, likewise
    in_one_form    an operand of a product, whose bits then depend on its shape alone
    tree_sum       a binary tree over blocks in their order; a rank owns an aligned subtree

A sum of integers in fp64 is exact in any order while the sum of their absolute values is below
2^53. Gradients lie on a grid of 2^-44: a gradient of 1e-8 keeps 17 bits, and the absolute values of
its addends must add up to less than 512. So n addends are allowed up to 256 / n each, half of that,
as a tied weight has two sums; a sum with a larger one is NaN. Scaling by a power of two is exact
too, so products are scaled by their smaller operand.

Demmel and Nguyen 2013, "Fast Reproducible Floating-Point Summation", for bins of fixed grids.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nanotrain.precision.dtypes import as_fp32

UNITS = 2.0**44  # units of the grid in 1
# Grids of the bins of squares. A bin holds 28 bits of each square, so 2^25 squares of the largest
# size, or any number of usual size, are summed exactly.
SQUARE_GRIDS = (2.0**-12, 2.0**-40, 2.0**-68, 2.0**-96)
LOSS_GRID = 2.0**-21
MOST_UNITS = 2.0**52  # half of the range of exact sums
HALF_OF_53_BITS = 1.5 * 2.0**52
# Elementwise kernels compute the last elements of a tensor, less than a vector, in another way.
# Tensors are padded to two vectors of 16-bit numbers of the widest registers.
VECTOR_ELEMENTS = 64
ALIGNMENT = 64  # bytes: a cache line; torch's allocations start at multiples of it
SQUARES_AT_ONCE = 2**16  # 512 KiB in fp64, which stay in the cache


def in_one_form(operand: Tensor) -> Tensor:
    """A product's operand, contiguous or transposed, from an aligned address on.

    The kernel, and with it the bits, can depend on strides and on where a tensor begins.
    """
    is_transposed = operand.stride(-2) == 1 and operand.shape[-1] > 1
    matrix = operand.mT if is_transposed else operand
    if operand.data_ptr() % ALIGNMENT != 0 or not matrix.is_contiguous():
        matrix = matrix.clone(memory_format=torch.contiguous_format)
    return matrix.mT if is_transposed else matrix


def to_grid(values: Tensor) -> Tensor:
    """Values in units of the grid of gradients, rounded to integers, in their dtype."""
    return (values * UNITS).round_()


def exact_sum(units: Tensor, *, dims: Sequence[int], num_addends: int) -> Tensor:
    """The sum of units of the grid over dims, in units, fp64; NaN if they are too large.

    Args:
        units: integers.
        dims: dims that are summed.
        num_addends: addends of an element in a step over all microbatches and ranks. Whether one is
            too large then does not depend on the layout.
    """
    total = units.sum(tuple(dims), dtype=torch.float64)
    return total + nan_if_inexact(largest_magnitude(units), num_addends=num_addends)


def largest_magnitude(units: Tensor) -> Tensor:
    """The largest absolute value, a scalar."""
    smallest, largest = units.aminmax()
    return torch.maximum(largest, -smallest)


def nan_if_inexact(magnitude: Tensor, *, num_addends: int) -> Tensor:
    """0, or NaN if so many addends of up to this size have no exact sum, an fp64 scalar."""
    worst = magnitude.double()
    zero = torch.zeros_like(worst)
    return zero.masked_fill(~(worst * num_addends <= MOST_UNITS), torch.nan)


def from_units(total: Tensor) -> Tensor:
    """The fp64 values of a sum in units of the grid, in place."""
    return total.mul_(1.0 / UNITS)


def token_sum(values: Tensor, *, num_addends: int) -> Tensor:
    """[..., H] -> [H] fp64, the exact sum over all tokens; NaN as `exact_sum`."""
    units = to_grid(values.flatten(0, -2))
    return from_units(exact_sum(units, dims=(0,), num_addends=num_addends))


def on_grid(values: Tensor, grid: float) -> Tensor:
    """fp64 values rounded to multiples of a grid; they must be below 2^51 of its units."""
    magic = HALF_OF_53_BITS * grid
    return (values + magic) - magic


def square_bins(values: Tensor) -> Tensor:
    """[bins] fp64, exact sums of the parts of the squares of flat values, in fp32 or wider."""
    total = torch.zeros(len(SQUARE_GRIDS), dtype=torch.float64, device=values.device)
    for chunk in values.split(SQUARES_AT_ONCE):
        _add_in_bins(chunk.float().double().square_(), total)
    return total


def product_bins(left: Tensor, right: Tensor) -> Tensor:
    """[bins] fp64, exact sums of the parts of products of flat fp64 values of fp32 precision."""
    total = torch.zeros(len(SQUARE_GRIDS), dtype=torch.float64, device=left.device)
    for a, b in zip(left.split(SQUARES_AT_ONCE), right.split(SQUARES_AT_ONCE), strict=True):
        _add_in_bins(a * b, total)
    return total


def _add_in_bins(products: Tensor, total: Tensor) -> None:
    """Add products of two fp32 numbers, which 48 bits hold exactly, to their bins [bins]."""
    rest = products
    for index, grid in enumerate(SQUARE_GRIDS):
        part = on_grid(rest, grid)
        total[index] += part.sum()
        rest = rest - part


def join_bins(bins: Tensor) -> Tensor:
    """[..., bins] -> [...] fp64, the sum of bins from the finest on.

    It is NaN if one was too small to be exact.
    """
    grids = torch.tensor(SQUARE_GRIDS, dtype=torch.float64, device=bins.device)
    is_exact = (bins.abs() <= MOST_UNITS * grids).all(dim=-1)
    finest, *others = reversed(bins.unbind(dim=-1))
    total = finest.masked_fill(~is_exact, torch.nan)
    for part in others:
        total = total + part
    return total


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of a power of two of blocks, neighbours first, in at least fp32.

    Sums of aligned halves, quarters and so on are nodes of the tree:

    >>> blocks = [torch.tensor(2.0**-k) for k in range(4)]
    >>> halves = [tree_sum(blocks[:2]), tree_sum(blocks[2:])]
    >>> bool(tree_sum(halves) == tree_sum(blocks))
    True
    """
    level = [as_fp32(part) for part in parts]
    assert len(level) & (len(level) - 1) == 0, f"{len(level)} blocks make no binary tree"
    while len(level) > 1:
        level = [left + right for left, right in zip(level[::2], level[1::2], strict=True)]
    return level[0]
