"""Global gradient norm and clip factor."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanotrain.comm.collectives import all_reduce
from nanotrain.comm.group import Group
from nanotrain.optim.clip import ROW_NUMEL, clip_factor, squared_norm
from tests.harness import run_ranks


def global_norm(shards, group: Group | None = None) -> float:
    """As the optimizer computes it."""
    squared = squared_norm(shards, device=torch.device("cpu"))
    all_reduce(squared, group or Group.single_rank("dp_shard"))
    return squared.sqrt().item()


def factor_of(norm: float, limit: float) -> float:
    return clip_factor(torch.tensor(norm, dtype=torch.float64), limit).item()


def norm_of_shards(ctx, vector: torch.Tensor) -> float:
    """Norm of a vector that is sharded over the ranks, with two buckets per rank."""
    shard = vector.chunk(ctx.topology.world_size)[ctx.rank]
    return global_norm(shard.tensor_split(2), ctx.group("dp_shard"))


def test_the_norm_of_shards_is_the_global_norm_and_equal_on_every_rank():
    vector = torch.randn(3 * 7001, generator=torch.Generator().manual_seed(0))
    norms = run_ranks(3, norm_of_shards, vector, strategy="optim")
    assert len(set(norms)) == 1
    assert norms[0] == pytest.approx(vector.double().norm().item(), rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_element_that_is_not_finite_shows_on_every_rank(bad):
    vector = torch.ones(3 * 7001)
    vector[15000] = bad
    assert not any(math.isfinite(norm) for norm in run_ranks(3, norm_of_shards, vector, strategy="optim"))


def test_the_norm_of_a_long_shard_keeps_its_digits():
    # torch's own fp32 norm is off by 4e-4 here; a topology with shorter shards would clip otherwise.
    long = torch.randn(10_000_000, generator=torch.Generator().manual_seed(0))
    assert global_norm([long]) == pytest.approx(long.double().norm().item(), rel=1e-7)


@given(st.integers(0, 3 * ROW_NUMEL))
def test_every_element_counts_once_for_any_length(numel):
    assert global_norm([torch.full((numel,), 2.0)]) == pytest.approx(2.0 * math.sqrt(numel))


@given(st.floats(0, 1e6), st.floats(1e-3, 1e3))
def test_a_clipped_norm_is_at_most_the_limit_and_a_small_one_is_left_alone(norm, limit):
    factor = factor_of(norm, limit)
    assert norm * factor <= limit
    assert factor == 1.0 if norm + 1e-6 <= limit else factor < 1.0


def test_the_factor_is_megatrons():
    assert factor_of(4.0, 1.0) == 1.0 / (4.0 + 1e-6)
    assert factor_of(1e9, 0.0) == 1.0  # 0 turns clipping off
