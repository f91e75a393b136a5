"""Invariant forms of norms and activations, and the modules that have one."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from nanotrain.config.config import Config, DataConfig, ModelConfig, TrainConfig
from nanotrain.config.model import MTPConfig
from nanotrain.model.invariant import make_invariant, unit_blocks
from nanotrain.model.norm import LearnedScale, RMSNorm
from nanotrain.parallel.tp.invariant import UnitBlocks

BLOCKS = UnitBlocks(2, block_length=4, num_tokens=16)


def param(tensor: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(tensor)
    parameter.grad_dtype = torch.float64
    return parameter


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
