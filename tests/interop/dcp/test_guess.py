"""What shapes show, and what the user has to say."""

from pathlib import Path

import pytest

from nanotrain.errors import CheckpointError
from tests.interop.dcp.opened import lines_of, open_state, state_of
from tests.interop.dcp.programs import CASES, HEADS_FLAG, Training

MOE_FLAGS = f"{HEADS_FLAG} --moe-router-topk 2 --moe-router-score-function sigmoid"


def test_heads_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="add --num-attention-heads VALUE, a recipe"):
        open_state(tmp_path, state_of("titan_llama"), "")


def test_heads_that_do_not_divide_the_rows_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="16 rows of queries are no multiple of 3"):
        open_state(tmp_path, state_of("titan_llama"), "--num-attention-heads 3")


def test_the_router_is_asked_for(tmp_path: Path) -> None:
    state = state_of("titan_deepseek")
    with pytest.raises(CheckpointError, match="--moe-router-topk, --moe-router-score-function"):
        open_state(tmp_path / "asked", state, HEADS_FLAG)
    model = open_state(tmp_path / "given", state, MOE_FLAGS).config.model
    assert model.moe is not None and model.mla is not None
    assert (model.moe.num_experts, model.moe.layer_freq) == (4, "[0,1]")
    assert (model.mla.q_lora_rank, model.mla.qk_head_dim, model.mla.v_head_dim) == (8, 8, 8)
    assert model.moe.shared_expert_intermediate_size == 24
    text = lines_of(tmp_path / "lines", state, MOE_FLAGS)
    assert "--moe-router-topk-scaling-factor 1.0" in text
    assert "--moe-router-bias-update-rate 0.001" in text


def test_names_of_transformers_are_guessed_too(tmp_path: Path) -> None:
    training = Training(CASES["deepseek"])
    state = {f"model.{name}": value for name, value in training.saved.state_dict().items()}
    opened = open_state(tmp_path, state, MOE_FLAGS)
    model = opened.config.model
    assert model.moe is not None and model.mla is not None
    assert (model.moe.num_experts, model.moe.layer_freq, model.moe.ffn_hidden_size) == (
        4,
        "[0,1]",
        24,
    )
    assert (model.mla.kv_lora_rank, model.mla.qk_pos_emb_head_dim) == (8, 4)
    assert opened.mappings["layers.1.mlp.experts.up.weight"].tensor.endswith("gate_up_proj")
