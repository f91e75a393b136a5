"""`nanotrain plan --explain`: operators, their rates, and the formulas of the totals."""

import re

import pytest

from nanotrain.config.load import load
from nanotrain.planner.explain import explain
from nanotrain.planner.hardware import gpu_of
from nanotrain.planner.prediction import predict
from nanotrain.planner.scenario import scenario_of


def explained(*flags: str) -> tuple[str, float]:
    """The text, and tokens per second and GPU."""
    config = load([*flags, "--mock-data"]).config
    prediction = predict(scenario_of(config, 8, gpu=gpu_of("h100")))
    return explain(prediction), prediction.time.tokens_per_s_per_gpu


def test_a_product_has_its_sizes_and_a_rate_below_the_peak() -> None:
    text, _ = explained("+config=llama1b")
    rates = re.findall(
        r"product ([\d,]+) x ([\d,]+) x ([\d,]+): ([\d,.]+) GFLOP, [\d,]+ TFLOP/s, (\d+)% of 989",
        text,
    )
    assert len(rates) == 5  # qkv, out, two of the MLP, head
    for *sizes, flops, percent in rates:
        m, n, k = (int(size.replace(",", "")) for size in sizes)
        assert 2 * m * n * k / 1e9 == pytest.approx(float(flops.replace(",", "")), abs=0.06)
        assert 0 < int(percent) < 100


def test_the_formulas_have_the_numbers_of_the_prediction() -> None:
    text, tokens = explained(
        "+config=tiny_moe", "--tensor-model-parallel-size", "2", "--sequence-parallel"
    )
    assert f"= {tokens:,.0f}\n" in text
    assert "tp collectives" in text and "range" in text
    assert text.count("those like it") == 3  # embedding, one kind of layer, head
