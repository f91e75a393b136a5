"""fp8 products of linear layers: `Fp8Linears` for layers that share an input; stacked experts are in grouped.py.

    fprop    x [T, I]         W [O, I]         scales along I
    dgrad    dy [T, O]        W^T [I, O]       scales along O
    wgrad    dy^T [O, T]      x^T [I, T]       scales along T

Every operand is quantized from its value in the dtype of the activations, once for every product that reads it. A scale
per tensor is the same in all products of a microbatch; it is computed and reduced at the first use.

    T tokens   I inputs   O outputs   E experts of a scale per tensor
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nanotrain.kernels.fp8.layer import Fp8Layer, Operand
from nanotrain.kernels.fp8.quantize import Quantized, block_amax, inverse_scales, quantize
from nanotrain.kernels.fp8.scaled_mm import scaled_mm
from nanotrain.kernels.linear import Linear, Linears


class Scales:
    """The scales per tensor of one microbatch in some layers that are multiplied together.

    Args:
        layers: layers with the same options.
        records: whether amaxes count for the history.
    """

    def __init__(self, layers: Sequence[Fp8Layer], *, records: bool) -> None:
        self._layers, self._records = layers, records
        self._options = layers[0].options
        self._inverse: dict[tuple[int, Operand], Tensor] = {}

    def has(self, operand: Operand) -> bool:
        """Whether the scales of an operand are known, or are computed by `quantize` itself."""
        return not self._options.recipe.is_per_tensor or (0, operand) in self._inverse

    def set(self, amaxes: Mapping[tuple[int, Operand], Tensor]) -> None:
        """Compute scales from this rank's amaxes [E] by layer and operand; one collective where they are shared."""
        if self._records:
            for (layer, operand), amax in amaxes.items():
                self._layers[layer].record(operand, amax)
        values = list(amaxes.values())
        if self._options.reduce_amax is not None and not self._layers[0].has_history:  # else only the history is used
            values = list(self._options.reduce_amax(torch.stack(values)))
        for (layer, operand), amax in zip(amaxes, values, strict=True):
            self._inverse[layer, operand] = self._layers[layer].inverse_scales(operand, amax)

    def of_experts(self, operand: Operand) -> Tensor:
        """The inverse scales [E] per tensor of an operand of the first layer."""
        return self._inverse[0, operand]

    def quantize(self, x: Tensor, operand: Operand, *, layer: int = 0, expert: int = 0) -> Quantized:
        """x [R, K] in fp8, K being what the product sums over."""
        recipe, dtype = self._options.recipe, self._options.dtype(operand)
        block = recipe.weight_block if operand is Operand.WEIGHT else recipe.block
        if recipe.is_per_tensor:
            inverse = self._inverse[layer, operand][expert].view(1, 1)
        else:
            inverse = inverse_scales(block_amax(x, block), dtype, power_of_two=recipe.power_of_two)
        return quantize(x, inverse, block=block, dtype=dtype)


class Fp8Linears(Linears):
    """The products of layers that share an input, for one microbatch.

    Args:
        linears: linear layers with `fp8` set.
        records: whether amaxes count for the history.
    """

    def __init__(self, linears: Sequence[Linear], *, records: bool) -> None:
        super().__init__(linears, records=records)
        layers = [linear.fp8 for linear in linears if linear.fp8 is not None]
        assert len(layers) == len(linears), "layers that share an input are all in fp8 or all not"
        self._scales = Scales(layers, records=records)
        self._fp8_wgrad = layers[0].options.wgrad

    def fprop(self, x: Tensor) -> tuple[Tensor, ...]:
        """[..., I] -> one [..., O] per layer."""
        flat, dtype = x.flatten(0, -2), x.dtype
        if not self._scales.has(Operand.INPUT):
            inputs = dict.fromkeys(((i, Operand.INPUT) for i in range(len(self.linears))), tensor_amax(flat))
            weights = {(i, Operand.WEIGHT): _weight_amax(linear) for i, linear in enumerate(self.linears)}
            self._scales.set(inputs | weights)
        quantized = self._scales.quantize(flat, Operand.INPUT)
        outputs = []
        for i, linear in enumerate(self.linears):
            out = scaled_mm(quantized, self._weight(i), dtype=dtype).view(*x.shape[:-1], -1)
            outputs.append(out if linear.used_bias is None else out + linear.used_bias)
        return tuple(outputs)

    def dgrad(self, grads: Sequence[Tensor]) -> Tensor:
        """One [T, O] per layer -> [T, I], their sum."""
        self._scale_grads(grads)
        total: Tensor | None = None
        for i, grad in enumerate(grads):
            quantized = self._scales.quantize(grad, Operand.GRAD, layer=i)
            partial = scaled_mm(quantized, self._weight(i, transposed=True), dtype=grad.dtype)
            total = partial if total is None else total.add_(partial)
        assert total is not None, "there is at least one layer"
        return total

    def wgrad(self, grads: Sequence[Tensor], x: Tensor) -> list[Tensor | None]:
        """One [T, O] per layer, [T, I] -> the gradients of the trained parameters, None for one that was written."""
        if not self._fp8_wgrad:
            return super().wgrad(grads, x)
        self._scale_grads(grads)
        x_t = self._scales.quantize(x.t(), Operand.INPUT)
        found: list[Tensor | None] = []
        for i, (grad, linear) in enumerate(zip(grads, self.linears, strict=True)):
            grad_weight = None
            if linear.weight.requires_grad:
                grad_t = self._scales.quantize(grad.t(), Operand.GRAD, layer=i)
                grad_weight = scaled_mm(grad_t, x_t, dtype=grad.dtype)
            found += linear.param_grads(grad, grad_weight)
        return found

    def _weight(self, layer: int, *, transposed: bool = False) -> Quantized:
        """[O, I] or [I, O]: as it is kept in fp8, or quantized."""
        linear = self.linears[layer]
        if linear.fp8 is not None and linear.fp8.stored is not None:
            return linear.fp8.stored.matrix(rows=linear.rows or slice(None), transposed=transposed)
        weight = linear.used_weight.detach()
        return self._scales.quantize(weight.t() if transposed else weight, Operand.WEIGHT, layer=layer)

    def _scale_grads(self, grads: Sequence[Tensor]) -> None:
        if not self._scales.has(Operand.GRAD):
            self._scales.set({(i, Operand.GRAD): tensor_amax(grad) for i, grad in enumerate(grads)})


def _weight_amax(linear: Linear) -> Tensor:
    """[1], of what this rank multiplies with, or of the whole weight where that is known."""
    stored = None if linear.fp8 is None else linear.fp8.stored
    return tensor_amax(linear.used_weight) if stored is None else stored.amax


def tensor_amax(x: Tensor) -> Tensor:
    """[1], the amax of a tensor."""
    return block_amax(x.detach(), (None, None)).view(1)
