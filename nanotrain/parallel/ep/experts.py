"""The experts of one rank: MLPs whose weights are stacked, run together by grouped matrix products.

    name    weight      over all ranks   axis of each dim
    gate    [E, F, H]   num_experts...   ep, etp, -      (only where experts are gated)
    up      [E, F, H]                    ep, etp, -
    down    [E, H, F]                    ep, -, etp

Expert e of a rank is the rank's e-th of all; with etp a rank holds slices of its experts, and what `down` gives are
parts of a sum that the dispatch adds up.

    R rows   E experts of this rank   H hidden   F width inside an expert, on this rank
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nanotrain.parallel.ep.grouped import GroupedProduct, WeightGradQueue, grouped_linear, pick_kernel


@dataclass(frozen=True)
class ExpertShape:
    """What one rank holds of the experts.

    Args:
        num_experts: E.
        hidden: H.
        inner: F.
        activation: between the matrices.
        is_gated: down(activation(gate(x)) * up(x)) in place of down(activation(up(x))).
    """

    num_experts: int
    hidden: int
    inner: int
    activation: Callable[[Tensor], Tensor]
    is_gated: bool


class Experts(nn.Module):
    """All experts of this rank, on the meta device.

    Args:
        shape: what they are.
        dtype: of the weights and activations.
        may_drop: whether rows can have a tail that belongs to no expert.
        weight_grads: where weight gradients are put off; None computes them at once.
    """

    def __init__(
        self,
        shape: ExpertShape,
        *,
        dtype: torch.dtype,
        may_drop: bool = False,
        weight_grads: WeightGradQueue | None = None,
    ) -> None:
        super().__init__()
        self.activation = shape.activation
        kernel = pick_kernel(shape.hidden, shape.inner, dtype=dtype)
        product = GroupedProduct(kernel, may_drop, weight_grads)
        wide, narrow = (shape.num_experts, shape.inner, shape.hidden), (shape.num_experts, shape.hidden, shape.inner)
        self.gate = ExpertLinear(wide, product, dtype=dtype) if shape.is_gated else None
        self.up = ExpertLinear(wide, product, dtype=dtype)
        self.down = ExpertLinear(narrow, product, dtype=dtype)

    def use_kernel(self, name: str) -> None:
        """Multiply by another of `grouped.KERNELS`."""
        for layer in self.children():
            assert isinstance(layer, ExpertLinear)
            layer.product = replace(layer.product, kernel=name)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Run every expert on its rows.

        Args:
            rows: [R, H], sorted by expert.
            ends: [E] int32, where each expert's rows end.

        Returns:
            [R, H], in the same order.
        """
        if self.gate is None:
            inner = self.activation(self.up(rows, ends))
        else:
            inner = self.activation(self.gate(rows, ends)) * self.up(rows, ends)
        out: Tensor = self.down(inner, ends)
        return out


class ExpertLinear(nn.Module):
    """One matrix per expert, in one parameter [experts, outputs, inputs]."""

    def __init__(self, shape: tuple[int, int, int], product: GroupedProduct, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.product = product
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """[R, inputs], [E] int32 -> [R, outputs]."""
        return grouped_linear(rows, self.weight, ends=ends, product=self.product)
