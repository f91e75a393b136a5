"""The numbers of an optimizer's parameters are those of the modules, group by group."""

from typing import Any

import pytest
import torch

from nanotrain.interop.megatron.legacy import Sizes
from nanotrain.interop.megatron.legacy_optimizer import rank_state

NAMES = {
    "embedding.word_embeddings.weight": (6, 4),
    "decoder.layers.0.input_layernorm.weight": (4,),
    "decoder.layers.0.self_attention.linear_qkv.bias": (3,),
    "decoder.layers.0.self_attention.q_layernorm.weight": (2,),
    "decoder.layers.0.mlp.router.expert_bias": (5,),  # no parameter
    "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight": (2, 4),
}
DECAYS, NORMS = [0, 5], [1, 2, 3]  # indices of the names
ONE = Sizes.from_arguments({})
TWO_EXPERT_RANKS = Sizes.from_arguments({"expert_model_parallel_size": 2})


def content(groups: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    model = {name: torch.zeros(size) for name, size in NAMES.items()}
    model["decoder.layers.0.self_attention._extra_state"] = torch.zeros(1)
    state = {}
    for group in groups:
        for number, index in zip(group["params"], group.pop("indices"), strict=True):
            size = list(NAMES.values())[index]
            state[number] = {"exp_avg": torch.full(size, float(index)), "step": torch.tensor(4.0)}
    optimizer = {"state": state, "param_groups": groups}
    return {"model": model, "optimizer": optimizer} | more


def moments(state: Any) -> dict[int, float]:
    """The value of the moment of each name."""
    found = {}
    for index, name in enumerate(NAMES):
        value = state.chunks[0][name].get("optimizer.state.exp_avg.")
        if value is not None:
            found[index] = float(value.flatten()[0])
    return found


def test_groups_of_weights_that_decay_and_of_others() -> None:
    groups = [
        {"params": [0, 1], "indices": DECAYS, "wd_mult": 1.0},
        {"params": [2, 3, 4], "indices": NORMS, "wd_mult": 0.0},
    ]
    state = rank_state(content(groups), sizes=ONE)
    assert moments(state) == {index: float(index) for index in (*DECAYS, *NORMS)}
    assert state.steps == {4}
    assert "decoder.layers.0.self_attention._extra_state" not in state.chunks[0]


def test_experts_have_a_group_with_expert_parallelism() -> None:
    groups = [
        {"params": [0], "indices": [0], "wd_mult": 1.0, "is_expert_parallel": False},
        {"params": [1, 2, 3], "indices": NORMS, "wd_mult": 0.0},
        {"params": [4], "indices": [5], "wd_mult": 1.0, "is_expert_parallel": True},
    ]
    state = rank_state(content(groups), sizes=TWO_EXPERT_RANKS)
    assert moments(state) == {index: float(index) for index in (*DECAYS, *NORMS)}


def test_main_parameters_are_those_of_their_group() -> None:
    groups = [
        {"params": [0, 1], "indices": DECAYS, "wd_mult": 1.0},
        {"params": [2, 3, 4], "indices": NORMS, "wd_mult": 0.0},
    ]
    sizes = list(NAMES.values())
    mains = [[torch.full(sizes[index], index + 0.5) for index in own] for own in (DECAYS, NORMS)]
    inner = content(groups)["optimizer"]
    half = {"optimizer": inner, "fp32_from_fp16_params": mains, "grad_scaler": {"scale": 2.0}}
    state = rank_state(content([], optimizer=half), sizes=ONE)
    word = state.chunks[0]["embedding.word_embeddings.weight"]
    assert float(word["optimizer.state.fp32_param."][0, 0]) == 0.5
    assert state.grad_scaler == {"scale": 2.0}
    mains[1].pop()
    with pytest.raises(ValueError, match="other main parameters"):
        rank_state(content([], optimizer=half), sizes=ONE)


def test_another_number_of_parameters_is_an_error() -> None:
    groups = [{"params": [0], "indices": [0], "wd_mult": 1.0}]
    with pytest.raises(ValueError, match="has 1 parameter, the model has 2"):
        rank_state(content(groups), sizes=ONE)
    with pytest.raises(ValueError, match="has no model"):
        rank_state({}, sizes=ONE)
