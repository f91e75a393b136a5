"""Update rules of hidden matrices, written out in fp64 from the formulas of their papers.

A reference has all matrices in full; a stack of experts is several of them. Vectors follow AdamW.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nanotrain.config.config import OptimConfig
from tests.harness import run_ranks
from tests.optim.test_distributed import LR, Trainee, grads_of, noise

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_STEPS = 5
SHAPES = ((12, 19), (13,), (18, 7), (3, 5, 6), (6, 40))


def orthogonalize(matrix: Tensor) -> Tensor:
    """The iteration of Jordan et al. as a polynomial of the singular values, fp64."""
    u, values, v = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
    a, b, c = COEFFICIENTS
    for _ in range(NUM_STEPS):
        values = a * values + b * values**3 + c * values**5
    return u @ torch.diag(values) @ v


# (weights, gradient, state, number of the step from 1) -> weights; all fp64
MatrixStep = Callable[[Tensor, Tensor, dict[str, Tensor], int], Tensor]


class FullReference:
    """Matrices by a function of their formulas, vectors by AdamW."""

    def __init__(self, step: MatrixStep, config: OptimConfig, shapes=SHAPES) -> None:
        self.step_of_a_matrix = step
        self.config = config
        self.weights: dict[str, Tensor] = {}
        for index, shape in enumerate(shapes):
            self.weights[f"units.{index}.weight"] = noise(shape, seed=index).double()
        self.state: dict[tuple[str, int], dict[str, Tensor]] = {}

    def step(self, grads: dict[str, Tensor], number: int) -> None:
        for name, weight in self.weights.items():
            grad = grads[name].double()
            if weight.ndim == 1:
                self._adam(weight, grad, self.state.setdefault((name, 0), {}), number)
                continue
            matrices = [weight] if weight.ndim == 2 else list(weight)
            grads_of_matrices = [grad] if weight.ndim == 2 else list(grad)
            for index, (matrix, part) in enumerate(zip(matrices, grads_of_matrices, strict=True)):
                state = self.state.setdefault((name, index), {})
                matrix.copy_(self.step_of_a_matrix(matrix.clone(), part, state, number))

    def _adam(self, weight: Tensor, grad: Tensor, state: dict[str, Tensor], number: int) -> None:
        weight -= LR * adam_direction(grad, state, number, self.config)


def momentum_of(grad: Tensor, state: dict[str, Tensor], config: OptimConfig) -> Tensor:
    """Update the momentum; returns the direction."""
    beta = config.muon_momentum
    momentum = beta * state.get("momentum", torch.zeros_like(grad)) + (1 - beta) * grad
    state["momentum"] = momentum
    if config.muon_use_nesterov:
        return beta * momentum + (1 - beta) * grad
    return momentum


def adam_direction(
    grad: Tensor, state: dict[str, Tensor], number: int, config: OptimConfig
) -> Tensor:
    """Adam's update without the learning rate (Kingma & Ba 2015, algorithm 1)."""
    beta1, beta2 = config.adam_beta1, config.adam_beta2
    first = beta1 * state.get("first", torch.zeros_like(grad)) + (1 - beta1) * grad
    second = beta2 * state.get("second", torch.zeros_like(grad)) + (1 - beta2) * grad.square()
    state["first"] = first
    state["second"] = second
    unbiased = first / (1 - beta1**number)
    return unbiased / ((second / (1 - beta2**number)).sqrt() + config.adam_eps)


def follow(ctx, config: OptimConfig, step: MatrixStep, options: dict, steps: int = 4) -> None:
    """Train on the ranks of `ctx` and compare the weights with the formulas."""
    trainee = Trainee(ctx, "optim", config=config, shapes=SHAPES, **options)
    reference = FullReference(step, config)
    for number in range(steps):
        trainee.step(grads_of(ctx.rank, number, shapes=SHAPES))
        of_ranks = [
            grads_of(rank, number, shapes=SHAPES) for rank in range(ctx.topology.world_size)
        ]
        total = {name: sum(grads[name] for grads in of_ranks) for name in of_ranks[0]}
        reference.step(total, number + 1)
    for name, weight in trainee.weights().items():
        expected = reference.weights[name]
        # fp32 beside fp64: the iteration multiplies roundings of small singular values
        distance = (weight.double() - expected).norm() / expected.norm()
        assert distance < 2e-6, f"{name} is off by {distance}"
        changed = (expected - noise(weight.shape, seed=int(name[6])).double()).norm()
        assert changed > 1e-3 * expected.norm(), f"{name} has hardly moved"


def assert_follows(num_ranks: int, config: OptimConfig, step: MatrixStep, **options) -> None:
    """`follow` on so many data-parallel ranks, with sharded state."""
    run_ranks(num_ranks, follow, config, step, options, strategy="optim", shares=True)
