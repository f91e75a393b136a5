"""Gradients of fp8 weights that are zeros are counted over all ranks and named."""

from pathlib import Path

import pytest
import torch

from nanotrain.kernels.fp8 import nvfp4, quantize
from nanotrain.spec.boxes import TensorBox
from nanotrain.train.parts import zero_grads
from nanotrain.train.parts.zero_grads import count_zeros
from tests.train.parts.test_fp8_amaxes import STEPS
from tests.train.small_run import Spy, small_run, train

CPU = torch.device("cpu")
NVFP4 = ["--bf16", "--fp4-format", "e2m1", "--train-iters", "3"]


def test_zeros_of_all_parts_of_a_weight_are_counted() -> None:
    first, second = TensorBox.full("model/a", (2, 3)), TensorBox.full("model/b", (4,))
    grads = {first: torch.tensor([[0.0, 1.0, 0.0], [2.0, -0.0, 3.0]]), second: torch.ones(4)}
    counts = count_zeros(grads, ["b", "c", "a"], device=CPU)
    assert counts.tolist() == [0, 0, 3]


def test_a_healthy_run_names_nothing(tmp_path: Path) -> None:
    with small_run(tmp_path, *STEPS, *NVFP4) as run:
        spy = Spy()
        train(run, spy)
    assert all("zero_grads" not in report.output.metrics for report in spy.reports)


def test_gradients_that_quantize_to_zeros_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on devices whose kernels of stochastic rounding return zeros."""
    nearest = nvfp4.quantize_nvfp4

    def broken(x, amax, *, block, words=None):
        cast = nearest(x, amax, block=block, words=words)
        if words is not None:
            cast.values.zero_()
        return cast

    messages: list[str] = []
    monkeypatch.setattr(nvfp4, "quantize_nvfp4", broken)
    monkeypatch.setattr(
        zero_grads.log, "warning", lambda text, *given: messages.append(text % given)
    )
    with small_run(tmp_path, *STEPS, *NVFP4) as run:
        spy = Spy()
        train(run, spy)
    named = [report.output.metrics["zero_grads"] for report in spy.reports][0]
    assert len(named) == 7 and set(named.values()) == {1.0}
    assert "layers.0.attention.query.weight" in named
    warnings = [text for text in messages if "zeros" in text]
    assert len(warnings) == 1, "named once, from the second logged step on"
    assert "and 6 more weights is 100 % zeros at 2 logged steps in a row" in warnings[0]


def test_underflow_of_a_part_is_in_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp8 gradients with three of four rows zero."""
    exact = quantize.quantize

    def narrow(x, inverse, *, block, dtype):
        cast = exact(x, inverse, block=block, dtype=dtype)
        if dtype is torch.float8_e5m2:
            cast.values.view(torch.uint8)[torch.arange(len(x)) % 4 > 0] = 0
        return cast

    monkeypatch.setattr(quantize, "quantize", narrow)
    with small_run(tmp_path, *STEPS, "--fp8", "--fp8-recipe", "tensorwise") as run:
        spy = Spy()
        train(run, spy)
    named = spy.reports[-1].output.metrics["zero_grads"]
    assert named["layers.0.mlp.up.weight"] == pytest.approx(0.75, abs=0.02)
