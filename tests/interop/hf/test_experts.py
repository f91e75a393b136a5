"""config.json of families with experts: which layers have them, and how tokens are routed."""

from dataclasses import replace
from typing import Any

import pytest

from nanotrain.interop.hf.experts import EXPERT_PARTS
from nanotrain.interop.hf.families import config_from_hf, config_to_hf
from tests.interop.hf.configs import LLAMA_SHAPE

LLAMA_JSON = LLAMA_SHAPE | {"model_type": "llama"}


@pytest.mark.parametrize(
    ("entries", "pattern"),
    [
        ({}, "1"),
        ({"decoder_sparse_step": 2}, "[0]+[1]+[0]+[1]"),
        ({"mlp_only_layers": [0, 1, 3]}, "[0]*2+[1]+[0]"),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, "[0]+[1]+[0]*2"),
    ],
)
def test_dense_layers_of_a_qwen3_moe_become_a_pattern_and_come_back(
    entries: dict[str, Any], pattern: str
) -> None:
    raw = (
        LLAMA_JSON | {"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 4} | entries
    )
    model = config_from_hf(raw)
    assert model.moe.layer_freq == pattern
    assert (model.ffn_hidden_size is None) is (pattern == "1")
    dense = [index for index, has_experts in enumerate(model.moe_layers) if not has_experts]
    written = config_to_hf(model, family="qwen3_moe")
    assert (written["mlp_only_layers"], written["decoder_sparse_step"]) == (dense, 1)
    assert config_from_hf(written) == model


@pytest.mark.parametrize(("step", "num_sparse"), [(1, 4), (2, 2), (3, 1)])
def test_the_balance_loss_is_over_the_layers_with_experts(step: int, num_sparse: int) -> None:
    """transformers takes their mean, times top-k; here the losses of the layers are added."""
    raw = LLAMA_JSON | {"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 4}
    model = config_from_hf(raw | {"decoder_sparse_step": step, "num_experts_per_tok": 2})
    moe = replace(model.moe, aux_loss_coeff=[0.03], router_load_balancing_type=["aux_loss"])
    written = config_to_hf(replace(model, moe=moe), family="qwen3_moe")
    assert written["router_aux_loss_coef"] == pytest.approx(0.03 * num_sparse / 2)


def test_a_chosen_softmax_is_the_renormalized_one() -> None:
    raw = LLAMA_JSON | {"model_type": "qwen3_moe"}
    assert not config_from_hf(raw | {"norm_topk_prob": True}).moe.router_pre_softmax
    assert config_from_hf(raw | {"norm_topk_prob": False}).moe.router_pre_softmax


def test_both_names_of_the_number_of_experts_are_read() -> None:
    raw = LLAMA_JSON | {"model_type": "qwen3_moe"}
    assert config_from_hf(raw | {"num_experts": 6}).moe.num_experts == 6
    assert config_from_hf(raw | {"num_local_experts": 6}).moe.num_experts == 6


@pytest.mark.parametrize(("stored", "factor"), [(None, 1.0), (0.5, 0.5), (2.0, 2.0)])
def test_a_factor_of_mimo_that_is_null_changes_nothing(stored: float | None, factor: float) -> None:
    raw = {"num_hidden_layers": 2, "num_key_value_heads": 2}
    raw |= {"attention_value_scale": stored, "routed_scaling_factor": stored}
    values = EXPERT_PARTS["mimo"].read(raw)
    assert values["attention_output_multiplier"] == factor
    assert values["moe.router_topk_scaling_factor"] == factor
