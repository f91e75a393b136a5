"""fp8 products of linear layers: `Fp8Linears` for layers that share an input; stacked experts are
in grouped.py.

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

from nanotrain.kernels.fp8.layer import Fp8Layer, Operand
from nanotrain.kernels.fp8.quantize import (
    Cast,
    Forms,
    Quantized,
    block_amax,
    cast,
    inverse_scales,
    quantize,
)
from nanotrain.kernels.fp8.scaled_mm import packed, scaled_mm, unpacked, write_scaled_mm
from nanotrain.kernels.linear import Linear, Linears, grad_view_of, ordered, target_in_graph

Key = tuple[int, Operand]  # of a layer among those that are multiplied together


class Scales:
    """The scales per tensor of one microbatch in some layers that are multiplied together.

    Args:
        layers: layers with the same options.
        records: whether amaxes count for the history.
        inverse: inverse scales of the same microbatch that are known.
    """

    def __init__(
        self,
        layers: Sequence[Fp8Layer],
        *,
        records: bool,
        inverse: Mapping[Key, Tensor] | None = None,
    ) -> None:
        self._layers, self._records = layers, records
        self._options = layers[0].options
        self.inverse = dict(inverse or {})
        self._measured = set(self.inverse)

    def has(self, operand: Operand) -> bool:
        """Whether the scales of an operand are known, or are computed by `quantize` itself."""
        return not self._options.recipe.is_per_tensor or (0, operand) in self.inverse

    @property
    def is_local(self) -> bool:
        """Whether no other rank is asked: scales follow from the history or from values of this
        rank.
        """
        options = self._options
        return (
            not options.recipe.is_per_tensor
            or options.reduce_amax is None
            or self._layers[0].has_history
        )

    @property
    def _measures(self) -> bool:
        """Whether amaxes are measured while tensors are cast, with scales that follow from earlier
        ones.
        """
        return self._options.is_fused and self._options.recipe.has_history and self.is_local

    def amax(
        self, x: Tensor, operand: Operand, *, layer: int = 0, offs: Tensor | None = None
    ) -> Tensor:
        """[E], the amax of each expert's rows; 0 where its scale follows from the history, and
        `cast` measures it.
        """
        if not self._options.is_fused:
            return tensor_amax(x)
        from nanotrain.kernels.fp8 import triton_cast  # imports Triton

        earlier = self._layers[layer].earlier_amax(operand) if self._measures else None
        return triton_cast.amaxes(x, offs, unless=earlier)

    def set(self, amaxes: Mapping[Key, Tensor]) -> None:
        """Compute scales from this rank's amaxes [E] by layer and operand; one collective where
        they are shared.
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
        """x [R, K] in fp8, K being what the product sums over."""
        how, recipe = self._how(operand), self._options.recipe
        if recipe.is_per_tensor:
            inverse = self.inverse[layer, operand][expert].view(1, 1)
        else:
            inverse = inverse_scales(
                block_amax(x, how.block), how.dtype, power_of_two=recipe.power_of_two
            )
        return quantize(x, inverse, block=how.block, dtype=how.dtype)

    def cast(
        self,
        x: Tensor,
        operand: Operand,
        *,
        layer: int = 0,
        rows: bool = True,
        columns: bool = False,
        offs: Tensor | None = None,
    ) -> Forms:
        """x [R, K] in fp8, for products that sum over its columns and over its rows; kernels take
        rows of experts.
        """
        how, key = replace(self._how(operand), rows=rows, columns=columns), (layer, operand)
        inverse = self.inverse[key] if self._options.recipe.is_per_tensor else None
        if not self._options.is_fused:
            return cast(x, how, inverse=inverse)
        from nanotrain.kernels.fp8 import triton_cast

        measures = self._measures and key not in self._measured
        is_stack = offs is not None and operand is Operand.WEIGHT
        forms, amax = triton_cast.cast(
            x, how, inverse=inverse, offs=offs, is_stack=is_stack, measures=measures
        )
        return self._guarded(forms, amax, key=key) if measures else forms

    def _guarded(self, forms: Forms, amax: Tensor, *, key: Key) -> Forms:
        """Record an amax; where it is not finite the scale is NaN, as clamped values must not hide
        it.
        """
        self._measured.add(key)
        is_input = key[1] is Operand.INPUT  # of all layers
        for index, layer in enumerate(self._layers):
            if self._records and (is_input or index == key[0]):
                layer.record(key[1], amax)
        self.inverse[key] = inverse = torch.where(amax.isfinite(), self.inverse[key], torch.nan)
        rows, columns = (
            form and replace(form, inverse_scales=inverse.view(-1, 1)) for form in forms
        )
        return rows, columns

    def _how(self, operand: Operand) -> Cast:
        recipe = self._options.recipe
        block = recipe.weight_block if operand is Operand.WEIGHT else recipe.block
        return Cast(block, self._options.dtype(operand), recipe.power_of_two)


class Fp8Linears(Linears):
    """The products of layers that share an input, for one microbatch.

    Args:
        linears: linear layers with `fp8` set.
        records: whether amaxes count for the history.
        inverse: inverse scales of the same microbatch that are known.
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
        assert len(self._layers) == len(linears), (
            "layers that share an input are all in fp8 or all not"
        )
        self._scales = Scales(self._layers, records=records, inverse=inverse)
        self._options = self._layers[0].options
        # transposed gradients, cast together with those of dgrad
        self._grads_t: dict[int, Quantized] = {}

    def fprop(self, x: Tensor) -> tuple[Tensor, ...]:
        """[..., I] -> one [..., O] per layer."""
        flat, dtype = x.flatten(0, -2), x.dtype
        if not self._scales.has(Operand.INPUT):
            amax = self._scales.amax(flat, Operand.INPUT)
            amaxes: dict[Key, Tensor] = dict.fromkeys(
                ((i, Operand.INPUT) for i in range(len(self.linears))), amax
            )
            for i, (linear, layer) in enumerate(zip(self.linears, self._layers, strict=True)):
                if layer.stored is not None:
                    amaxes[i, Operand.WEIGHT] = layer.stored.amax
                elif layer.kept is None:
                    amaxes[i, Operand.WEIGHT] = self._scales.amax(
                        linear.used_weight, Operand.WEIGHT, layer=i
                    )
            self._scales.set(amaxes)
        quantized, _ = self._scales.cast(flat, Operand.INPUT)
        assert quantized is not None, "it is the default"
        outputs = []
        for i, linear in enumerate(self.linears):
            out = scaled_mm(quantized, self._weight(i), dtype=dtype).view(*x.shape[:-1], -1)
            outputs.append(out if linear.used_bias is None else out + linear.used_bias)
        return tuple(outputs)

    def dgrad(self, grads: Sequence[Tensor]) -> Tensor:
        """One [T, O] per layer -> [T, I], their sum."""
        self._scale_grads(grads)
        total: Tensor | None = None
        for i, (grad, linear) in enumerate(zip(grads, self.linears, strict=True)):
            casts_both = (
                self._options.is_fused and self._options.wgrad and linear.weight.requires_grad
            )
            quantized, grad_t = self._scales.cast(grad, Operand.GRAD, layer=i, columns=casts_both)
            if grad_t is not None:
                self._grads_t[i] = grad_t
            assert quantized is not None, "it is the default"
            partial = scaled_mm(quantized, self._weight(i, transposed=True), dtype=grad.dtype)
            total = partial if total is None else total.add_(partial)
        assert total is not None, "there is at least one layer"
        return total

    def wgrad(self, grads: Sequence[Tensor], x: Tensor) -> list[Tensor | None]:
        """One [T, O] per layer, [T, I] -> the gradients of the trained parameters, None for one
        that was written.
        """
        if not self._options.wgrad:
            return super().wgrad(grads, x)
        self._scale_grads(grads)
        _, x_t = self._scales.cast(x, Operand.INPUT, rows=False, columns=True)
        found: list[Tensor | None] = []
        for i, (grad, linear) in enumerate(zip(grads, self.linears, strict=True)):
            grad_weight = None
            if linear.weight.requires_grad:
                grad_t = self._grads_t.pop(i, None)
                if grad_t is None:
                    _, grad_t = self._scales.cast(
                        grad, Operand.GRAD, layer=i, rows=False, columns=True
                    )
                assert grad_t is not None and x_t is not None, "both were asked for"
                grad_weight = _wgrad(linear, (grad_t, x_t), dtype=grad.dtype)
            found += linear.param_grads(grad, grad_weight)
        return found

    @property
    def inverse(self) -> dict[Key, Tensor]:
        """The inverse scales per tensor that are known."""
        return self._scales.inverse

    def _weight(self, layer: int, *, transposed: bool = False) -> Quantized:
        """[O, I] or [I, O]: as it is kept in fp8, or quantized."""
        linear, fp8 = self.linears[layer], self._layers[layer]
        if fp8.stored is not None:
            return fp8.stored.matrix(rows=linear.rows or slice(None), transposed=transposed)
        forms = fp8.kept
        if forms is None:
            weight = linear.used_weight.detach()
            forms = self._scales.cast(
                weight, Operand.WEIGHT, layer=layer, rows=not transposed, columns=transposed
            )
        rows, columns = forms
        form = columns if transposed else rows
        assert form is not None, "it was asked for"
        return form

    def _scale_grads(self, grads: Sequence[Tensor]) -> None:
        if not self._scales.has(Operand.GRAD):
            scales = self._scales
            scales.set(
                {
                    (i, Operand.GRAD): scales.amax(grad, Operand.GRAD, layer=i)
                    for i, grad in enumerate(grads)
                }
            )


def _wgrad(
    linear: Linear, operands: tuple[Quantized, Quantized], *, dtype: torch.dtype
) -> Tensor | None:
    """dW = grad_t x_t^T [O, I], or None where it was written."""
    grad_t, x_t = operands
    if torch.compiler.is_compiling():
        if not linear.writes_in_graph:
            return scaled_mm(grad_t, x_t, dtype=dtype)
        tensors, blocks = packed(grad_t, x_t)
        write_fp8_in_graph(linear.weight, tensors, blocks=blocks)
        return None
    view = grad_view_of(linear.weight) if linear.writes_wgrad else None
    target = None if view is None else view.start_write()
    if target is None:
        return scaled_mm(grad_t, x_t, dtype=dtype)
    write_scaled_mm(grad_t, x_t, out=target[0], adds=target[1])
    return None


@torch.library.custom_op("nanotrain::write_fp8_wgrad", mutates_args=())
def write_fp8_in_graph(
    weight: Tensor, operands: Sequence[Tensor], *, blocks: Sequence[int]
) -> None:
    """As `nanotrain::write_wgrad`, of two matrices in fp8."""
    a, b = unpacked(operands, blocks)
    out, adds = target_in_graph(weight)
    write_scaled_mm(a, b, out=out, adds=adds)


ordered(write_fp8_in_graph)


def fp8_in_graph(x: Tensor, linears: Sequence[Linear]) -> tuple[Tensor, ...]:
    """[..., I] -> one [..., O] per layer, inside of a graph."""
    params = [param for linear in linears for param in linear.trained_params]
    outputs: tuple[Tensor, ...] = _Fp8InGraph.apply(
        x, tuple(linears), torch.is_grad_enabled(), *params
    )
    return outputs


class _Fp8InGraph(torch.autograd.Function):
    """What a microbatch shares between its products is saved as tensors: a graph holds no objects."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, linears: Sequence[Linear], records: bool, *params: Tensor
    ) -> tuple[Tensor, ...]:
        products = Fp8Linears(linears, records=records)
        outputs = products.fprop(x)
        ctx.linears, ctx.keys = linears, tuple(products.inverse)
        ctx.save_for_backward(x, *products.inverse.values())
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *inverse = ctx.saved_tensors
        products = Fp8Linears(
            ctx.linears, records=True, inverse=dict(zip(ctx.keys, inverse, strict=True))
        )
        flat = [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        grad_x = products.dgrad(flat).view(x.shape) if ctx.needs_input_grad[0] else None
        return grad_x, None, None, *products.wgrad(flat, x.flatten(0, -2))


def keep_weights(block: nn.Module) -> None:
    """Let a block cast its weights when it first runs in a step: outside of its graphs, which get
    them as inputs.
    """
    linears = [module for module in block.modules() if isinstance(module, Linear)]
    layers = [
        (linear, linear.fp8)
        for linear in linears
        if linear.fp8 is not None and linear.fp8.options.keeps_weights
    ]

    def cast_weights(*_: object) -> None:
        # amaxes of validation do not count
        for linear, fp8 in layers if torch.is_grad_enabled() else ():
            scales = Scales([fp8], records=True)
            if fp8.kept is None and fp8.stored is None and scales.is_local:
                fp8.kept = _cast_weight(linear, scales)

    if layers:
        block.register_forward_pre_hook(cast_weights)


@torch.no_grad()
def _cast_weight(linear: Linear, scales: Scales) -> Forms:
    weight = linear.used_weight
    if not scales.has(Operand.WEIGHT):
        scales.set({(0, Operand.WEIGHT): scales.amax(weight, Operand.WEIGHT)})
    return scales.cast(weight, Operand.WEIGHT, columns=True)


def tensor_amax(x: Tensor) -> Tensor:
    """[1], the amax of a tensor."""
    return block_amax(x.detach(), (None, None)).view(1)
