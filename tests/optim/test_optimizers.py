"""The table of update rules, and rules from outside the package."""

import torch

from nanotrain.config.config import OptimConfig, PrecisionConfig
from nanotrain.optim import OPTIMIZERS
from nanotrain.optim.distributed import DistributedOptimizer
from nanotrain.optim.rule import MatrixRule, UpdateRule
from nanotrain.precision.dtypes import Precision
from nanotrain.precision.loss_scale import LossScale
from tests.harness import ranks
from tests.parallel.dp.toys import RESIDENT_STRATEGIES, SHAPES, Toy, backward, pattern_of, wrap


def add_momentum(ranges, step):
    for part in ranges:
        part.state["momentum_buffer"].mul_(0.5).add_(part.grad)
        part.main_param.sub_(part.state["momentum_buffer"], alpha=step.lr_of(part))


def center(matrix, config):
    """Subtract the mean of the matrix: the result of an element depends on all others."""
    assert tuple(matrix.shape) in {*SHAPES, (5, 5)}
    return matrix - matrix.mean()


MOMENTUM = UpdateRule(lambda config: ("momentum_buffer",), add_momentum)
CENTERED = UpdateRule(
    lambda config: (),
    lambda ranges, step: None,
    MatrixRule(
        state_names=(),
        direction=lambda part, config: part.grad,
        transform=center,
        scale=lambda shape, config: 2.0,
        flops=lambda shape, config: shape[0] * shape[1],
        dtype=lambda config: torch.float32,
    ),
)


def optimize(ctx, rule: UpdateRule, *, strategy: str = "optim") -> tuple[Toy, DistributedOptimizer]:
    """Two steps of a rule with lr 1, without weight decay and clipping; gradients are `pattern_of`
    times the ranks.
    """
    # never taken back: the other ranks are threads of this process
    OPTIMIZERS["from_outside"] = rule
    stage = Toy()
    parallel = wrap(ctx, stage, strategy=strategy)
    optimizer = DistributedOptimizer(
        [parallel],
        OptimConfig(optimizer="from_outside", weight_decay=0.0, clip_grad=0.0),
        precision=Precision(params=torch.float32),
        loss_scale=LossScale(PrecisionConfig()),
        groups=ctx.groups,
    )
    for _ in range(2):
        parallel.begin_step()
        backward(parallel, stage(1.0))
        parallel.finish_grad_reduce()
        optimizer.step(lr=1.0)
        parallel.start_param_gather()
    return stage, optimizer


@ranks(2, strategy="optim", shares=True)
def test_a_rule_from_outside_the_package_trains_and_its_state_is_saved(ctx):
    stage, optimizer = optimize(ctx, MOMENTUM)
    # Two steps with momentum 0.5: the updates are g and 1.5 g,
    for param in stage.parameters():
        assert torch.equal(param, -2.5 * 2 * pattern_of(param))
    # and the state tensors of the rule are those of a checkpoint.
    prefixes = {
        box.name.removesuffix(".weight").rpartition("/units.")[0]
        for box in optimizer.state_tensors()
    }
    assert prefixes == {"model", "optimizer/momentum_buffer"}


@ranks(3, strategy="optim", shares=True)
def test_a_rule_for_matrices_gets_every_matrix_in_its_shape_on_one_rank(ctx):
    for strategy in RESIDENT_STRATEGIES:
        stage, optimizer = optimize(ctx, CENTERED, strategy=strategy)
        (balance,) = optimizer.matrix_balances
        assert balance.startswith("8 matrices over 3 ranks, 1 to ")
        for param in stage.parameters():
            # scale 2, two steps, three ranks; the stack has one mean per matrix
            pattern = 3 * pattern_of(param)
            expected = (
                -2 * 2 * (pattern - pattern.mean(dim=(-2, -1), keepdim=True))
                if param.ndim > 1
                else 0 * pattern
            )
            torch.testing.assert_close(param.detach(), expected, rtol=1e-5, atol=1e-4)
