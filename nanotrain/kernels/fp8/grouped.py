"""fp8 products of stacked experts.

    Fp8LoopedMM      one product per expert, with any recipe; the host waits for the number of tokens per expert
    Fp8GroupedMM     one product for all experts, with a scale per tensor or per row; without a host sync
    select_fp8_gemm  which of them a layer uses

The tokens of an expert count as one tensor, so a scale per tensor is a scale per expert. Emulated, both give equal
bits.

    T tokens, sorted by expert; after the last offset they belong to none   I inputs   O outputs   E experts
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from nanotrain.kernels.fp8.layer import Fp8Layer, Operand
from nanotrain.kernels.fp8.products import Scales, tensor_amax
from nanotrain.kernels.fp8.quantize import Quantized, block_amax, inverse_scales, quantize
from nanotrain.kernels.fp8.scaled_mm import Groups, multiply_matrices, multiply_tokens, scaled_mm
from nanotrain.kernels.grouped import GroupedMM, accumulate_each, tokens_of_experts
from nanotrain.kernels.linear import GradView, wgrad

ROW = (1, None)


class Fp8LoopedMM(GroupedMM):
    """The products of stacked experts for one microbatch, expert by expert; `offs` is the same in all of them.

    Args:
        layer: fp8 options of the stacked weights.
        records: whether the amaxes of the microbatch count for the history.
    """

    def __init__(self, layer: Fp8Layer, *, records: bool = False) -> None:
        self._layer, self._scales = layer, Scales([layer], records=records)
        self._ends: list[int] | None = None  # `offs` on the host

    def for_microbatch(self) -> Self:
        """New products, with scales of their own."""
        return type(self)(self._layer, records=torch.is_grad_enabled())

    def fprop(self, x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        """[T, I], [E, O, I] -> [T, O]."""
        parts = self._split(x, offs)
        if not self._scales.has(Operand.INPUT):
            self._set_forward_scales(_part_amaxes(parts), weight)
        return self._multiply(parts, weight, operand=Operand.INPUT, length=len(x))

    def dgrad(self, grad: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        """[T, O], [E, O, I] -> [T, I]."""
        parts = self._scaled_grads(grad, offs)
        return self._multiply(parts, weight, operand=Operand.GRAD, length=len(grad))

    def wgrad(self, grad: Tensor, x: Tensor, *, offs: Tensor) -> Tensor:
        """[T, O], [T, I] -> [E, O, I]."""
        parts, inputs = self._scaled_grads(grad, offs), self._split(x, offs)
        found = []
        for expert, (part, inp) in enumerate(zip(parts, inputs, strict=True)):
            if self._layer.options.wgrad:
                grad_t = self._scales.quantize(part.t(), Operand.GRAD, expert=expert)
                x_t = self._scales.quantize(inp.t(), Operand.INPUT, expert=expert)
                found.append(scaled_mm(grad_t, x_t, dtype=grad.dtype))
            else:
                found.append(wgrad(part, inp))
        return torch.stack(found)

    def accumulate_wgrad(self, grad: Tensor, x: Tensor, *, offs: Tensor, view: GradView) -> bool:
        """As `GroupedMM`: not of fp8 products, whose sums are returned."""
        if self._layer.options.wgrad:
            return False
        return accumulate_each(grad, x, ends=self._read_ends(offs), view=view)

    def _split(self, x: Tensor, offs: Tensor) -> list[Tensor]:
        """The tokens of each expert."""
        return [x[tokens] for tokens in tokens_of_experts(self._read_ends(offs))]

    def _read_ends(self, offs: Tensor) -> list[int]:
        """`offs`; the host waits for it once per microbatch."""
        if self._ends is None:
            self._ends = offs.tolist()
        return self._ends

    def _scaled_grads(self, grad: Tensor, offs: Tensor) -> list[Tensor]:
        parts = self._split(grad, offs)
        if not self._scales.has(Operand.GRAD):
            self._scales.set({(0, Operand.GRAD): _part_amaxes(parts)})
        return parts

    def _set_forward_scales(self, inputs: Tensor, weight: Tensor) -> None:
        """Compute scales from the amaxes [E] of inputs and those of the weight [E, O, I]."""
        stored = self._layer.stored
        amax = _matrix_amaxes(weight.detach()) if stored is None else stored.amax
        self._scales.set({(0, Operand.INPUT): inputs, (0, Operand.WEIGHT): amax})

    def _quantize_weight(self, weight: Tensor, *, expert: int, transposed: bool) -> Quantized:
        """One of [E, O, I]: [O, I] or [I, O], as it is kept in fp8, or quantized."""
        if self._layer.stored is not None:
            return self._layer.stored.matrix(expert=expert, transposed=transposed)
        matrix = weight[expert].t() if transposed else weight[expert]
        return self._scales.quantize(matrix, Operand.WEIGHT, expert=expert)

    def _multiply(self, parts: Sequence[Tensor], weight: Tensor, *, operand: Operand, length: int) -> Tensor:
        """[t, K] per expert, [E, O, I] -> [T, N] with the weight, transposed for gradients.

        Rows of dropped tokens are undefined.
        """
        products = []
        for expert, part in enumerate(parts):
            quantized = self._scales.quantize(part, operand, expert=expert)
            matrix = self._quantize_weight(weight, expert=expert, transposed=operand is Operand.GRAD)
            products.append(scaled_mm(quantized, matrix, dtype=part.dtype))
        num_dropped = length - sum(map(len, parts))
        return torch.cat([*products, products[0].new_empty(num_dropped, products[0].shape[1])])


class Fp8GroupedMM(Fp8LoopedMM):
    """The products of all experts in one call.

    torch's kernel takes e4m3 only, so on CUDA gradients in e5m2 are multiplied expert by expert.
    """

    def fprop(self, x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        """[T, I], [E, O, I] -> [T, O]."""
        if not self._is_grouped(x, Operand.INPUT):
            return super().fprop(x, weight, offs=offs)
        groups = Groups.of(offs, num_tokens=len(x))
        if not self._scales.has(Operand.INPUT):
            self._set_forward_scales(_token_amaxes(x, groups), weight)
        return self._multiply_tokens(x, weight, operand=Operand.INPUT, groups=groups)

    def dgrad(self, grad: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        """[T, O], [E, O, I] -> [T, I]."""
        if not self._is_grouped(grad, Operand.GRAD):
            return super().dgrad(grad, weight, offs=offs)
        groups = self._scale_grads(grad, offs)
        return self._multiply_tokens(grad, weight, operand=Operand.GRAD, groups=groups)

    def wgrad(self, grad: Tensor, x: Tensor, *, offs: Tensor) -> Tensor:
        """[T, O], [T, I] -> [E, O, I]."""
        if not self._layer.options.wgrad or not self._is_grouped(grad, Operand.GRAD):
            return super().wgrad(grad, x, offs=offs)
        groups = self._scale_grads(grad, offs)
        grads = self._quantize_columns(grad, Operand.GRAD, groups=groups)
        inputs = self._quantize_columns(x, Operand.INPUT, groups=groups)
        return multiply_matrices(grads, inputs, groups=groups, dtype=grad.dtype)

    def _is_grouped(self, x: Tensor, operand: Operand) -> bool:
        return len(x) > 0 and (not x.is_cuda or self._layer.options.dtype(operand) is torch.float8_e4m3fn)

    def _scale_grads(self, grad: Tensor, offs: Tensor) -> Groups:
        groups = Groups.of(offs, num_tokens=len(grad))
        if not self._scales.has(Operand.GRAD):
            self._scales.set({(0, Operand.GRAD): _token_amaxes(grad, groups)})
        return groups

    def _multiply_tokens(self, x: Tensor, weight: Tensor, *, operand: Operand, groups: Groups) -> Tensor:
        """[T, K], [E, O, I] -> [T, N] with the weight, transposed for gradients; of dropped tokens undefined."""
        if self._layer.options.recipe.is_per_tensor:
            inverse = groups.per_token(self._scales.of_experts(operand)[:, None])
        else:
            inverse = self._inverse(block_amax(x, ROW), operand)
        tokens = quantize(x, inverse, block=ROW, dtype=self._layer.options.dtype(operand))
        matrices = self._quantize_matrices(weight, transposed=operand is Operand.GRAD)
        return multiply_tokens(tokens, matrices, groups=groups, dtype=x.dtype)

    def _quantize_matrices(self, weight: Tensor, *, transposed: bool) -> Quantized:
        """[E, O, I] -> the rows of all matrices, or of all transposed ones: [E * O, I] or [E * I, O]."""
        stored = self._layer.stored
        kept = weight if stored is None else stored.values
        matrices = kept.transpose(1, 2) if transposed else kept
        rows = matrices.flatten(0, 1)
        if not self._layer.options.recipe.is_per_tensor:
            inverse = self._inverse(block_amax(rows, ROW), Operand.WEIGHT)
        else:
            inverse = self._scales.of_experts(Operand.WEIGHT) if stored is None else stored.inverse_scales.flatten()
            inverse = inverse.repeat_interleave(matrices.shape[1])[:, None]
        if stored is not None:
            return Quantized(rows, inverse, ROW)
        return quantize(rows, inverse, block=ROW, dtype=self._layer.options.dtype(Operand.WEIGHT))

    def _quantize_columns(self, x: Tensor, operand: Operand, *, groups: Groups) -> Quantized:
        """[T, K], with inverse scales [E, K] per expert and column, or [E, 1]."""
        if self._layer.options.recipe.is_per_tensor:
            inverse = self._scales.of_experts(operand)[:, None]
        else:
            amax = groups.largest(x.abs().float().nan_to_num(nan=torch.inf, posinf=torch.inf))
            inverse = self._inverse(amax, operand)
        values = quantize(x, groups.per_token(inverse), block=ROW, dtype=self._layer.options.dtype(operand)).values
        return Quantized(values, inverse, ROW)

    def _inverse(self, amax: Tensor, operand: Operand) -> Tensor:
        options = self._layer.options
        return inverse_scales(amax, options.dtype(operand), power_of_two=options.recipe.power_of_two)


def select_fp8_gemm(layer: Fp8Layer) -> Fp8LoopedMM:
    """`Fp8GroupedMM` if scales are per tensor or per row and the device supports it, else `Fp8LoopedMM`."""
    blocks = layer.options.recipe.block, layer.options.recipe.weight_block
    is_grouped = layer.options.has_grouped_mm and all(columns is None for _, columns in blocks)
    return Fp8GroupedMM(layer) if is_grouped else Fp8LoopedMM(layer)


def _part_amaxes(parts: Sequence[Tensor]) -> Tensor:
    """[E]; 0 for an expert without tokens."""
    return torch.cat([tensor_amax(part) if len(part) else part.new_zeros(1, dtype=torch.float32) for part in parts])


def _token_amaxes(x: Tensor, groups: Groups) -> Tensor:
    """[T, K] -> [E]."""
    return groups.largest(block_amax(x.detach(), ROW))[:, 0]


def _matrix_amaxes(weight: Tensor) -> Tensor:
    """[E, N, K] -> [E]."""
    return block_amax(weight.flatten(0, 1), ROW).view(len(weight), -1).amax(1)
