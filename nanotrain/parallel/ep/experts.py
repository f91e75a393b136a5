"""The local experts of an MoE layer: MLPs with stacked weights, computed together by grouped matrix products.

    name    weight      global E, F              sharded over
    gate    [E, F, H]   num_experts, ffn width   ep (dim 0), etp (dim 1)     None where experts are not gated
    up      [E, F, H]                            ep (dim 0), etp (dim 1)
    down    [E, H, F]                            ep (dim 0), etp (dim 2)

With etp > 1 the outputs of `down` are partial sums, which the token dispatcher reduces.

    P permuted tokens   E local experts   H hidden   F local width of an expert
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from nanotrain.kernels.deferred_wgrad import WgradQueue
from nanotrain.kernels.fp8.grouped import select_fp8_gemm
from nanotrain.kernels.fp8.layer import ExpertRange, Fp8Layer, Fp8Options
from nanotrain.kernels.grouped import GroupedOptions, grouped_linear, select_gemm
from nanotrain.memory.recompute import Recompute


@dataclass(frozen=True)
class ExpertOptions:
    """How the experts of a rank compute."""

    may_drop: bool = False  # whether there can be dropped tokens at the end, which belong to no expert
    wgrad_queue: WgradQueue | None = None  # defers weight gradients; None where no schedule does
    recompute: Recompute = field(default_factory=Recompute)  # may recompute the activation
    fp8: Fp8Options | None = None  # how the products use fp8; None: they do not
    experts: ExpertRange | None = None  # those of this rank, for the amax history of fp8


class Experts(nn.Module):
    """All experts of this rank: down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate."""

    def __init__(
        self,
        *,
        gate: nn.Parameter | None,
        up: nn.Parameter,
        down: nn.Parameter,
        activation: Callable[[Tensor], Tensor],
        options: ExpertOptions | None = None,
    ) -> None:
        super().__init__()
        options = options or ExpertOptions()
        linear = partial(GroupedLinear, options=options)
        self.gate = None if gate is None else linear(gate)
        self.up, self.down = linear(up), linear(down)
        activate = activation if gate is None else lambda gate, up: activation(gate) * up
        self._activate_and_down = options.recompute.chain("moe_act", activate, second=self.down)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        """Tokens [P, H] sorted by expert -> [P, H] in the same order; offs [E] int32 is the end of each expert's."""
        inner = [self.up(x, offs)] if self.gate is None else [self.gate(x, offs), self.up(x, offs)]
        out: Tensor = self._activate_and_down(*inner, offs=offs)
        return out


class GroupedLinear(nn.Module):
    """One linear layer per expert, with stacked weights [E, O, I]."""

    def __init__(self, weight: nn.Parameter, *, options: ExpertOptions) -> None:
        super().__init__()
        self.weight = weight
        self.fp8 = None if options.fp8 is None else Fp8Layer(options.fp8, options.experts)
        gemm = select_gemm(weight) if self.fp8 is None else select_fp8_gemm(self.fp8)
        self.options = GroupedOptions(gemm, options.may_drop, options.wgrad_queue)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        """[P, I], [E] int32 -> [P, O]."""
        return grouped_linear(x, self.weight, offs=offs, options=self.options)
