"""fp8 products of linear layers that share an input; grouped.py has stacked experts.

    Scales         scales per tensor of one microbatch, and the casts of operands
    Fp8Linears     the three products
    fp8_in_graph   layers inside of a compiled graph
    keep_weights   cast the weights of a block once per step

    fprop    x [T, I]         W [O, I]         scales along I
    dgrad    dy [T, O]        W^T [I, O]       scales along O
    wgrad    dy^T [O, T]      x^T [I, T]       scales along T

Every operand is quantized from its value in the dtype of the activations, once for every product
that reads it. A scale per tensor is the same in all products of a microbatch; it is computed and
reduced at the first use.

    T tokens   I inputs   O outputs   E experts of a scale per tensor
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nanotrain.comm.autograd import eager_or_graph
from nanotrain.kernels.fp8.layer import Fp8Layer, Operand
from nanotrain.kernels.fp8.quantize import (
    Cast,
    ComputedInput,
    Forms,
    Quantized,
    block_amax,
    cast,
    inverse_scales,
    quantize,
)
from nanotrain.kernels.fp8.scaled_mm import (
    pack_operands,
    scaled_mm,
    unpack_operands,
    write_scaled_mm,
)
from nanotrain.kernels.linear import Linear, Linears, grad_view_of, keep_in_graphs, target_in_graph
from nanotrain.precision.fp8 import PER_TENSOR

Key = tuple[int, Operand]  # number of a layer among layers that share an input, and an operand


class Scales:
    """The scales per tensor of one microbatch, in layers that share an input.

    Args:
        layers: layers with the same options.
        records: whether amaxes count for the history.
        inverse: known inverse scales of the same microbatch.
    """

    def __init__(
        self,
        layers: Sequence[Fp8Layer],
        *,
        records: bool,
        inverse: Mapping[Key, Tensor] | None = None,
    ) -> None:
        self._layers = layers
        self._records = records
        self._options = layers[0].options
        self.inverse = dict(inverse or {})
        self._measured = set(self.inverse)

    def has(self, operand: Operand) -> bool:
        """Whether the scales of an operand are known, or are computed by `quantize`."""
        return not self._options.recipe.is_per_tensor or (0, operand) in self.inverse

    @property
    def is_local(self) -> bool:
        """Whether scales need no collective: they follow from the history or this rank's values."""
        if not self._options.recipe.is_per_tensor:
            return True
        return self._options.reduce_amax is None or self._layers[0].has_history

    @property
    def _measures(self) -> bool:
        """Whether casts measure amaxes, with scales that follow from earlier amaxes."""
        return self._options.is_fused and self._options.recipe.has_history and self.is_local

    def amax(
        self,
        x: Tensor | ComputedInput,
        operand: Operand,
        *,
        layer: int = 0,
        offs: Tensor | None = None,
    ) -> Tensor:
        """[E], the amax of each expert's rows; 0 where `cast` measures it."""
        if not self._options.is_fused:
            return tensor_amax(as_tensor(x))
        from nanotrain.kernels.fp8 import triton_cast  # imports Triton

        earlier = None
        if self._measures:
            earlier = self._layers[layer].earlier_amax(operand)
        return triton_cast.amaxes(x, offs, unless=earlier)

    def set(self, amaxes: Mapping[Key, Tensor]) -> None:
        """Compute scales from this rank's amaxes [E] by layer and operand.

        Where tensors are shared this is one collective.
        """
        if self._records and not self._measures:
            for (layer, operand), amax in amaxes.items():
                self._layers[layer].record(operand, amax)
        values = list(amaxes.values())
        if self._options.reduce_amax is not None and not self.is_local:
            values = list(self._options.reduce_amax(torch.stack(values)))
        for (layer, operand), amax in zip(amaxes, values, strict=True):
            self.inverse[layer, operand] = self._layers[layer].inverse_scales(operand, amax)

    def quantize(
        self, x: Tensor, operand: Operand, *, layer: int = 0, expert: int = 0
    ) -> Quantized:
        """x [R, K] in fp8, for a product that sums over K."""
        how = self._how(operand)
        if self._options.recipe.is_per_tensor:
            inverse = self.inverse[layer, operand][expert].view(1, 1)
        else:
            amax = block_amax(x, how.block)
            inverse = inverse_scales(amax, how.dtype, power_of_two=how.power_of_two)
        return quantize(x, inverse, block=how.block, dtype=how.dtype)

    def cast(
        self,
        x: Tensor | ComputedInput,
        operand: Operand,
        *,
        layer: int = 0,
        rows: bool = True,
        columns: bool = False,
        offs: Tensor | None = None,
    ) -> Forms:
        """x [R, K] in fp8, for products that sum over its columns or over its rows.

        `offs` [E] int32 is the end of each expert's rows; only Triton kernels take experts.
        """
        how = replace(self._how(operand), rows=rows, columns=columns)
        key = (layer, operand)
        inverse = self.inverse[key] if self._options.recipe.is_per_tensor else None
        if not self._options.is_fused:
            return cast(as_tensor(x), how, inverse=inverse)
        from nanotrain.kernels.fp8 import triton_cast

        measures = self._measures and key not in self._measured
        is_stack = offs is not None and operand is Operand.WEIGHT
        forms, amax = triton_cast.cast(
            x, how, inverse=inverse, offs=offs, is_stack=is_stack, measures=measures
        )
        if measures:
            forms = self._record_measured(forms, amax, key=key)
        return forms

    def _record_measured(self, forms: Forms, amax: Tensor, *, key: Key) -> Forms:
        """Record the amax that a cast measured; returns the forms, scaled by NaN if not finite.

        The cast clamps to the range of fp8, so without the NaN an overflow would look finite.
        """
        self._measured.add(key)
        layer, operand = key
        if self._records:
            # all layers multiply the same input; a weight or gradient belongs to one
            owners = self._layers if operand is Operand.INPUT else [self._layers[layer]]
            for fp8_layer in owners:
                fp8_layer.record(operand, amax)
        inverse = torch.where(amax.isfinite(), self.inverse[key], torch.nan)
        self.inverse[key] = inverse
        return forms.rescaled(inverse.view(-1, 1))

    def _how(self, operand: Operand) -> Cast:
        """How an operand is cast: its blocks and its dtype."""
        recipe = self._options.recipe
        block = recipe.weight_block if operand is Operand.WEIGHT else recipe.block
        return Cast(block, self._options.dtype(operand), recipe.power_of_two)


class Fp8Linears(Linears):
    """The products of layers that share an input, for one microbatch.

    Args:
        linears: linear layers with `fp8` set.
        records: whether amaxes count for the history.
        inverse: known inverse scales of the same microbatch.
    """

    def __init__(
        self,
        linears: Sequence[Linear],
        *,
        records: bool,
        inverse: Mapping[Key, Tensor] | None = None,
    ) -> None:
        super().__init__(linears, records=records)
        self._layers = [linear.fp8 for linear in linears if linear.fp8 is not None]
        assert len(self._layers) == len(linears), "layers that share an input all use fp8"
        self._scales = Scales(self._layers, records=records, inverse=inverse)
        self._options = self._layers[0].options
        # transposed gradients for wgrad, cast together with the gradients for dgrad
        self._grads_t: dict[int, Quantized] = {}

    def fprop(self, x: Tensor) -> tuple[Tensor, ...]:
        """[..., I] -> one [..., O] per layer."""
        rows = x.flatten(0, -2)
        outputs, _ = self.fprop_rows(rows, keeps=False)
        return tuple(out.view(*x.shape[:-1], -1) for out in outputs)

    def fprop_rows(
        self, x: Tensor | ComputedInput, *, keeps: bool
    ) -> tuple[list[Tensor], Quantized | None]:
        """[T, I] -> one [T, O] per layer, and the transposed input in fp8 if it is kept."""
        forms = self.cast_input(x, keeps=keeps)
        outputs = []
        for i, linear in enumerate(self.linears):
            out = scaled_mm(forms.get(), self._weight(i), dtype=x.dtype, is_fast=True)
            if linear.used_bias is not None:
                out = out + linear.used_bias
            outputs.append(out)
        return outputs, forms.columns

    def cast_input(self, x: Tensor | ComputedInput, *, keeps: bool = False) -> Forms:
        """[T, I] in fp8 for fprop, and transposed if that form is kept."""
        if not self._scales.has(Operand.INPUT):
            self._scales.set(self._forward_amaxes(x))
        return self._scales.cast(x, Operand.INPUT, columns=keeps)

    def cast_weights(self) -> list[Quantized]:
        """One [O, I] per layer for fprop, once the input is cast."""
        return [self._weight(layer) for layer in range(len(self.linears))]

    def _forward_amaxes(self, x: Tensor | ComputedInput) -> dict[Key, Tensor]:
        """Amaxes of the input [T, I], and of weights without scales; inputs first."""
        input_amax = self._scales.amax(x, Operand.INPUT)
        amaxes: dict[Key, Tensor] = {}
        for i in range(len(self.linears)):
            amaxes[i, Operand.INPUT] = input_amax
        for i, (linear, layer) in enumerate(zip(self.linears, self._layers, strict=True)):
            if layer.stored is not None:
                amaxes[i, Operand.WEIGHT] = layer.stored.amax
            elif layer.kept is None:
                weight = linear.used_weight
                amaxes[i, Operand.WEIGHT] = self._scales.amax(weight, Operand.WEIGHT, layer=i)
        return amaxes

    def dgrad(self, grads: Sequence[Tensor]) -> Tensor:
        """One [T, O] per layer -> [T, I], their sum."""
        self._scale_grads(grads)
        total: Tensor | None = None
        for i, (grad, linear) in enumerate(zip(grads, self.linears, strict=True)):
            has_wgrad = self._options.wgrad and linear.weight.requires_grad
            casts_both = self._options.is_fused and has_wgrad
            forms = self._scales.cast(grad, Operand.GRAD, layer=i, columns=casts_both)
            if forms.columns is not None:
                self._grads_t[i] = forms.columns
            partial = scaled_mm(forms.get(), self._weight(i, transposed=True), dtype=grad.dtype)
            total = partial if total is None else total.add_(partial)
        assert total is not None, "there is at least one layer"
        return total

    def wgrad(self, grads: Sequence[Tensor], x: Tensor | ComputedInput) -> list[Tensor | None]:
        """One [T, O] per layer, [T, I] -> the gradients of the trained parameters.

        None for a gradient that was written where it is accumulated.
        """
        if not self._options.wgrad:
            return super().wgrad(grads, as_tensor(x))
        x_forms = self._scales.cast(x, Operand.INPUT, rows=False, columns=True)
        return self.wgrad_of(grads, x_forms.get(transposed=True))

    def wgrad_of(self, grads: Sequence[Tensor], x_t: Quantized) -> list[Tensor | None]:
        """`wgrad` of an input that is cast: one [T, O] per layer, [I, T]."""
        self._scale_grads(grads)
        gradients: list[Tensor | None] = []
        for i, (grad, linear) in enumerate(zip(grads, self.linears, strict=True)):
            grad_weight = None
            if linear.weight.requires_grad:
                grad_t = self._grads_t.pop(i, None)
                if grad_t is None:
                    forms = self._scales.cast(grad, Operand.GRAD, layer=i, rows=False, columns=True)
                    grad_t = forms.get(transposed=True)
                grad_weight = _wgrad(linear, (grad_t, x_t), dtype=grad.dtype)
            gradients += linear.param_grads(grad, grad_weight)
        return gradients

    @property
    def inverse(self) -> dict[Key, Tensor]:
        """The known inverse scales per tensor."""
        return self._scales.inverse

    def _weight(self, layer: int, *, transposed: bool = False) -> Quantized:
        """[O, I] or [I, O]: the weight that is kept in fp8, or cast now."""
        linear = self.linears[layer]
        fp8 = self._layers[layer]
        if fp8.stored is not None:
            return fp8.stored.matrix(rows=linear.rows or slice(None), transposed=transposed)
        forms = fp8.kept
        if forms is None:
            weight = linear.used_weight.detach()
            forms = self._scales.cast(
                weight, Operand.WEIGHT, layer=layer, rows=not transposed, columns=transposed
            )
        return forms.get(transposed=transposed)

    def _scale_grads(self, grads: Sequence[Tensor]) -> None:
        """Compute the scales of the gradients, once per microbatch."""
        if self._scales.has(Operand.GRAD):
            return
        amaxes: dict[Key, Tensor] = {}
        for i, grad in enumerate(grads):
            amaxes[i, Operand.GRAD] = self._scales.amax(grad, Operand.GRAD, layer=i)
        self._scales.set(amaxes)


def _wgrad(
    linear: Linear, operands: tuple[Quantized, Quantized], *, dtype: torch.dtype
) -> Tensor | None:
    """dW = grad_t x_t^T [O, I], or None where it was written."""
    if _write_wgrad(linear, operands):
        return None
    grad_t, x_t = operands
    return scaled_mm(grad_t, x_t, dtype=dtype)


def _write_eagerly(linear: Linear, operands: tuple[Quantized, Quantized]) -> bool:
    """Write wgrad to the gradient buffer; returns whether it was written."""
    view = grad_view_of(linear.weight) if linear.writes_wgrad else None
    target = None if view is None else view.start_write()
    if target is None:
        return False
    out, has_grads = target
    write_scaled_mm(*operands, out=out, adds=has_grads)
    return True


def _write_by_operator(linear: Linear, operands: tuple[Quantized, Quantized]) -> bool:
    """Write wgrad by an operator of a compiled graph; returns whether a graph can do so."""
    if not linear.writes_in_graph:
        return False
    tensors, blocks = pack_operands(*operands)
    write_fp8_in_graph(linear.weight, tensors, blocks=blocks)
    return True


_write_wgrad = eager_or_graph(_write_eagerly, _write_by_operator)


@torch.library.custom_op("nanotrain::write_fp8_wgrad", mutates_args=())
def write_fp8_in_graph(
    weight: Tensor, operands: Sequence[Tensor], *, blocks: Sequence[int]
) -> None:
    """Write or add an fp8 weight gradient to its buffer, as an operator of compiled graphs."""
    a, b = unpack_operands(operands, blocks)
    out, has_grads = target_in_graph(weight)
    write_scaled_mm(a, b, out=out, adds=has_grads)


keep_in_graphs(write_fp8_in_graph)


def fp8_in_graph(x: Tensor, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
    """[..., I] -> one [..., O] per layer, inside of a graph."""
    params = [param for linear in linears for param in linear.trained_params]
    records = torch.is_grad_enabled()
    outputs: tuple[Tensor, ...] = _Fp8InGraph.apply(x, tuple(linears), records, *params)
    return outputs


class _Fp8InGraph(torch.autograd.Function):
    """Scales that products share are saved as tensors, because a graph holds no objects."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, linears: Sequence[Linear], records: bool, *params: Tensor
    ) -> tuple[Tensor, ...]:
        """The products of linears that share x [..., I]: one output [..., O] per linear."""
        products = Fp8Linears(linears, records=records)
        outputs = products.fprop(x)
        ctx.linears = linears
        ctx.keys = tuple(products.inverse)
        ctx.save_for_backward(x, *products.inverse.values())
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """dgrad and wgrad of all linears that share the input, with the scales of the forward."""
        x, *scales = ctx.saved_tensors
        inverse = dict(zip(ctx.keys, scales, strict=True))
        products = Fp8Linears(ctx.linears, records=True, inverse=inverse)
        flat = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = products.dgrad(flat).view(x.shape)
        grad_params = products.wgrad(flat, x.flatten(0, -2))
        return grad_x, None, None, *grad_params


def keep_weights(block: nn.Module) -> None:
    """Cast the weights of a block once per step, when it first runs, and keep them.

    This is outside of its graphs, which have the weights as inputs.
    """
    linears = []
    for module in block.modules():
        if isinstance(module, Linear) and _keeps_weight(module):
            linears.append(module)

    def cast_weights(*_: object) -> None:
        if not torch.is_grad_enabled():  # amaxes of validation do not count
            return
        for linear in linears:
            _keep_weight(linear)

    if linears:
        block.register_forward_pre_hook(cast_weights)


def _keeps_weight(linear: Linear) -> bool:
    return linear.fp8 is not None and linear.fp8.options.keeps_weights


@torch.no_grad()
def _keep_weight(linear: Linear) -> None:
    """Cast a weight, unless it is kept or needs other ranks for its scale."""
    fp8 = linear.fp8
    assert fp8 is not None, "only layers in fp8 keep weights"
    scales = Scales([fp8], records=True)
    if fp8.kept is not None or fp8.stored is not None or not scales.is_local:
        return
    weight = linear.used_weight
    if not scales.has(Operand.WEIGHT):
        scales.set({(0, Operand.WEIGHT): scales.amax(weight, Operand.WEIGHT)})
    fp8.kept = scales.cast(weight, Operand.WEIGHT, columns=True)


def as_tensor(x: Tensor | ComputedInput) -> Tensor:
    """An operand, computed by torch's operators where casts would compute it."""
    return x if isinstance(x, Tensor) else x.value()


def tensor_amax(x: Tensor) -> Tensor:
    """[1], the amax of a tensor."""
    return block_amax(x.detach(), PER_TENSOR).view(1)
