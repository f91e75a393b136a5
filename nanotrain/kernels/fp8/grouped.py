"""fp8 products of stacked experts.

    Fp8LoopedMM      one product per expert, by torch's operators; the host waits for `offs`
    Fp8GroupedMM     one launch for all experts, without a host sync, where Triton kernels run
    select_fp8_gemm  the class that a layer uses

The tokens of an expert count as one tensor, so a scale per tensor is a scale per expert.

    T tokens, sorted by expert; after the last offset they belong to none
    I inputs   O outputs   E experts
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from nanotrain.kernels.fp8.layer import Fp8Layer, Operand
from nanotrain.kernels.fp8.nvfp4_products import Nvfp4LoopedMM
from nanotrain.kernels.fp8.products import Key, Scales, tensor_amax
from nanotrain.kernels.fp8.quantize import Quantized, block_amax
from nanotrain.kernels.fp8.scaled_mm import grouped_by_torch, pack_operands, scaled_mm
from nanotrain.kernels.grouped import (
    GroupedMM,
    accumulate_each,
    matrix_ends,
    tokens_of_experts,
)
from nanotrain.kernels.linear import GradView, wgrad
from nanotrain.precision.fp8 import PER_ROW


class Fp8LoopedMM(GroupedMM):
    """The products of stacked experts for one microbatch, expert by expert.

    All products of a microbatch have the same `offs`.

    Args:
        layer: fp8 options of the stacked weights.
        records: whether the amaxes of the microbatch count for the history.
    """

    def __init__(self, layer: Fp8Layer, *, records: bool = False) -> None:
        self._layer = layer
        self._scales = Scales([layer], records=records)
        self._matrix_ends: list[int] | None = None  # `offs` on the host

    def for_microbatch(self) -> Self:
        """New products, with separate scales."""
        return type(self)(self._layer, records=torch.is_grad_enabled())

    def fprop(self, x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        """[T, I], [E, O, I] -> [T, O]."""
        parts = self._split_by_expert(x, offs)
        if not self._scales.has(Operand.INPUT):
            self._set_forward_scales(_part_amaxes(parts), weight)
        return self._multiply(parts, weight, operand=Operand.INPUT, length=len(x))

    def dgrad(self, grad: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        """[T, O], [E, O, I] -> [T, I]."""
        parts = self._scaled_grads(grad, offs)
        return self._multiply(parts, weight, operand=Operand.GRAD, length=len(grad))

    def wgrad(self, grad: Tensor, x: Tensor, *, offs: Tensor) -> Tensor:
        """[T, O], [T, I] -> [E, O, I]."""
        grads = self._scaled_grads(grad, offs)
        inputs = self._split_by_expert(x, offs)
        products = []
        for expert, (expert_grad, expert_x) in enumerate(zip(grads, inputs, strict=True)):
            if self._layer.options.wgrad:
                grad_t = self._scales.quantize(expert_grad.t(), Operand.GRAD, expert=expert)
                x_t = self._scales.quantize(expert_x.t(), Operand.INPUT, expert=expert)
                products.append(scaled_mm(grad_t, x_t, dtype=grad.dtype))
            else:
                products.append(wgrad(expert_grad, expert_x))
        return torch.stack(products)

    def accumulate_wgrad(self, grad: Tensor, x: Tensor, *, offs: Tensor, view: GradView) -> bool:
        """See `GroupedMM`; fp8 products are returned, not written."""
        if self._layer.options.wgrad:
            return False
        return accumulate_each(grad, x, ends=self._read_ends(offs), view=view)

    def _split_by_expert(self, x: Tensor, offs: Tensor) -> list[Tensor]:
        """The tokens of each expert."""
        return [x[tokens] for tokens in tokens_of_experts(self._read_ends(offs))]

    def _read_ends(self, offs: Tensor) -> list[int]:
        """`offs` as integers, the end of the rows of each expert; the host waits for the copy."""
        if self._matrix_ends is None:
            self._matrix_ends = offs.tolist()
        return self._matrix_ends

    def _scaled_grads(self, grad: Tensor, offs: Tensor) -> list[Tensor]:
        """The gradients of each expert, once their scales are known."""
        parts = self._split_by_expert(grad, offs)
        if not self._scales.has(Operand.GRAD):
            self._scales.set({(0, Operand.GRAD): _part_amaxes(parts)})
        return parts

    def _set_forward_scales(self, inputs: Tensor, weight: Tensor) -> None:
        """Compute scales from the amaxes [E] of inputs, and the amaxes of the weight [E, O, I]."""
        if self._layer.stored is None:
            amax = _matrix_amaxes(weight.detach())
        else:
            amax = self._layer.stored.amax
        self._scales.set({(0, Operand.INPUT): inputs, (0, Operand.WEIGHT): amax})

    def _quantize_weight(self, weight: Tensor, *, expert: int, transposed: bool) -> Quantized:
        """The matrix of an expert, [O, I] or [I, O]: stored in fp8, or cast now."""
        if self._layer.stored is not None:
            return self._layer.stored.matrix(expert=expert, transposed=transposed)
        matrix = weight[expert].t() if transposed else weight[expert]
        return self._scales.quantize(matrix, Operand.WEIGHT, expert=expert)

    def _multiply(
        self, parts: Sequence[Tensor], weight: Tensor, *, operand: Operand, length: int
    ) -> Tensor:
        """[t, K] per expert, [E, O, I] -> [T, N] with the weight, transposed for gradients.

        Rows of dropped tokens are undefined.
        """
        products = []
        for expert, part in enumerate(parts):
            quantized = self._scales.quantize(part, operand, expert=expert)
            matrix = self._quantize_weight(
                weight, expert=expert, transposed=operand is Operand.GRAD
            )
            is_fast = operand is Operand.INPUT
            products.append(scaled_mm(quantized, matrix, dtype=part.dtype, is_fast=is_fast))
        num_dropped = length - sum(len(part) for part in parts)
        dropped = products[0].new_empty(num_dropped, products[0].shape[1])
        return torch.cat([*products, dropped])


class Fp8GroupedMM(GroupedMM):
    """The products of all experts in one launch each, without a host sync.

    Args:
        layer: fp8 options of the stacked weights.
        records: whether the amaxes of the microbatch count for the history.
    """

    def __init__(self, layer: Fp8Layer, *, records: bool = False) -> None:
        self._layer = layer
        self._records = records
        self._scales = Scales([layer], records=records)
        self._grad_t: Quantized | None = None  # cast together with the gradient for dgrad

    def for_microbatch(self) -> Self:
        """New products, with separate scales."""
        return type(self)(self._layer, records=torch.is_grad_enabled())

    def fprop(self, x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        """[T, I], [E, O, I] -> [T, O]."""
        if not self._scales.has(Operand.INPUT):
            self._scales.set(self._forward_amaxes(x, weight, offs=offs))
        tokens = self._scales.cast(x, Operand.INPUT, offs=offs).get()
        operands = (tokens, self._matrices(weight))
        return self._multiply(operands, offs, dtype=x.dtype, is_fast=True)

    def _forward_amaxes(self, x: Tensor, weight: Tensor, *, offs: Tensor) -> dict[Key, Tensor]:
        """Amaxes [E] of the tokens of each expert, and of weights without scales."""
        amaxes: dict[Key, Tensor] = {}
        amaxes[0, Operand.INPUT] = self._scales.amax(x, Operand.INPUT, offs=offs)
        if self._layer.stored is not None:
            amaxes[0, Operand.WEIGHT] = self._layer.stored.amax
        elif self._layer.kept is None:
            rows = weight.flatten(0, 1)
            amaxes[0, Operand.WEIGHT] = self._scales.amax(
                rows, Operand.WEIGHT, offs=matrix_ends(weight)
            )
        return amaxes

    def dgrad(self, grad: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        """[T, O], [E, O, I] -> [T, I]."""
        self._scale_grads(grad, offs)
        columns = self._layer.options.wgrad and weight.requires_grad
        forms = self._scales.cast(grad, Operand.GRAD, columns=columns, offs=offs)
        self._grad_t = forms.columns
        matrices = self._matrices(weight, transposed=True)
        return self._multiply((forms.get(), matrices), offs, dtype=grad.dtype)

    def wgrad(self, grad: Tensor, x: Tensor, *, offs: Tensor) -> Tensor:
        """[T, O], [T, I] -> [E, O, I]."""
        if not self._layer.options.wgrad:
            return super().wgrad(grad, x, offs=offs)
        operands = self._wgrad_operands(grad, x, offs=offs)
        return self._multiply(operands, offs, dtype=grad.dtype, sums=True)

    def accumulate_wgrad(self, grad: Tensor, x: Tensor, *, offs: Tensor, view: GradView) -> bool:
        """See `GroupedMM`; by the Triton kernel, as torch's has no output in fp32."""
        if not self._layer.options.wgrad:
            return super().accumulate_wgrad(grad, x, offs=offs, view=view)
        target = view.start_write()
        if target is None:
            return False
        out, has_grads = target
        from nanotrain.kernels.fp8 import triton_grouped  # imports Triton

        operands, blocks = pack_operands(*self._wgrad_operands(grad, x, offs=offs))
        operands.append(offs)
        triton_grouped.fp8_write_grouped_mm(operands, out, blocks=blocks, adds=has_grads)
        return True

    def _wgrad_operands(
        self, grad: Tensor, x: Tensor, *, offs: Tensor
    ) -> tuple[Quantized, Quantized]:
        """[O, T] and [I, T]; each expert's tokens begin at a multiple of the unit."""
        grad_t = self._grad_t
        self._grad_t = None
        if grad_t is None:
            self._scale_grads(grad, offs)
            forms = self._scales.cast(grad, Operand.GRAD, rows=False, columns=True, offs=offs)
            grad_t = forms.get(transposed=True)
        forms = self._scales.cast(x, Operand.INPUT, rows=False, columns=True, offs=offs)
        return grad_t, forms.get(transposed=True)

    def _scale_grads(self, grad: Tensor, offs: Tensor) -> None:
        """Compute the scales of the gradients, once per microbatch."""
        if not self._scales.has(Operand.GRAD):
            amax = self._scales.amax(grad, Operand.GRAD, offs=offs)
            self._scales.set({(0, Operand.GRAD): amax})

    def _matrices(self, weight: Tensor, *, transposed: bool = False) -> Quantized:
        """[E, O, I] -> the rows of all matrices, or of all transposed matrices."""
        layer = self._layer
        if layer.stored is not None:
            return layer.stored.matrices(transposed=transposed)
        if layer.kept is not None:
            return layer.kept.get(transposed=transposed)
        keeps = self._records and layer.options.keeps_weights and self._scales.is_local
        forms = self._scales.cast(
            weight.detach().flatten(0, 1),
            Operand.WEIGHT,
            rows=keeps or not transposed,
            columns=keeps or transposed,
            offs=matrix_ends(weight),
        )
        if keeps:
            layer.kept = forms
        return forms.get(transposed=transposed)

    def _torch_takes(self, operand: Operand) -> bool:
        """Whether torch has the product: on one device, e4m3 with scales per tensor or row."""
        options = self._layer.options
        if not options.has_grouped_mm or options.recipe.block[1] is not None:
            return False
        return options.dtype(operand) is options.dtype(Operand.INPUT)

    def _multiply(
        self,
        operands: tuple[Quantized, Quantized],
        offs: Tensor,
        *,
        dtype: torch.dtype,
        sums: bool = False,
        is_fast: bool = False,
    ) -> Tensor:
        """The products of all experts, by torch's kernel or by Triton's."""
        a, b = operands
        if a.values.dtype == b.values.dtype and self._torch_takes(Operand.INPUT):
            return grouped_by_torch(a, b, offs=offs, sums=sums, is_fast=is_fast).to(dtype)
        from nanotrain.kernels.fp8 import triton_grouped

        tensors, blocks = pack_operands(a, b)
        return triton_grouped.fp8_grouped_mm(
            [*tensors, offs], blocks=blocks, sums=sums, dtype=dtype, is_fast=is_fast
        )


def select_fp8_gemm(layer: Fp8Layer) -> GroupedMM:
    """Grouped products where Triton kernels run, else looped ones; NVFP4 has its own of both."""
    options = layer.options
    if not options.recipe.is_two_level:
        return Fp8GroupedMM(layer) if options.is_fused else Fp8LoopedMM(layer)
    if not options.is_fused:
        return Nvfp4LoopedMM(layer)
    from nanotrain.kernels.fp8 import nvfp4_grouped  # imports Triton

    return nvfp4_grouped.Nvfp4GroupedMM(layer)


def _part_amaxes(parts: Sequence[Tensor]) -> Tensor:
    """[E]; 0 for an expert without tokens."""
    amaxes = []
    for part in parts:
        if len(part):
            amaxes.append(tensor_amax(part))
        else:
            amaxes.append(part.new_zeros(1, dtype=torch.float32))
    return torch.cat(amaxes)


def _matrix_amaxes(weight: Tensor) -> Tensor:
    """[E, N, K] -> [E]."""
    row_amax = block_amax(weight.flatten(0, 1), PER_ROW)
    return row_amax.view(len(weight), -1).amax(1)
