"""The table of update rules, and a rule from outside the package."""

import pytest
import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import OptimConfig, ParallelConfig
from nanotrain.errors import ConfigError
from nanotrain.optim.distributed import DistributedOptimizer
from nanotrain.optim.optimizers import OPTIMIZERS
from nanotrain.optim.rule import UpdateRule, param_groups
from nanotrain.precision.loss_scale import LossScale
from nanotrain.precision.policy import Precision
from nanotrain.topology.topology import Topology
from tests.harness import ranks
from tests.parallel.dp.toys import SHAPES, Toy, backward, pattern_of, wrap


def build_momentum(ranges, config):
    optimizer = torch.optim.SGD(param_groups(ranges, config.weight_decay), lr=config.lr, momentum=0.5)
    for part in ranges:
        optimizer.state[part.main_param] = {"momentum_buffer": part.state["momentum_buffer"]}
    return optimizer


class Centered(torch.optim.Optimizer):
    """Subtracts the gradient less its mean over the matrix: the update of an element depends on all others."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.ndim >= 2:
                    assert param.shape in SHAPES
                    param -= group["lr"] * (param.grad - param.grad.mean())


def build_centered(ranges, config):
    return Centered(param_groups(ranges, config.weight_decay), {"lr": config.lr})


MOMENTUM = UpdateRule(("momentum_buffer",), build_momentum)
CENTERED = UpdateRule((), build_centered, needs_whole_matrix=True)


def optimize(ctx, rule: UpdateRule, monkeypatch, *, strategy: str = "optim") -> tuple[Toy, DistributedOptimizer]:
    """One step of a rule with lr 1, without weight decay and clipping; the gradient is `pattern_of` times the ranks."""
    monkeypatch.setitem(OPTIMIZERS, "from_outside", rule)
    stage = Toy()
    parallel = wrap(ctx, stage, strategy=strategy)
    optimizer = DistributedOptimizer(
        [parallel],
        OptimConfig(optimizer="from_outside", weight_decay=0.0, clip_grad=0.0),
        precision=Precision(params=torch.float32),
        loss_scale=LossScale(1.0, is_dynamic=False, minimum=1.0, window=1, hysteresis=1),
        world=ctx.group("world"),
    )
    for _ in range(2):
        parallel.begin_step()
        backward(parallel, stage(1.0))
        parallel.finish_grad_reduce()
        optimizer.step(lr=1.0)
        parallel.start_param_gather()
    return stage, optimizer


@ranks(2, strategy="optim")
def test_a_rule_from_outside_the_package_trains_and_its_state_is_saved(ctx):
    with pytest.MonkeyPatch.context() as monkeypatch:
        stage, optimizer = optimize(ctx, MOMENTUM, monkeypatch)
    # Two steps with momentum 0.5: the updates are g and 1.5 g,
    for param in stage.parameters():
        assert torch.equal(param, -2.5 * 2 * pattern_of(param))
    # and the state tensors of the rule are those of a checkpoint.
    prefixes = {box.name.removesuffix(".weight").rpartition("/units.")[0] for box in optimizer.state_tensors()}
    assert prefixes == {"model", "optimizer/momentum_buffer"}


def single_rank() -> ParallelContext:
    return ParallelContext.attach(Topology.of(ParallelConfig(), 1))


def test_a_rule_that_needs_the_whole_matrix_gets_every_matrix_in_its_shape(monkeypatch):
    stage, _ = optimize(single_rank(), CENTERED, monkeypatch)
    for param in stage.parameters():
        pattern = pattern_of(param)
        expected = -2 * (pattern - pattern.mean()) if param.ndim >= 2 else torch.zeros(param.shape)
        torch.testing.assert_close(param.detach(), expected)


@ranks(2, strategy="optim")
def test_a_rule_that_needs_the_whole_matrix_refuses_shards_of_one(ctx):
    with pytest.MonkeyPatch.context() as monkeypatch, pytest.raises(ConfigError, match="needs whole matrices"):
        optimize(ctx, CENTERED, monkeypatch)
