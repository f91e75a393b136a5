"""The local experts of an MoE layer: MLPs with stacked weights, computed together by grouped matrix products.

    name    weight      global E, F              sharded over
    gate    [E, F, H]   num_experts, ffn width   ep (dim 0), etp (dim 1)     None where experts are not gated
    up      [E, F, H]                            ep (dim 0), etp (dim 1)
    down    [E, H, F]                            ep (dim 0), etp (dim 2)

With etp > 1 the outputs of `down` are partial sums, which the token dispatcher reduces.

    P permuted tokens   E local experts   H hidden   F local width of an expert
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from nanotrain.kernels.deferred_wgrad import WgradQueue
from nanotrain.kernels.grouped import GroupedOptions, grouped_linear, select_gemm


class Experts(nn.Module):
    """All experts of this rank: down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate.

    Args:
        may_drop: whether there can be dropped tokens at the end, which belong to no expert.
        wgrad_queue: defers weight gradients; None where no schedule does.
    """

    def __init__(
        self,
        *,
        gate: nn.Parameter | None,
        up: nn.Parameter,
        down: nn.Parameter,
        activation: Callable[[Tensor], Tensor],
        may_drop: bool = False,
        wgrad_queue: WgradQueue | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        linear = partial(GroupedLinear, may_drop=may_drop, wgrad_queue=wgrad_queue)
        self.gate = None if gate is None else linear(gate)
        self.up, self.down = linear(up), linear(down)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        """Tokens [P, H] sorted by expert -> [P, H] in the same order; offs [E] int32 is the end of each expert's."""
        if self.gate is None:
            inner = self.activation(self.up(x, offs))
        else:
            inner = self.activation(self.gate(x, offs)) * self.up(x, offs)
        out: Tensor = self.down(inner, offs)
        return out


class GroupedLinear(nn.Module):
    """One linear layer per expert, with stacked weights [E, O, I]."""

    def __init__(self, weight: nn.Parameter, *, may_drop: bool, wgrad_queue: WgradQueue | None) -> None:
        super().__init__()
        self.weight = weight
        self.options = GroupedOptions(select_gemm(weight), may_drop, wgrad_queue)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        """[P, I], [E] int32 -> [P, O]."""
        return grouped_linear(x, self.weight, offs=offs, options=self.options)
