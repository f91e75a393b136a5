"""Param ranges with random values, updated by a rule and by torch's optimizer."""

from collections.abc import Callable

import torch
from torch import Tensor

from nanotrain.config.config import OptimConfig
from nanotrain.optim.rule import ParamRange, UpdateRule, UpdateStep

LR, DECOUPLED_LR = 1e-2, 3e-3


def param_range(
    values: Tensor,
    names: tuple[str, ...],
    *,
    decays: bool = True,
    is_decoupled: bool = False,
    grad: Tensor | None = None,
) -> ParamRange:
    weight = values.clone()
    state = {name: torch.zeros_like(weight) for name in names}
    return ParamRange(
        weight, torch.zeros_like(weight) if grad is None else grad, state, decays, is_decoupled
    )


def step_of(config: OptimConfig, number: int) -> UpdateStep:
    return UpdateStep(
        config,
        torch.tensor(float(number)),
        LR,
        DECOUPLED_LR,
        config.weight_decay,
        found_inf=torch.tensor(0.0),
    )


def follow_torch(
    rule: UpdateRule, config: OptimConfig, build: Callable[..., torch.optim.Optimizer]
) -> None:
    """Four steps of a rule on four ranges, each compared with a torch optimizer `build(param, lr=,
    weight_decay=)`.
    """
    start = torch.randn(300, generator=torch.Generator().manual_seed(0))
    names = rule.state_names(config)
    kinds = [(True, False), (False, False), (True, True), (False, True)]
    pieces = start.split([100, 50, 70, 80])
    ranges = [
        param_range(piece, names, decays=decays, is_decoupled=decoupled)
        for piece, (decays, decoupled) in zip(pieces, kinds, strict=True)
    ]
    references = []
    for piece, (decays, decoupled) in zip(pieces, kinds, strict=True):
        param = torch.nn.Parameter(piece.clone())
        group = {
            "lr": DECOUPLED_LR if decoupled else LR,
            "weight_decay": config.weight_decay if decays else 0.0,
        }
        references.append((param, build(param, **group)))
    for number in range(1, 5):
        grads = torch.randn(300, generator=torch.Generator().manual_seed(number)).split(
            [100, 50, 70, 80]
        )
        for part, (param, optimizer), grad in zip(ranges, references, grads, strict=True):
            part.grad.copy_(grad)
            param.grad = grad.clone()
            optimizer.step()
        rule.update(ranges, step_of(config, number))
    for part, (param, optimizer) in zip(ranges, references, strict=True):
        torch.testing.assert_close(part.main_param, param.detach(), rtol=1e-6, atol=1e-7)
        for name in names:
            torch.testing.assert_close(
                part.state[name], optimizer.state[param][name], rtol=1e-6, atol=1e-7
            )
