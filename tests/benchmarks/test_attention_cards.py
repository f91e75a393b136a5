"""The tables of attention by card."""

import pytest

from benchmarks.attention_cards import chosen, mla_cost
from tests.harness import ROOT


@pytest.mark.parametrize("gpu", ["H100", "B200"])
def test_multi_latent_attention_is_cheaper_by_the_chosen_backend(gpu: str) -> None:
    assert chosen(gpu, "192 and 128") == "cudnn" != chosen("A100", "192 and 128")
    before, after = (mla_cost(gpu, flag) for flag in ("flash", "auto"))
    assert before.layer_ms > 2 * after.layer_ms
    assert after.tokens_per_s > 1.1 * before.tokens_per_s
    costs = [f"{cost.layer_ms:.2f} ms | {cost.tokens_per_s:,.0f}" for cost in (before, after)]
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    assert f"\n| {gpu} | {' | '.join(costs)} |\n" in page
