"""The local experts of an MoE layer: MLPs with stacked weights, as grouped matrix products.

    name    weight      global E, F              sharded over
    gate    [E, F, H]   num_experts, ffn width   ep (dim 0), etp (dim 1)   None without a gate
    up      [E, F, H]                            ep (dim 0), etp (dim 1)
    down    [E, H, F]                            ep (dim 0), etp (dim 2)

Biases are [E, F]; the bias of `down` is [E, H], replicated over etp.
With etp > 1 the outputs of `down` are partial sums, which the token dispatcher reduces.

    P permuted tokens   E local experts   H hidden   F local width of an expert
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanotrain.kernels.deferred_wgrad import WgradQueue
from nanotrain.kernels.fp8.grouped import select_fp8_gemm
from nanotrain.kernels.fp8.layer import ExpertRange, Fp8Layer, Fp8Options
from nanotrain.kernels.grouped import GroupedOptions, grouped_linear, select_gemm

EXPERT_LINEARS = ("gate", "up", "down")


@dataclass(frozen=True)
class ExpertOptions:
    """Options of the experts of a rank."""

    # whether there can be dropped tokens at the end, which belong to no expert
    may_drop: bool = False
    wgrad_queue: WgradQueue | None = None  # defers weight gradients; None where no schedule does
    fp8: Fp8Options | None = None  # fp8 options of the products; None: no fp8
    experts: ExpertRange | None = None  # experts of this rank, for the amax history of fp8
    # True on one rank of etp only, because the outputs of all etp ranks are summed
    adds_down_bias: bool = True


class Experts(nn.Module):
    """All experts of this rank.

    down(activation(gate(x), up(x))), or down(activation(up(x))) without a gate.

    Args:
        linears: weights and biases of EXPERT_LINEARS; the gate where there is one.
        activation: function of one or two inner tensors.
        options: options of the experts of this rank.
    """

    def __init__(
        self,
        linears: Mapping[str, tuple[nn.Parameter, nn.Parameter | None]],
        *,
        activation: Callable[..., Tensor],
        options: ExpertOptions | None = None,
    ) -> None:
        super().__init__()
        if options is None:
            options = ExpertOptions()
        self.gate = None
        if "gate" in linears:
            self.gate = GroupedLinear(*linears["gate"], options=options)
        self.up = GroupedLinear(*linears["up"], options=options)
        self.down = GroupedLinear(
            *linears["down"], options=options, adds_bias=options.adds_down_bias
        )
        self.activation = activation

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        """Tokens [P, H] sorted by expert -> [P, H] in the same order.

        offs [E] int32 is the end of each expert's tokens.
        """
        if self.gate is None:
            inner = self.activation(self.up(x, offs))
        else:
            inner = self.activation(self.gate(x, offs), self.up(x, offs))
        out: Tensor = self.down(inner, offs)
        return out


class GroupedLinear(nn.Module):
    """One linear layer per expert, with stacked weights [E, O, I] and biases [E, O] or None."""

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None = None,
        *,
        options: ExpertOptions,
        adds_bias: bool = True,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.adds_bias = adds_bias
        self.fp8 = None if options.fp8 is None else Fp8Layer(options.fp8, options.experts)
        gemm = select_gemm(weight) if self.fp8 is None else select_fp8_gemm(self.fp8)
        self.options = GroupedOptions(gemm, options.may_drop, options.wgrad_queue)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        """[P, I], [E] int32 -> [P, O]."""
        out = grouped_linear(x, self.weight, offs=offs, options=self.options)
        if self.bias is None:
            return out
        return add_expert_bias(out, self.bias, offs=offs, adds=self.adds_bias)


def add_expert_bias(x: Tensor, bias: Tensor, *, offs: Tensor, adds: bool = True) -> Tensor:
    """Add to every token the bias of its expert, none to dropped tokens.

    Args:
        x: [P, O], sorted by expert.
        bias: [E, O].
        offs: [E] int32, the end of each expert's tokens.
        adds: False returns x unchanged; the bias still gets its gradient, because another rank adds
            it.
    """
    out: Tensor = _AddExpertBias.apply(x, bias, offs, adds)
    return out


class _AddExpertBias(torch.autograd.Function):
    """Adds expert biases; the gradient is a matrix product, whose order of summation is fixed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, offs: Tensor, adds: bool) -> Tensor:
        """Add to each row of x [T, H] the bias [E, H] of its expert; 0 to dropped rows."""
        tokens = torch.arange(len(x), device=x.device, dtype=offs.dtype)
        experts = torch.searchsorted(offs, tokens, right=True)  # E for dropped tokens
        ctx.save_for_backward(experts)
        ctx.num_experts = len(bias)
        ctx.dtype = bias.dtype
        if not adds:
            return x.view_as(x)
        no_bias = bias.new_zeros(1, bias.shape[1])
        return x + torch.cat((bias, no_bias))[experts]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        """The gradients of x and of the bias, summed per expert by a matrix product."""
        if not ctx.needs_input_grad[1]:
            return grads[0], None, None, None
        (experts,) = ctx.saved_tensors
        numbers = torch.arange(ctx.num_experts, device=experts.device)
        is_token_of_expert = numbers[:, None] == experts  # [E, P]
        bias_grad = is_token_of_expert.to(torch.float32) @ grads[0].float()
        return grads[0], bias_grad.to(ctx.dtype), None, None
