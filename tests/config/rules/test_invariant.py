"""Rules of `--invariant`: what has no invariant form is one error with a cure."""

from typing import Any

import pytest

from nanotrain.config.rules.check import check_rules
from nanotrain.config.rules.invariant import MODEL, RUN
from nanotrain.config.rules.settings import Settings
from nanotrain.errors import ErrorCollector
from tests.config.asking import config_of

FITTING = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 128,
    "vocab_size": 300,
    "seq_length": 24,
    "invariant": True,
}


def messages(**settings: Any) -> list[str]:
    """The errors of the rules of `--invariant`."""
    errors = ErrorCollector()
    check_rules(config_of(**FITTING | settings), "layout", errors=errors)
    return [str(error) for error in errors.errors if "invariant with" in str(error)]


def test_what_fits_passes() -> None:
    assert messages() == []
    assert messages(tensor_model_parallel_size=2, context_parallel_size=2) == []
    assert messages(invariant=False, num_experts=4, ema_decay=0.9) == []


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"hybrid_layer_pattern": "G*", "linear_attention_type": "kda"},
            "linear attention: layers",
        ),
        (
            {"hybrid_layer_pattern": "M*", "context_parallel_size": 2},
            "invariant with context_parallel_size and linear attention: states that ranks pass on",
        ),
        ({"layer_scale": True}, "invariant with layer_scale: layers of"),
        ({"num_experts": 4, "moe_z_loss_coeff": 0.1}, "invariant with moe_z_loss_coeff: no layout"),
        (
            {
                "num_experts": 4,
                "moe_router_load_balancing_type": "aux_loss",
                "moe_aux_loss_coeff": 0.1,
            },
            "which the layout chooses",
        ),
        (
            {"num_experts": 4, "moe_router_load_balancing_type": "sinkhorn"},
            "which the layout chooses",
        ),
        (
            {"num_experts": 4, "add_bias_linear": True},
            "invariant with add_bias_linear: biases of experts and routers",
        ),
        ({"params_dtype": "fp16"}, "invariant with params_dtype fp16: the grid of the gradients"),
        (
            {"optimizer": "muon", "muon_tp_mode": "blockwise"},
            "invariant with muon_tp_mode blockwise: the block of each",
        ),
        ({"ema_decay": 0.9}, "invariant with ema_decay: torch's kernels round"),
        ({"torch_compile": True}, "invariant with torch_compile: compiled kernels"),
        ({"final_logit_softcapping": 30.0}, "invariant with final_logit_softcapping"),
    ],
)
def test_what_has_no_form_is_refused(settings: dict[str, Any], text: str) -> None:
    (message,) = messages(**settings)
    assert text in message
    assert "--invariant" in message


def test_shards_of_a_sequence_are_whole_token_blocks() -> None:
    mla = {"multi_latent_attention": True, "num_query_groups": None, "num_attention_heads": 16}
    sizes = mla | {"tensor_model_parallel_size": 8, "seq_length": 16}
    assert messages(**sizes | {"sequence_parallel": True}) == []
    assert messages(**sizes | {"sequence_parallel": False, "seq_length": 8}) == []
    (message,) = messages(**sizes | {"sequence_parallel": True, "seq_length": 8})
    assert "has 4 blocks of tokens" in message
    assert "--tensor-model-parallel-size to a divisor of 4" in message


def test_blocks_divide_shared_experts() -> None:
    experts = {"num_experts": 4, "expert_tensor_parallel_size": 1, "tensor_model_parallel_size": 2}
    assert messages(**experts, moe_shared_expert_intermediate_size=64) == []
    (message,) = messages(**experts, moe_shared_expert_intermediate_size=63)
    assert "moe_shared_expert_intermediate_size 63" in message


def test_ranks_own_whole_blocks() -> None:
    (message,) = messages(tensor_model_parallel_size=4)
    assert "products are computed in 2 blocks" in message
    assert "num_query_groups 2" in message
    assert "to a divisor of 2" in message
    (message,) = messages(context_parallel_size=4, seq_length=64)
    assert "in 4 blocks of positions" in message
    assert "--context-parallel-size to 2 or less" in message


def test_ranks_own_whole_blocks_of_experts() -> None:
    sizes = {"num_experts": 4, "moe_ffn_hidden_size": 66}
    assert messages(**sizes, expert_tensor_parallel_size=2) == []
    (message,) = messages(**sizes, expert_tensor_parallel_size=3)
    assert "invariant with expert_tensor_parallel_size 3: products of experts are" in message
    assert "in 2 blocks, the largest power of two up to 4" in message


def test_no_row_holds_by_default() -> None:
    settings = Settings(config_of(**FITTING))
    assert not [row.name for row in (*MODEL, *RUN) if row.is_set(settings)]
