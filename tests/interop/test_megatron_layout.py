"""The plan reads every weight exactly once and fills every tensor; models without known names are refused."""

from collections import Counter
from dataclasses import replace
from math import prod

import pytest

from nanotrain.config.model import MTPConfig
from nanotrain.errors import CheckpointError
from nanotrain.interop.megatron_layout import check_model, plan_chunks
from nanotrain.spec.parameters import declare_model
from nanotrain.spec.shape import ModelShape
from tests.checkpoint.megatron_models import GPT2, LLAMA, MIXED, MOE


@pytest.mark.parametrize(
    "model_config",
    [LLAMA, GPT2, replace(GPT2, qk_layernorm=True), MOE, MIXED],
    ids=["llama", "gpt2", "norms", "moe", "mixed"],
)
def test_every_weight_is_read_and_every_tensor_is_full(model_config) -> None:
    check_model(model_config)
    chunks = list(plan_chunks(model_config))
    read, filled, sizes = Counter[str](), Counter[str](), {}
    for chunk in chunks:
        assert sum(source.box.numel for source in chunk.sources) == chunk.box.numel
        filled[chunk.key] += chunk.box.numel
        sizes[chunk.key] = prod(chunk.shape)
        is_copy = chunk.key.endswith("pre_mlp_layernorm.weight")  # of the norm before experts
        read.update({} if is_copy else {source.name: source.box.numel for source in chunk.sources})
    assert filled == sizes
    declared = {spec.name: prod(spec.shape) for spec in declare_model(ModelShape.of(model_config))}
    assert {name: count for name, count in read.items() if not name.startswith("router/")} == declared


def test_all_obstacles_are_one_error() -> None:
    model_config = replace(LLAMA, mtp=MTPConfig(num_layers=1), scale_embeddings=True, final_logit_softcapping=30.0)
    with pytest.raises(CheckpointError, match="mtp_num_layers, scale_embeddings, final_logit_softcapping"):
        check_model(model_config)
