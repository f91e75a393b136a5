"""Factors that keep the norm of a matrix, from products that ranks sum."""

import pytest
import torch

from nanotrain.comm.group import Group
from nanotrain.config.config import OptimConfig
from nanotrain.optim.fixed_norm import FixedNorms
from nanotrain.optim.matrices import Coordinate, OwnedMatrix, matrices_of
from nanotrain.optim.matrix_routes import GridGroups
from nanotrain.optim.rule import UpdateStep
from tests.harness import run_ranks
from tests.optim.test_matrices import SPEC, local

LR = 0.1
FULL = torch.randn(24, generator=torch.Generator().manual_seed(1))
UPDATE = torch.randn(24, generator=torch.Generator().manual_seed(2))


def step_of(found_inf: float = 0.0) -> UpdateStep:
    return UpdateStep(
        OptimConfig(),
        number=torch.tensor(1.0),
        lr=LR,
        decoupled_lr=LR,
        weight_decay=0.1,
        found_inf=torch.tensor(found_inf),
    )


def norms_of(shard: Group, tensor: Group, *, owner: Coordinate, radius: float = 0.0) -> FixedNorms:
    (matrix,) = matrices_of(local(SPEC), splits_tensors=True)
    groups = GridGroups(Group.single_rank("dp_replicate", 0), shard, tensor)
    assert matrix.sharded_dim is None
    return FixedNorms(
        [OwnedMatrix(matrix, 0, {}, owner, 1)], groups, radius=torch.full((1,), radius)
    )


def single_rank(radius: float = 0.0) -> FixedNorms:
    single = Group.single_rank("dp_shard", 0)
    return norms_of(single, Group.single_rank("tp", 0), owner=Coordinate(0, 0, 0), radius=radius)


def test_the_first_norm_is_kept() -> None:
    norms = single_rank()
    weights = FULL.clone()
    for _ in range(3):
        norms.add(0, weights[:10], update=UPDATE[:10])
        norms.add(0, weights[10:], update=UPDATE[10:])
        factors = norms.factors(step_of())
        moved = weights - factors.update[0].float() * UPDATE
        length = (moved - weights).norm().item()
        assert length == pytest.approx(LR * FULL.norm().item(), rel=1e-5)
        weights = factors.weight[0].float() * moved
        assert weights.norm().item() == pytest.approx(FULL.norm().item(), rel=1e-6)


def test_a_loaded_norm_is_that_of_the_run() -> None:
    norms = single_rank(radius=2.0)
    norms.add(0, FULL, update=UPDATE)
    factors = norms.factors(step_of())
    weights = factors.weight[0].float() * (FULL - factors.update[0].float() * UPDATE)
    assert weights.norm().item() == pytest.approx(2.0, rel=1e-6)


def test_zeros_and_skipped_steps_change_nothing() -> None:
    norms = single_rank()
    norms.add(0, FULL, update=torch.zeros(24))
    factors = norms.factors(step_of())
    assert factors.weight.item() == pytest.approx(1.0, rel=1e-6)
    norms.add(0, FULL, update=UPDATE)
    skipped = norms.factors(step_of(found_inf=1.0))
    assert skipped.update.item() == 0.0 and skipped.weight.item() == 1.0
    zeros = single_rank()
    zeros.add(0, torch.zeros(24), update=UPDATE)
    assert zeros.factors(step_of()).update.item() == 0.0


def factors_here(ctx) -> tuple[float, float, float]:
    """Half of the elements on each data-parallel rank; both tensor-parallel ranks have all rows."""
    tensor = ctx.group("tp")
    shard = ctx.group("dp_shard")
    norms = norms_of(shard, tensor, owner=Coordinate(0, 0, 1))
    half = slice(0, 12) if shard.index == 0 else slice(12, 24)
    norms.add(0, FULL[half], update=UPDATE[half])
    factors = norms.factors(step_of())
    return factors.update.item(), factors.weight.item(), norms.radius.item()


def test_shards_are_summed_and_replicas_counted_once() -> None:
    norms = single_rank()
    norms.add(0, FULL, update=UPDATE)
    expected = norms.factors(step_of())
    results = run_ranks(4, factors_here, tp=2, strategy="optim", shares=True)
    assert len(set(results)) == 1
    # the factors do not depend on how often replicas count, the norm that is saved does
    radius = FULL.norm().item()
    assert results[0] == pytest.approx((expected.update.item(), expected.weight.item(), radius))
