"""One layer of attention, or of what is in its place, in fp64 with random weights."""

from typing import Any

import torch
from torch import Tensor, nn

from nanotrain.config.model import ModelConfig
from nanotrain.model.context import ModelParallel
from nanotrain.model.parameters import Parameters
from nanotrain.model.sublayers import build_mixer
from nanotrain.spec.declaration import Declaration
from nanotrain.spec.kinds import MIXERS
from nanotrain.spec.shape import ModelShape


def random_mixer(model_config: ModelConfig, *, std: float = 0.3) -> Any:
    """The layer 0 of a model on one rank."""
    shape, draw = ModelShape.of(model_config), torch.Generator().manual_seed(5)
    kind, _ = shape.kinds(0)
    assert kind is not None
    specs = MIXERS[kind].declare(Declaration(shape, "fp32"))
    weights = {spec.name: torch.empty(spec.shape, dtype=torch.float64) for spec in specs}
    params = Parameters(
        {name: nn.Parameter(x.normal_(0, std, generator=draw)) for name, x in weights.items()}
    )
    return build_mixer(model_config, params, parallel=ModelParallel.single_rank(), layer=0)


def random_hidden(batch: int, length: int, width: int) -> Tensor:
    """[B, S, H] in fp64."""
    draw = torch.Generator().manual_seed(6)
    return torch.randn(batch, length, width, dtype=torch.float64, generator=draw).requires_grad_()


def backward(out: Tensor, hidden: Tensor, module: nn.Module) -> list[Tensor]:
    """The output, and the gradients of the input and of the parameters in order for a random
    gradient of the output.
    """
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(7))
    return [out, *torch.autograd.grad(out, [hidden, *module.parameters()], grad)]


def assert_near(found: list[Tensor], expected: list[Tensor], *, tolerance: float = 1e-10) -> None:
    """Assert that tensors differ by little, relative to the largest number of each."""
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.shape == b.shape, index
        difference = ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item()
        assert difference <= tolerance, f"{index}: {difference:.1e}"
