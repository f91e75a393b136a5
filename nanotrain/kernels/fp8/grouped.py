"""fp8 products of stacked experts.

    Fp8LoopedMM      one product per expert, by torch's operators; the host waits for the number of tokens per expert
    Fp8GroupedMM     one launch for all experts, without a host sync, where Triton kernels run
    select_fp8_gemm  which of them a layer uses

The tokens of an expert count as one tensor, so a scale per tensor is a scale per expert.

    T tokens, sorted by expert; after the last offset they belong to none   I inputs   O outputs   E experts
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from nanotrain.kernels.fp8.layer import Fp8Layer, Operand
from nanotrain.kernels.fp8.products import Scales, tensor_amax
from nanotrain.kernels.fp8.quantize import Quantized, block_amax
from nanotrain.kernels.fp8.scaled_mm import grouped_by_torch, packed, scaled_mm
from nanotrain.kernels.grouped import GroupedMM, accumulate_each, tokens_of_experts
from nanotrain.kernels.linear import GradView, wgrad

ROW = (1, None)


class Fp8LoopedMM(GroupedMM):
    """The products of stacked experts for one microbatch, expert by expert; `offs` is the same in
    all of them.

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
            products.append(scaled_mm(quantized, matrix, dtype=part.dtype))
        num_dropped = length - sum(map(len, parts))
        return torch.cat([*products, products[0].new_empty(num_dropped, products[0].shape[1])])


class Fp8GroupedMM(GroupedMM):
    """The products of all experts in one launch each, of operands that kernels cast; without a host
    sync.

    Args:
        layer: fp8 options of the stacked weights.
        records: whether the amaxes of the microbatch count for the history.
    """

    def __init__(self, layer: Fp8Layer, *, records: bool = False) -> None:
        self._layer, self._records, self._scales = layer, records, Scales([layer], records=records)
        self._grad_t: Quantized | None = None  # cast together with the gradient of dgrad

    def for_microbatch(self) -> Self:
        """New products, with scales of their own."""
        return type(self)(self._layer, records=torch.is_grad_enabled())

    def fprop(self, x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        """[T, I], [E, O, I] -> [T, O]."""
        if not self._scales.has(Operand.INPUT):
            amaxes = {(0, Operand.INPUT): self._scales.amax(x, Operand.INPUT, offs=offs)}
            if self._layer.stored is not None:
                amaxes[0, Operand.WEIGHT] = self._layer.stored.amax
            elif self._layer.kept is None:
                amaxes[0, Operand.WEIGHT] = self._scales.amax(
                    weight.flatten(0, 1), Operand.WEIGHT, offs=_ends(weight)
                )
            self._scales.set(amaxes)
        tokens, _ = self._scales.cast(x, Operand.INPUT, offs=offs)
        return self._multiply((tokens, self._matrices(weight)), offs, dtype=x.dtype)

    def dgrad(self, grad: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        """[T, O], [E, O, I] -> [T, I]."""
        self._scale_grads(grad, offs)
        columns = self._layer.options.wgrad and weight.requires_grad
        rows, self._grad_t = self._scales.cast(grad, Operand.GRAD, columns=columns, offs=offs)
        return self._multiply(
            (rows, self._matrices(weight, transposed=True)), offs, dtype=grad.dtype
        )

    def wgrad(self, grad: Tensor, x: Tensor, *, offs: Tensor) -> Tensor:
        """[T, O], [T, I] -> [E, O, I]."""
        if not self._layer.options.wgrad:
            return super().wgrad(grad, x, offs=offs)
        return self._multiply(self._columns(grad, x, offs=offs), offs, dtype=grad.dtype, sums=True)

    def accumulate_wgrad(self, grad: Tensor, x: Tensor, *, offs: Tensor, view: GradView) -> bool:
        """As `GroupedMM`: by the kernel of this project."""
        if not self._layer.options.wgrad:
            return super().accumulate_wgrad(grad, x, offs=offs, view=view)
        target = None if self._is_of_torch(Operand.GRAD) else view.start_write()
        if target is None:
            return False
        from nanotrain.kernels.fp8 import triton_grouped  # imports Triton

        operands, blocks = packed(*self._columns(grad, x, offs=offs))
        triton_grouped.write_grouped_mm([*operands, offs], blocks, out=target[0], adds=target[1])
        return True

    def _columns(self, grad: Tensor, x: Tensor, *, offs: Tensor) -> tuple[Quantized, Quantized]:
        """[O, T] and [I, T], the tokens of each expert from a multiple of the unit on."""
        grad_t, self._grad_t = self._grad_t, None
        if grad_t is None:
            self._scale_grads(grad, offs)
            _, grad_t = self._scales.cast(grad, Operand.GRAD, rows=False, columns=True, offs=offs)
        _, x_t = self._scales.cast(x, Operand.INPUT, rows=False, columns=True, offs=offs)
        assert grad_t is not None and x_t is not None, "both were asked for"
        return grad_t, x_t

    def _scale_grads(self, grad: Tensor, offs: Tensor) -> None:
        if not self._scales.has(Operand.GRAD):
            self._scales.set({(0, Operand.GRAD): self._scales.amax(grad, Operand.GRAD, offs=offs)})

    def _matrices(self, weight: Tensor, *, transposed: bool = False) -> Quantized | None:
        """[E, O, I] -> the rows of all matrices, or of all transposed ones."""
        layer = self._layer
        if layer.stored is not None:
            return layer.stored.matrices(transposed=transposed)
        forms, keeps = (
            layer.kept,
            self._records and layer.options.keeps_weights and self._scales.is_local,
        )
        if forms is None:
            wanted = {"rows": keeps or not transposed, "columns": keeps or transposed}
            forms = self._scales.cast(
                weight.detach().flatten(0, 1), Operand.WEIGHT, offs=_ends(weight), **wanted
            )
            layer.kept = forms if keeps else None
        return forms[int(transposed)]

    def _is_of_torch(self, operand: Operand) -> bool:
        """Whether torch has the product: e4m3 on one compute capability, with scales per tensor or
        row.
        """
        options = self._layer.options
        return (
            options.has_grouped_mm
            and options.recipe.block[1] is None
            and options.dtype(operand) is options.dtype(Operand.INPUT)
        )

    def _multiply(
        self,
        operands: tuple[Quantized | None, Quantized | None],
        offs: Tensor,
        *,
        dtype: torch.dtype,
        sums: bool = False,
    ) -> Tensor:
        a, b = operands
        assert a is not None and b is not None, "both were asked for"
        if a.values.dtype == b.values.dtype and self._is_of_torch(Operand.INPUT):
            return grouped_by_torch(a, b, offs=offs, sums=sums).to(dtype)
        from nanotrain.kernels.fp8 import triton_grouped

        tensors, blocks = packed(a, b)
        return triton_grouped.fp8_grouped_mm(
            [*tensors, offs], blocks=blocks, sums=sums, dtype=dtype
        )


def select_fp8_gemm(layer: Fp8Layer) -> GroupedMM:
    """`Fp8GroupedMM` where Triton kernels run, else `Fp8LoopedMM`."""
    return Fp8GroupedMM(layer) if layer.options.is_fused else Fp8LoopedMM(layer)


def _ends(weight: Tensor) -> Tensor:
    """[E], the end of the rows of each matrix of [E, O, I]."""
    experts, rows, _ = weight.shape
    return torch.arange(rows, experts * rows + 1, rows, dtype=torch.int32, device=weight.device)


def _part_amaxes(parts: Sequence[Tensor]) -> Tensor:
    """[E]; 0 for an expert without tokens."""
    return torch.cat(
        [
            tensor_amax(part) if len(part) else part.new_zeros(1, dtype=torch.float32)
            for part in parts
        ]
    )


def _matrix_amaxes(weight: Tensor) -> Tensor:
    """[E, N, K] -> [E]."""
    return block_amax(weight.flatten(0, 1), ROW).view(len(weight), -1).amax(1)
