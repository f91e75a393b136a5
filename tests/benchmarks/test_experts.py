"""The counts of layers of experts, for sizes that can be computed by hand."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def experts(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    sys.modules.pop("experts", None)
    import experts

    yield experts
    sys.modules.pop("experts")


def test_bytes_and_speeds_are_those_of_a_layer_by_hand(experts):
    layer = experts.ExpertLayer(
        tokens=1000,
        hidden=1000,
        width=1000,
        num_choices=100,
        topk=10,
        num_local=10,
        expert_weights=10_000_000,
        is_hierarchical=True,
    )
    card = experts.CARDS["H100"]
    counts = {count.name: count for count in experts.counts_of(layer, card)}
    assert counts["weight gradients"].before.startswith("1.20 GB")
    assert counts["weight gradients"].after.startswith("0.80 GB")
    assert counts["one source"].before.startswith("0.16 GB")
    saved_s = 0.4e9 / (3.35e12 * 0.85)
    product_s = 2 * 10_000 * 10_000_000 / (989e12 * 0.72)
    assert experts.needed_speed(layer, card) == pytest.approx(product_s / (product_s + saved_s))
