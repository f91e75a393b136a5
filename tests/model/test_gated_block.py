"""Gated residuals beside those of transformers' Muse Spark."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nanotrain.data.batch import Batch
from nanotrain.model.context import BatchContext
from tests.attention.fp64_transformers import modeling_in_fp64
from tests.model.building import LLAMA, build, randomize


def test_a_block_is_gated_as_in_muse_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    modeling = modeling_in_fp64("muse_spark", monkeypatch)
    config = SimpleNamespace(hidden_size=32, residual_gate_temperature=0.4)
    fields = {"residual_type": "gated", "residual_gate_temperature": 0.4, "num_layers": 1}
    stage = randomize(build(replace(LLAMA, **fields))).double()
    block = stage.layers["0"]
    batch = Batch.from_tokens(torch.zeros(2, 12, dtype=torch.int64))
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1)).double()
    context = stage._layer_context(BatchContext(batch), dropout=None, like=x)
    with torch.no_grad():
        block.mlp_gate.weight[:4] = 5.0  # the weight of x is at its bound

    expected = x
    gates = []
    for half, sublayer in (("attention", block.attention_output), ("mlp", block.mlp_output)):
        gate = modeling.MuseSparkResidualGate(config).double()
        gate.gate.data.copy_(block.get_parameter(f"{half}_gate.weight"))
        gates.append(gate.gate)
        expected = gate(expected, sublayer(expected, context))
    actual = block(x, context)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    weights = [block.attention_gate.weight, block.mlp_gate.weight]
    ours = torch.autograd.grad(actual.square().sum(), weights)
    theirs = torch.autograd.grad(expected.square().sum(), gates)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert ours[0].abs().max() > 1e-3
