"""Hyperball: the norms of a matrix and of its update are fixed, in place of weight decay.

    R = ||W|| at the first update
    V = W - lr R u / ||u||
    W = R V / ||V||

u is the update of another rule, ||.|| the Frobenius norm. A matrix is sharded, so its ranks sum
W.W, W.u and u.u in one all-reduce per axis, from which ||V|| follows. A matrix of zeros has R = 0
and stays as it is.

Source: Wen et al. 2026, "Hyperball Optimization" (arXiv 2606.16899), section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.group import Group
from nanotrain.optim.matrices import OwnedMatrix
from nanotrain.optim.matrix_routes import GridGroups
from nanotrain.optim.rule import PLAIN_MATRIX_ARITHMETIC, MatrixArithmetic, UpdateStep

NUM_PRODUCTS = 3  # W.W, W.u, u.u
TINY = 1e-30  # keeps quotients of zeros finite


@dataclass(frozen=True)
class NormFactors:
    """The update W = weight * (W - update * u) of every matrix, [matrices] fp64."""

    update: Tensor
    weight: Tensor


class FixedNorms:
    """Norms of the matrices of one grid.

    Args:
        matrices: all matrices of the grid.
        groups: groups of the grid.
        radius: [matrices] fp32, R of every matrix; 0 before its first update.
        arithmetic: how products are summed.

    Attributes:
        radius: the argument, set by the first update.
    """

    def __init__(
        self,
        matrices: Sequence[OwnedMatrix],
        groups: GridGroups,
        *,
        radius: Tensor,
        arithmetic: MatrixArithmetic = PLAIN_MATRIX_ARITHMETIC,
    ) -> None:
        self._groups = groups
        self._arithmetic = arithmetic
        self.radius = radius
        # a replicated matrix is counted at one tensor-parallel rank
        self._counts = []
        for owned in matrices:
            is_sharded = owned.matrix.sharded_dim is not None
            self._counts.append(is_sharded or owned.owner.tensor == groups.rank.tensor)
        none = torch.zeros(0, dtype=torch.float64, device=radius.device)
        sum_size = len(arithmetic.dot(none, none))
        self._products = none.new_zeros((len(matrices), NUM_PRODUCTS, sum_size))

    def add(self, matrix_id: int, weights: Tensor, *, update: Tensor) -> None:
        """Add products of elements of a matrix on this rank.

        Args:
            matrix_id: index of the matrix.
            weights: [n] fp32.
            update: [n].
        """
        if not self._counts[matrix_id]:
            return
        device = self.radius.device
        w = weights.double()
        u = update.to(w.device).double()
        dot = self._arithmetic.dot
        products = torch.stack([dot(w, w), dot(w, u), dot(u, u)])
        self._products[matrix_id] += products.to(device)

    def factors(self, step: UpdateStep) -> NormFactors:
        """Sum the products over the ranks of every matrix; returns the factors of the step.

        The first one sets R.
        """
        products = self._products.clone()
        self._products.zero_()
        for group in (self._groups.shard, self._groups.tensor):
            assert isinstance(group, Group), "a spec is for plans"
            all_reduce(products, group)
        sums = self._arithmetic.join(products)
        weight_square, product, update_square = sums.unbind(dim=1)
        is_first = self.radius == 0
        self.radius.copy_(torch.where(is_first, weight_square.sqrt(), self.radius.double()))
        radius = self.radius.double()
        size = step.lr * radius / update_square.sqrt().clamp(min=TINY)
        new_square = weight_square - 2 * size * product + size.square() * update_square
        weight = radius / new_square.clamp(min=0.0).sqrt().clamp(min=TINY)
        applied = 1.0 - step.found_inf.double()
        return NormFactors(size * applied, torch.where(step.is_skipped, 1.0, weight))
