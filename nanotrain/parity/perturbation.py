"""`Perturbation`: a run whose numbers differ by rounding alone, as a measure of what rounding does.

    size_of        the largest error of one rounding, relative
    Perturbation   changes every input of a layer, and its gradient, by that size
    Deviation      how far a tensor is from that of one rank
    Noise          what several perturbed runs change: the unit of other differences

Layouts add the same numbers in another order, so in 16 and 8 bits they differ by roundings that
grow through the layers: no bound fits every model. One rank that is trained again with inputs
changed in the last bit shows how far roundings move each gradient of this model; what a layout
changes more is no rounding (TTrace, Jiang et al. 2025, arXiv 2506.09280, section 4).

    x -- [x (1 +- size)] -- module -->        the sign is random, for each element
    dx <-[dx (1 +- size)]-- module <--
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from nanotrain.config.config import PrecisionConfig
from nanotrain.precision.dtypes import TORCH_DTYPES
from nanotrain.precision.fp8 import E2M1, FORMATS

# Relative differences below it can come from fp32 sums, without a perturbation.
FLOOR = 1e-6
E2M1_EPS = 0.5  # distance from 1 to the next larger number; torch.finfo has no 4-bit dtypes


def size_of(precision: PrecisionConfig) -> float:
    """The largest relative error of one rounding to the dtype of the matrix products.

    >>> size_of(PrecisionConfig(params_dtype="bf16")) == 2**-8
    True
    """
    if precision.fp8 is None:
        return torch.finfo(TORCH_DTYPES[precision.params_dtype]).eps / 2
    dtype = FORMATS[precision.fp8.format].forward
    if dtype is E2M1:
        return E2M1_EPS / 2
    return torch.finfo(dtype).eps / 2


@dataclass(frozen=True)
class Perturbation:
    """Changes of the inputs of layers in their last bit.

    Args:
        size: relative change of an element.
        seed: seed of the signs.
    """

    size: float
    seed: int

    def attach(self, stages: Iterable[nn.Module]) -> None:
        """Perturb the input of every module of some stages that takes hidden states."""
        generator = torch.Generator().manual_seed(self.seed)

        def perturb(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if not args or not _is_hidden(args[0]):
                return None
            return (_Perturb.apply(args[0], self.size, generator), *args[1:])

        for stage in stages:
            for module in stage.modules():
                if module is not stage and not isinstance(module, nn.Identity):
                    module.register_forward_pre_hook(perturb)


def _is_hidden(value: object) -> bool:
    """Whether an argument of a module is a tensor of hidden states."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1


class _Perturb(torch.autograd.Function):
    """x (1 +- size), and the same for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: float, generator: torch.Generator) -> Tensor:
        """[...] -> [...]."""
        ctx.size = size
        ctx.generator = generator
        return _change_last_bit(x, size=size, generator=generator)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """[...] -> [...]."""
        return _change_last_bit(grads[0], size=ctx.size, generator=ctx.generator), None, None


def _change_last_bit(x: Tensor, *, size: float, generator: torch.Generator) -> Tensor:
    """Every element larger or smaller by `size`, at random, rounded to its dtype."""
    signs = torch.randint(0, 2, x.shape, generator=generator).float() * 2 - 1
    return (x.float() * (1 + size * signs)).to(x.dtype)


@dataclass(frozen=True)
class Deviation:
    """The distance of a tensor from the same tensor of one rank."""

    norm: float  # 2-norm of the difference, relative to the tensor's
    # part of the difference along the tensor, relative too: a factor of 1.1 is 0.1. Roundings
    # cancel in this sum, a wrong divisor does not.
    along: float

    @classmethod
    def between(cls, difference: Tensor, reference: Tensor, *, least: float = 0.0) -> "Deviation":
        """The deviation of `reference + difference`; `least`: smallest norm to be relative to."""
        norm = max(reference.norm().item(), least)
        if not norm:
            return cls(*((inf, inf) if difference.any() else (0.0, 0.0)))
        along = (difference.double() * reference.double()).sum().item() / norm**2
        deviation = cls(difference.norm().item() / norm, abs(along))
        return deviation if isfinite(deviation.norm) else cls(inf, inf)


@dataclass(frozen=True)
class Noise:
    """The largest changes of one number or tensor in several perturbed runs."""

    norm: float
    along: float

    @classmethod
    def of(cls, deviations: Sequence[Deviation]) -> "Noise":
        """The largest of several deviations, at least the rounding of fp32."""
        return cls(
            max(FLOOR, *(deviation.norm for deviation in deviations)),
            max(FLOOR, *(deviation.along for deviation in deviations)),
        )

    def factor(self, deviation: Deviation) -> float:
        """A deviation in units of the noise, by the measure that shows it most."""
        return max(deviation.norm / self.norm, deviation.along / self.along)
