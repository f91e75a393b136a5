"""Invariant forms of norms and activations, and the modules that have one."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotrain.config.config import Config, DataConfig, ModelConfig, TrainConfig
from nanotrain.config.model import MTPConfig
from nanotrain.model.activations import Glu
from nanotrain.model.invariant import (
    InWholeVectors,
    invariant_layer_norm,
    invariant_rms_norm,
    make_invariant,
    unit_blocks,
)
from nanotrain.model.norm import LayerNorm, LearnedScale, RMSNorm
from nanotrain.parallel.tp.invariant import UnitBlocks

BLOCKS = UnitBlocks(2, block_length=4, num_tokens=16)


def param(tensor: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(tensor)
    parameter.grad_dtype = torch.float64
    return parameter


@pytest.mark.parametrize("is_offset", [False, True])
def test_norms_have_their_values_and_exact_gradients_of_weights(is_offset: bool) -> None:
    x = torch.randn(2, 8, 12)
    weight = torch.randn(12)
    rms = RMSNorm(param(weight.clone()), eps=1e-5, is_offset=is_offset)
    layer = LayerNorm(param(weight.clone()), param(torch.randn(12)), eps=1e-5, is_offset=is_offset)
    for norm, form in ((rms, invariant_rms_norm), (layer, invariant_layer_norm)):
        torch.testing.assert_close(form(norm, x, blocks=BLOCKS), norm(x), rtol=1e-5, atol=1e-5)
        grads = []
        for parts in (x.split(1), x[:, torch.randperm(8)].split((5, 3), dim=1)):
            norm.weight.grad = None
            for part in parts:
                form(norm, part, blocks=BLOCKS).sum().backward()
            grads.append(norm.weight.grad)
        assert grads[0].dtype is torch.float64
        assert torch.equal(grads[0], grads[1])


@pytest.mark.parametrize("function", [F.silu, F.gelu, Glu(F.silu)])
def test_elementwise_functions_round_alike_at_every_place(function: object) -> None:
    num_inputs = 2 if isinstance(function, Glu) else 1
    inputs = [torch.randn(5, 7 * 37) for _ in range(num_inputs)]
    whole = InWholeVectors(function)
    together = whole(*inputs)
    for size in (7, 37):
        parts = zip(*(x.split(size, 1) for x in inputs), strict=True)
        assert torch.equal(torch.cat([whole(*part) for part in parts], 1), together)
    torch.testing.assert_close(together, function(*inputs))


def test_a_module_without_a_form_is_named() -> None:
    stage = nn.Sequential(RMSNorm(param(torch.ones(4)), eps=1e-5))
    make_invariant(stage, BLOCKS)
    stage.append(LearnedScale(nn.Parameter(torch.ones(1))))
    with pytest.raises(AssertionError, match=r"1 \(LearnedScale\) has \['weight'\]"):
        make_invariant(stage, BLOCKS)


def test_the_addends_of_a_sum_follow_from_the_largest_batch() -> None:
    model = ModelConfig(vocab_size=300, ffn_hidden_size=56, num_attention_heads=4)
    train = TrainConfig(global_batch_size=6)
    config = Config(model=model, data=DataConfig(seq_length=24), train=train)
    assert unit_blocks(config, dp=2) == UnitBlocks(
        4, 6, num_tokens=144, num_heads=4, tokens_per_block=3, num_expert_blocks=4
    )
    further = replace(config, model=replace(model, mtp=MTPConfig(num_layers=2)))
    assert unit_blocks(further, dp=2).num_tokens == 3 * 144
    steps = TrainConfig(step_batch_size_schedule=["0:8", "2K:4"])
    assert unit_blocks(replace(config, train=steps), dp=2).num_tokens == 8 * 24
