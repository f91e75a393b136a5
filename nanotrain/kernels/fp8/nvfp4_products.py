"""NVFP4 products of linear layers and of stacked experts.

    fprop    x [T, I] in 1 x 16             W [O, I] in 16 x 16
    dgrad    dy [T, O] in 1 x 16, rounded   W^T [I, O], the values of fprop
             stochastically
    wgrad    H dy^T [O, T] in 1 x 16,       H x^T [I, T] in 1 x 16
             rounded stochastically

H is the random Hadamard transform of 16 consecutive tokens. Every operand is quantized from its
value in the dtype of the activations. Tensor scales follow from amaxes over the ranks that share a
tensor, one collective per layer and direction: a layout has the scales of one rank.

    Nvfp4Linears      layers that share an input
    Nvfp4LoopedMM     experts, one product per expert; the host waits for `offs`; without Triton
    select_linears    the class of the products of a recipe

    T tokens   I inputs   O outputs   E experts
"""

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from nanotrain.kernels.fp8 import nvfp4
from nanotrain.kernels.fp8.layer import Fp8Layer, Fp8Options
from nanotrain.kernels.fp8.nvfp4 import Nvfp4, PackedNvfp4, matrix_amax
from nanotrain.kernels.fp8.nvfp4_mm import nvfp4_mm
from nanotrain.kernels.fp8.products import Fp8Linears
from nanotrain.kernels.fp8.rounding import (
    ElementWords,
    RoundedFor,
    element_words,
    numbered_words,
    row_words,
)
from nanotrain.kernels.grouped import GroupedMM, tokens_of_experts
from nanotrain.kernels.linear import GradView, Linear, Linears, add_cast, grad_view_of, wgrad

Operand = Nvfp4 | PackedNvfp4  # a quantized matrix, from torch's operators or from kernels


def select_linears(options: Fp8Options | None) -> type[Linears]:
    """The class of the products of layers with these options; None is without fp8."""
    if options is None:
        return Linears
    return Nvfp4Linears if options.recipe.is_two_level else Fp8Linears


class Nvfp4Linears(Linears):
    """The products of layers that share an input, for one microbatch.

    Args:
        linears: linear layers with `fp8` set, in a recipe with two levels of scales.
    """

    def __init__(self, linears: Sequence[Linear], *, records: bool = False) -> None:
        super().__init__(linears)
        self._layers = [linear.fp8 for linear in linears if linear.fp8 is not None]
        assert len(self._layers) == len(linears), "layers that share an input all use fp8"
        self._options = self._layers[0].options
        self._tokens = self._options.rounding.tokens  # of this microbatch
        self._casts = select_casts(self._options)
        # [] amaxes over all ranks: the transformed input, weights, gradients and their transformed
        # forms
        self._x_t_amax = torch.empty(())
        self._weight_amaxes: Sequence[Tensor] = ()
        self._grad_amaxes: Sequence[tuple[Tensor, Tensor]] = ()

    def fprop(self, x: Tensor) -> tuple[Tensor, ...]:
        """[..., I] -> one [..., O] per layer."""
        flat = x.flatten(0, -2)
        weights = self.weights
        local = [*self._casts.tensor_amaxes(flat), *map(matrix_amax, weights)]
        x_amax, self._x_t_amax, *self._weight_amaxes = shared_amaxes(local, self._options)
        block = self._options.recipe.block
        quantized = self._casts.cast_rows(flat, x_amax, block=block)
        outputs = []
        for i, linear in enumerate(self.linears):
            product = nvfp4_mm(quantized, self._weight(i), dtype=x.dtype)
            out = product.view(*x.shape[:-1], -1)
            if linear.used_bias is not None:
                out = out + linear.used_bias
            outputs.append(out)
        return tuple(outputs)

    def dgrad(self, grads: Sequence[Tensor]) -> Tensor:
        """One [T, O] per layer -> [T, I], their sum."""
        self._measure(grads)
        total: Tensor | None = None
        for i, grad in enumerate(grads):
            words = self._words(i, grad, rounded_for=RoundedFor.DGRAD)
            block = self._options.recipe.block
            amax, _ = self._grad_amaxes[i]
            quantized = self._casts.cast_rows(grad, amax, block=block, words=words)
            partial = nvfp4_mm(quantized, self._weight(i, transposed=True), dtype=grad.dtype)
            total = partial if total is None else total.add_(partial)
        assert total is not None, "there is at least one layer"
        return total

    def wgrad(self, grads: Sequence[Tensor], x: Tensor) -> list[Tensor | None]:
        """One [T, O] per layer, [T, I] -> the gradients of the trained parameters.

        None for a gradient that was written where it is accumulated.
        """
        if not self._options.wgrad:
            return super().wgrad(grads, x)
        self._measure(grads)
        x_t = self._casts.cast_columns(x, self._x_t_amax)
        gradients: list[Tensor | None] = []
        for i, (grad, linear) in enumerate(zip(grads, self.linears, strict=True)):
            grad_weight = None
            if linear.weight.requires_grad:
                words = self._words(i, grad, rounded_for=RoundedFor.WGRAD)
                _, amax = self._grad_amaxes[i]
                grad_t = self._casts.cast_columns(grad, amax, words=words)
                grad_weight = _wgrad(linear, (grad_t, x_t), dtype=grad.dtype)
            gradients += linear.param_grads(grad, grad_weight)
        return gradients

    def _measure(self, grads: Sequence[Tensor]) -> None:
        """Measure the gradients and their transformed forms, once per microbatch."""
        if self._grad_amaxes:
            return
        local: list[Tensor] = []
        for grad in grads:
            local += self._casts.tensor_amaxes(grad)
        amaxes = shared_amaxes(local, self._options)
        self._grad_amaxes = list(zip(amaxes[::2], amaxes[1::2], strict=True))

    def _weight(self, layer: int, *, transposed: bool = False) -> Operand:
        """The quantized weight [O, I] or [I, O]; both have the same values."""
        weight = self.weights[layer]
        matrix = weight.t() if transposed else weight
        block = self._options.recipe.weight_block
        quantized: Operand = self._casts.cast_rows(matrix, self._weight_amaxes[layer], block=block)
        return quantized

    def _words(self, layer: int, grad: Tensor, *, rounded_for: RoundedFor) -> ElementWords:
        """The random words of the gradient [T, O] of a layer."""
        rows = row_words(len(grad), self._tokens, device=grad.device)
        key = self._layers[layer].key
        return element_words(rows, key=key, rounded_for=rounded_for)


def select_casts(options: Fp8Options) -> Any:
    """The module with the casts of operands: Triton kernels, or torch's operators."""
    if not options.is_fused:
        return nvfp4
    from nanotrain.kernels.fp8 import triton_nvfp4  # imports Triton

    return triton_nvfp4


def shared_amaxes(amaxes: Sequence[Tensor], options: Fp8Options) -> Sequence[Tensor]:
    """The largest of each [] amax over the ranks that share the tensor."""
    if options.reduce_amax is None:
        return amaxes
    reduced: Tensor = options.reduce_amax(torch.stack(list(amaxes))[:, None])
    return reduced.flatten().unbind()


def _wgrad(
    linear: Linear, operands: tuple[Operand, Operand], *, dtype: torch.dtype
) -> Tensor | None:
    """dW = grad_t x_t^T [O, I], or None where it was written."""
    view = grad_view_of(linear.weight) if linear.writes_wgrad else None
    target = None if view is None else view.start_write()
    if target is None:
        return nvfp4_mm(*operands, dtype=dtype)
    out, has_grads = target
    _write(nvfp4_mm(*operands, dtype=out.dtype), out=out, adds=has_grads)
    return None


def _write(product: Tensor, *, out: Tensor, adds: bool) -> None:
    """Write a product to a gradient buffer, or add it."""
    if adds:
        add_cast(out, product)
    else:
        out.copy_(product)


class Nvfp4LoopedMM(GroupedMM):
    """The products of stacked experts for one microbatch, expert by expert.

    The tokens of an expert count as one tensor. All products of a microbatch have the same `offs`.

    Args:
        layer: options and random words of the stacked weights.
    """

    def __init__(self, layer: Fp8Layer) -> None:
        self._layer = layer
        self._options = layer.options
        self._tokens = layer.options.rounding.tokens
        self._casts = select_casts(layer.options)
        self._matrix_ends: list[int] | None = None  # `offs` on the host
        # [E] amaxes over all ranks; [2, E] of gradients and their transformed forms
        self._weight_amax = torch.empty(0)
        self._x_t_amax = torch.empty(0)
        self._grad_amax: Tensor | None = None

    def for_microbatch(self) -> Self:
        """New products, with separate scales."""
        return type(self)(self._layer)

    def fprop(self, x: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        """[T, I], [E, O, I] -> [T, O]."""
        parts = self._split(x, offs)
        weights = weight.detach()
        weight_amax = torch.stack([matrix_amax(matrix) for matrix in weights])
        local = torch.cat([self._amaxes(parts), weight_amax[None]])
        x_amax, self._x_t_amax, self._weight_amax = self._shared(local)
        block = self._options.recipe.block
        quantized = []
        for part, amax in zip(parts, x_amax, strict=True):
            quantized.append(self._casts.cast_rows(part, amax, block=block))
        return self._multiply(quantized, weights, like=x)

    def dgrad(self, grad: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
        """[T, O], [E, O, I] -> [T, I]."""
        parts = self._split(grad, offs)
        grad_amax, _ = self._measure(parts)
        words = self._words(parts, RoundedFor.DGRAD)
        block = self._options.recipe.block
        quantized = []
        for part, amax, part_words in zip(parts, grad_amax, words, strict=True):
            cast = self._casts.cast_rows(part, amax, block=block, words=part_words)
            quantized.append(cast)
        return self._multiply(quantized, weight.detach().mT, like=grad)

    def wgrad(self, grad: Tensor, x: Tensor, *, offs: Tensor) -> Tensor:
        """[T, O], [T, I] -> [E, O, I]."""
        return torch.stack(self._wgrads(grad, x, offs=offs, dtype=grad.dtype))

    def accumulate_wgrad(self, grad: Tensor, x: Tensor, *, offs: Tensor, view: GradView) -> bool:
        """See `GroupedMM`; products are added to the buffer expert by expert."""
        target = view.start_write()
        if target is None:
            return False
        buffer, has_grads = target
        products = self._wgrads(grad, x, offs=offs, dtype=buffer.dtype)
        for out, product in zip(buffer, products, strict=True):
            _write(product, out=out, adds=has_grads)
        return True

    def _wgrads(self, grad: Tensor, x: Tensor, *, offs: Tensor, dtype: torch.dtype) -> list[Tensor]:
        """The weight gradient [O, I] of each expert."""
        grads = self._split(grad, offs)
        inputs = self._split(x, offs)
        if not self._options.wgrad:
            return [wgrad(*pair).to(dtype) for pair in zip(grads, inputs, strict=True)]
        _, grad_amax = self._measure(grads)
        words = self._words(grads, RoundedFor.WGRAD)
        products = []
        for expert, (expert_grad, expert_x) in enumerate(zip(grads, inputs, strict=True)):
            amax = grad_amax[expert]
            grad_t = self._casts.cast_columns(expert_grad, amax, words=words[expert])
            x_t = self._casts.cast_columns(expert_x, self._x_t_amax[expert])
            products.append(nvfp4_mm(grad_t, x_t, dtype=dtype))
        return products

    def _measure(self, grads: Sequence[Tensor]) -> Tensor:
        """[2, E], amaxes of the gradients and their transformed forms, once per microbatch."""
        if self._grad_amax is None:
            self._grad_amax = self._shared(self._amaxes(grads))
        return self._grad_amax

    def _amaxes(self, parts: Iterable[Tensor]) -> Tensor:
        """[2, E], amaxes of the matrix of each expert and of its transformed form."""
        return torch.stack([self._casts.tensor_amaxes(part) for part in parts], dim=1)

    def _shared(self, local: Tensor) -> Tensor:
        """[n, E], the largest amaxes over the ranks that share an expert or its tokens."""
        reduce_amax = self._options.reduce_amax
        return local if reduce_amax is None else reduce_amax(local)

    def _multiply(self, parts: Sequence[Operand], matrices: Tensor, *, like: Tensor) -> Tensor:
        """[t, K] per expert, [E, N, K] -> [T, N]; rows of dropped tokens are undefined."""
        block = self._options.recipe.weight_block
        products = []
        for part, matrix, amax in zip(parts, matrices, self._weight_amax, strict=True):
            quantized = self._casts.cast_rows(matrix, amax, block=block)
            products.append(nvfp4_mm(part, quantized, dtype=like.dtype))
        num_dropped = len(like) - sum(len(product) for product in products)
        dropped = like.new_empty(num_dropped, products[0].shape[1])
        return torch.cat([*products, dropped])

    def _split(self, x: Tensor, offs: Tensor) -> list[Tensor]:
        """The tokens of each expert; the host waits for the copy of `offs`."""
        if self._matrix_ends is None:
            self._matrix_ends = offs.tolist()
        return [x[tokens] for tokens in tokens_of_experts(self._matrix_ends)]

    def _words(self, grads: Sequence[Tensor], rounded_for: RoundedFor) -> list[ElementWords]:
        """The random words of the gradient of each expert."""
        sizes = [len(grad) for grad in grads]
        rows = numbered_words(sum(sizes), self._tokens, device=grads[0].device)
        words = element_words(rows, key=self._layer.key, rounded_for=rounded_for)
        return words.split(sizes)
