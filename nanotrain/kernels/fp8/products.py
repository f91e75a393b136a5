"""fp8 products of linear layers: `Fp8Linears` for layers that share an input, `Fp8GroupedMM` for stacked experts.

    fprop    x [T, I]         W [O, I]         scales along I
    dgrad    dy [T, O]        W^T [I, O]       scales along O
    wgrad    dy^T [O, T]      x^T [I, T]       scales along T

Every operand is quantized from its value in the dtype of the activations, once per product that reads it. A scale per
tensor is the same in all products of a microbatch; it is computed at the first use and reduced then.

    T tokens   I inputs   O outputs   E experts
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nanotrain.kernels.fp8.layer import Fp8Layer, Operand
from nanotrain.kernels.fp8.quantize import Quantized, block_amax, inverse_scales, quantize
from nanotrain.kernels.fp8.scaled_mm import scaled_mm
from nanotrain.kernels.grouped import GroupedMM
from nanotrain.kernels.linear import Linear, Linears, wgrad


class Scales:
    """The scales per tensor of one microbatch in some layers that are multiplied together.

    Args:
        layers: with the same options.
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
        if self._options.reduce_amax is not None and self._layers[0].shares_amax:
            values = list(self._options.reduce_amax(torch.stack(values)))
        for (layer, operand), amax in zip(amaxes, values, strict=True):
            self._inverse[layer, operand] = self._layers[layer].inverse_scales(operand, amax)

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
        linears: with `fp8` set.
        records: whether amaxes count for the history.
    """

    def __init__(self, linears: Sequence[Linear], *, records: bool) -> None:
        super().__init__(linears)
        layers = [linear.fp8 for linear in linears if linear.fp8 is not None]
        assert len(layers) == len(linears), "layers that share an input are all in fp8 or all not"
        self._scales = Scales(layers, records=records)
        self._fp8_wgrad = layers[0].options.wgrad

    def fprop(self, x: Tensor) -> tuple[Tensor, ...]:
        """[..., I] -> one [..., O] per layer."""
        flat, dtype = x.flatten(0, -2), x.dtype
        if not self._scales.has(Operand.INPUT):
            inputs = dict.fromkeys(((i, Operand.INPUT) for i in range(len(self.linears))), _amax(flat))
            weights = {(i, Operand.WEIGHT): _amax(linear.used_weight) for i, linear in enumerate(self.linears)}
            self._scales.set(inputs | weights)
        quantized = self._scales.quantize(flat, Operand.INPUT)
        outputs = []
        for i, linear in enumerate(self.linears):
            weight = self._scales.quantize(linear.used_weight, Operand.WEIGHT, layer=i)
            out = scaled_mm(quantized, weight, dtype=dtype).view(*x.shape[:-1], -1)
            outputs.append(out if linear.used_bias is None else out + linear.used_bias)
        return tuple(outputs)

    def dgrad(self, grads: Sequence[Tensor]) -> Tensor:
        """One [T, O] per layer -> [T, I], their sum."""
        self._scale_grads(grads)
        total: Tensor | None = None
        for i, (grad, linear) in enumerate(zip(grads, self.linears, strict=True)):
            quantized = self._scales.quantize(grad, Operand.GRAD, layer=i)
            weight = self._scales.quantize(linear.used_weight.detach().t(), Operand.WEIGHT, layer=i)
            partial = scaled_mm(quantized, weight, dtype=grad.dtype)
            total = partial if total is None else total.add_(partial)
        assert total is not None, "there is at least one layer"
        return total

    def wgrad(self, grads: Sequence[Tensor], x: Tensor) -> list[Tensor]:
        """One [T, O] per layer, [T, I] -> the gradients of the trained parameters, layer by layer."""
        if not self._fp8_wgrad:
            return super().wgrad(grads, x)
        self._scale_grads(grads)
        x_t, found = self._scales.quantize(x.t(), Operand.INPUT), []
        for i, (grad, linear) in enumerate(zip(grads, self.linears, strict=True)):
            grad_weight = None
            if linear.weight.requires_grad:
                grad_t = self._scales.quantize(grad.t(), Operand.GRAD, layer=i)
                grad_weight = scaled_mm(grad_t, x_t, dtype=grad.dtype)
            found += linear.param_grads(grad, grad_weight)
        return found

    def _scale_grads(self, grads: Sequence[Tensor]) -> None:
        if not self._scales.has(Operand.GRAD):
            self._scales.set({(i, Operand.GRAD): _amax(grad) for i, grad in enumerate(grads)})


class Fp8GroupedMM(GroupedMM):
    """The products of stacked experts, one product per expert; of a microbatch, with the same `offs` in all of them.

    The tokens of an expert are a tensor of their own: a scale per tensor is one per expert.

    Args:
        layer: of the stacked weights.
        records: whether amaxes count for the history; of a microbatch.
    """

    def __init__(self, layer: Fp8Layer, *, records: bool = False) -> None:
        self._layer, self._scales = layer, Scales([layer], records=records)
        self._ends: list[int] | None = None  # `offs` on the host

    def for_microbatch(self) -> "Fp8GroupedMM":
        """New products, with scales of their own."""
        return Fp8GroupedMM(self._layer, records=torch.is_grad_enabled())

    def fprop(self, x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        """[T, I], [E, O, I] -> [T, O]."""
        parts = self._split(x, offs)
        if not self._scales.has(Operand.INPUT):
            amaxes = {Operand.INPUT: _amaxes(parts), Operand.WEIGHT: _amaxes(weight.detach().unbind())}
            self._scales.set({(0, operand): amax for operand, amax in amaxes.items()})
        return self._multiply(parts, weight.unbind(), operand=Operand.INPUT, length=len(x))

    def dgrad(self, grad: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        """[T, O], [E, O, I] -> [T, I]."""
        parts = self._scaled_grads(grad, offs)
        transposed = weight.transpose(1, 2).unbind()
        return self._multiply(parts, transposed, operand=Operand.GRAD, length=len(grad))

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

    def _split(self, x: Tensor, offs: Tensor) -> list[Tensor]:
        """The tokens of each expert; the host waits for `offs` once per microbatch."""
        if self._ends is None:
            self._ends = offs.tolist()
        return [x[start:end] for start, end in zip([0, *self._ends], self._ends, strict=False)]

    def _scaled_grads(self, grad: Tensor, offs: Tensor) -> list[Tensor]:
        parts = self._split(grad, offs)
        if not self._scales.has(Operand.GRAD):
            self._scales.set({(0, Operand.GRAD): _amaxes(parts)})
        return parts

    def _multiply(self, parts: Sequence[Tensor], weights: Sequence[Tensor], *, operand: Operand, length: int) -> Tensor:
        """[t, K] and [N, K] per expert -> [T, N]; rows of dropped tokens are undefined."""
        products = []
        for expert, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            quantized = self._scales.quantize(part, operand, expert=expert)
            quantized_weight = self._scales.quantize(weight, Operand.WEIGHT, expert=expert)
            products.append(scaled_mm(quantized, quantized_weight, dtype=part.dtype))
        num_dropped = length - sum(map(len, parts))
        return torch.cat([*products, products[0].new_empty(num_dropped, products[0].shape[1])])


def _amax(x: Tensor) -> Tensor:
    """[1]."""
    return block_amax(x.detach(), (None, None)).view(1)


def _amaxes(parts: Sequence[Tensor]) -> Tensor:
    """[E]; 0 for an expert without tokens."""
    return torch.stack([_amax(part)[0] if len(part) else part.new_zeros((), dtype=torch.float32) for part in parts])
