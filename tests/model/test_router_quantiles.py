"""Quantile balancing beside its formulas: equations 13 and 14 of the report of Kimi K3, in fp64."""

import pytest
import torch
from torch import Tensor

from nanotrain.config.model import MoEConfig
from nanotrain.model.router_quantiles import RequiredBias, bin_range, quantile_bias

E, K, TOKENS = 6, 2, 900


def moe(num_bins: int = 1000) -> MoEConfig:
    return MoEConfig(num_experts=E, router_topk=K, router_qb_num_bins=num_bins)


def scores_of(seed: int) -> Tensor:
    """[1, tokens, E] sigmoid scores, of which some experts get more than others."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, TOKENS, E, generator=draw) + torch.linspace(-1.0, 1.0, E)
    return logits.sigmoid()


def exact_bias(scores: Tensor, bias: Tensor) -> Tensor:
    """The K/E quantile over tokens of the bias that every expert would need."""
    scores = scores[0].double()
    biased = scores + bias.double()
    cutoff = biased.sort(dim=1, descending=True).values[:, K]
    required = cutoff[:, None] - scores
    quantiles = torch.quantile(required, K / E, dim=0)
    return quantiles - quantiles.mean()


def loads(scores: Tensor, bias: Tensor) -> Tensor:
    chosen = (scores[0] + bias).topk(K, dim=1).indices
    return torch.bincount(chosen.flatten(), minlength=E).double()


@pytest.mark.parametrize("start", [0.0, 0.3])
def test_the_bias_is_the_quantile_within_a_bin(start: float) -> None:
    scores = scores_of(0)
    bias = start * torch.linspace(1.0, -1.0, E)
    counter = RequiredBias(moe())
    counter.count(scores[:, :300], bias)
    counter.count(scores[:, 300:], bias)
    assert counter.counts.sum() == TOKENS * E
    found = quantile_bias(counter.counts, bias, fraction=K / E)
    _, width = bin_range(bias, 1000)
    # the quantile of a sample, an order statistic, is within a gap of the interpolated one
    assert (found - exact_bias(scores, bias)).abs().max() < width + 0.01
    assert found.mean().abs() < 1e-12


def test_more_bins_come_nearer() -> None:
    scores = scores_of(1)
    bias = torch.zeros(E)
    errors = []
    for num_bins in (20, 2000):
        counter = RequiredBias(moe(num_bins))
        counter.count(scores, bias)
        found = quantile_bias(counter.counts, bias, fraction=K / E)
        errors.append((found - exact_bias(scores, bias)).abs().max().item())
    assert errors[1] < min(errors[0], 0.004)


def test_experts_get_even_shares_in_a_few_steps() -> None:
    scores = scores_of(2)
    bias = torch.zeros(E)
    even = TOKENS * K / E
    assert loads(scores, bias).max() > 1.5 * even
    for _ in range(12):
        counter = RequiredBias(moe())
        counter.count(scores, bias)
        bias = quantile_bias(counter.counts, bias, fraction=K / E).float()
    assert loads(scores, bias).max() < 1.05 * even
    assert loads(scores, bias).min() > 0.95 * even


def test_counts_of_ranks_add_up() -> None:
    scores = scores_of(3)
    bias = torch.linspace(-0.2, 0.2, E)
    parts = []
    for tokens in (slice(0, 100), slice(100, TOKENS)):
        counter = RequiredBias(moe())
        counter.count(scores[:, tokens], bias)
        parts.append(counter.counts)
    together = RequiredBias(moe())
    together.count(scores, bias)
    assert together.counts.equal(parts[0] + parts[1])


def test_a_step_without_tokens_leaves_the_bias() -> None:
    bias = torch.tensor([0.5, -0.1, 0.0, 0.0, -0.4, 0.0])
    counter = RequiredBias(moe())
    assert quantile_bias(counter.counts, bias, fraction=K / E).equal(bias.double())
