"""NVFP4 products of all experts in one launch each, without a host sync, where Triton kernels run.

    Nvfp4GroupedMM   fprop, dgrad and wgrad of stacked experts

The values of the operands are those of `Nvfp4LoopedMM` to the bit: scales of a tensor are those of
the tokens of an expert, and rows of tokens are numbered alike for stochastic rounding.

    T tokens, sorted by expert; after the last offset they belong to none
    I inputs   O outputs   E experts
"""

from typing import Self

import torch
from torch import Tensor

from nanotrain.kernels.fp8 import triton_nvfp4_experts
from nanotrain.kernels.fp8.layer import Fp8Layer
from nanotrain.kernels.fp8.rounding import (
    ElementWords,
    RoundedFor,
    element_words,
    numbered_words,
)
from nanotrain.kernels.fp8.triton_cast import amaxes
from nanotrain.kernels.fp8.triton_nvfp4_experts import ExpertsNvfp4
from nanotrain.kernels.grouped import GroupedMM, matrix_ends
from nanotrain.kernels.linear import GradView


class Nvfp4GroupedMM(GroupedMM):
    """The products of stacked experts for one microbatch; all of them have the same `offs`.

    Args:
        layer: options and random words of the stacked weights.
    """

    def __init__(self, layer: Fp8Layer) -> None:
        self._layer = layer
        self._options = layer.options
        self._tokens = layer.options.rounding.tokens
        # [E] amaxes over all ranks; [2, E] of gradients and their transformed forms
        self._weight_amax = torch.empty(0)
        self._x_t_amax = torch.empty(0)
        self._grad_amax: Tensor | None = None

    def for_microbatch(self) -> Self:
        """New products, with separate scales."""
        return type(self)(self._layer)

    def fprop(self, x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        """[T, I], [E, O, I] -> [T, O]."""
        matrices = weight.detach()
        rows = matrices.flatten(0, 1)
        ends = matrix_ends(matrices)
        weight_amax = amaxes(rows, ends)
        token_amaxes = triton_nvfp4_experts.expert_amaxes(x, offs)
        local = torch.cat([token_amaxes, weight_amax[None]])
        x_amax, self._x_t_amax, self._weight_amax = self._shared(local)
        tokens = triton_nvfp4_experts.cast_tokens(x, x_amax, offs=offs)
        return self._multiply(tokens, matrices, offs=offs, dtype=x.dtype)

    def dgrad(self, grad: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        """[T, O], [E, O, I] -> [T, I]."""
        amax, _ = self._measure(grad, offs)
        words = self._words(grad, RoundedFor.DGRAD)
        tokens = triton_nvfp4_experts.cast_tokens(grad, amax, offs=offs, words=words)
        matrices = weight.detach()
        return self._multiply(tokens, matrices.mT, offs=offs, dtype=grad.dtype)

    def wgrad(self, grad: Tensor, x: Tensor, *, offs: Tensor) -> Tensor:
        """[T, O], [T, I] -> [E, O, I]."""
        if not self._options.wgrad:
            return super().wgrad(grad, x, offs=offs)
        grad_t, x_t = self._wgrad_operands(grad, x, offs=offs)
        dtype = grad.dtype
        return triton_nvfp4_experts.grouped_mm(grad_t, x_t, offs=offs, sums=True, dtype=dtype)

    def accumulate_wgrad(self, grad: Tensor, x: Tensor, *, offs: Tensor, view: GradView) -> bool:
        """See `GroupedMM`; the product is written or added in fp32."""
        if not self._options.wgrad:
            return super().accumulate_wgrad(grad, x, offs=offs, view=view)
        target = view.start_write()
        if target is None:
            return False
        out, has_grads = target
        grad_t, x_t = self._wgrad_operands(grad, x, offs=offs)
        operands = [*grad_t.tensors, *x_t.tensors, offs]
        triton_nvfp4_experts.write_grouped_mm(operands, out, adds=has_grads)
        return True

    def _wgrad_operands(
        self, grad: Tensor, x: Tensor, *, offs: Tensor
    ) -> tuple[ExpertsNvfp4, ExpertsNvfp4]:
        """O and I rows of tokens, after the Hadamard transform."""
        _, grad_amax = self._measure(grad, offs)
        words = self._words(grad, RoundedFor.WGRAD)
        grad_t = triton_nvfp4_experts.cast_channels(grad, grad_amax, offs=offs, words=words)
        x_t = triton_nvfp4_experts.cast_channels(x, self._x_t_amax, offs=offs)
        return grad_t, x_t

    def _measure(self, grad: Tensor, offs: Tensor) -> Tensor:
        """[2, E], amaxes of the gradients and their transformed forms, once per microbatch."""
        if self._grad_amax is None:
            local = triton_nvfp4_experts.expert_amaxes(grad, offs)
            self._grad_amax = self._shared(local)
        return self._grad_amax

    def _shared(self, local: Tensor) -> Tensor:
        """[n, E], the largest amaxes over the ranks that share an expert or its tokens."""
        reduce_amax = self._options.reduce_amax
        return local if reduce_amax is None else reduce_amax(local)

    def _multiply(
        self, tokens: ExpertsNvfp4, matrices: Tensor, *, offs: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """T rows, [E, N, K] -> [T, N]; rows of dropped tokens are undefined."""
        weights = triton_nvfp4_experts.cast_matrices(matrices, self._weight_amax)
        return triton_nvfp4_experts.grouped_mm(tokens, weights, offs=offs, sums=False, dtype=dtype)

    def _words(self, grad: Tensor, rounded_for: RoundedFor) -> ElementWords:
        """The random words of the gradient [T, O], by the numbers of its rows."""
        rows = numbered_words(len(grad), self._tokens, device=grad.device)
        return element_words(rows, key=self._layer.key, rounded_for=rounded_for)
