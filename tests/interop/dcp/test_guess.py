"""What shapes show, and what the user has to say."""

from pathlib import Path

import pytest

from nanotrain.errors import CheckpointError
from tests.interop.dcp.opened import open_state, state_of
from tests.interop.dcp.programs import HEADS_FLAG

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
