"""Rules of CUDA graphs: what excludes attention leaves the other parts, and cures name them."""

import pytest

from nanotrain.config.rules.check import check_rules
from nanotrain.errors import ErrorCollector
from tests.config.asking import config_of

LOCAL = {"cuda_graph_impl": "local"}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64}


def errors_of(**settings: object) -> list[str]:
    """The errors of the layout."""
    errors = ErrorCollector()
    check_rules(config_of(**LOCAL, **settings), "layout", errors=errors)
    return [str(error) for error in errors.errors]


@pytest.mark.parametrize(
    ("settings", "cure"),
    [
        ({"reset_attention_mask": True}, "set --cuda-graph-scope mlp"),
        ({"window_size": 8} | EXPERTS, "set --cuda-graph-scope moe_router"),
        ({"qk_clip": True} | EXPERTS | {"moe_layer_freq": "[0]*1+[1]*3"}, "mlp moe_router"),
    ],
)
def test_planned_attention_leaves_the_other_parts(settings: dict, cure: str) -> None:
    (error,) = errors_of(**settings)
    assert error.endswith(cure)
    scope = cure.partition("scope ")[2].split() or ["mlp", "moe_router"]
    assert errors_of(**settings, cuda_graph_scope=scope) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"tp_comm_overlap": True, "sequence_parallel": True, "tensor_model_parallel_size": 2},
        {"cpu_offloading": True, "cpu_offloading_num_layers": 1},
        {"fp8_format": "hybrid", "params_dtype": "bf16", "fp8_param_gather": True}
        | {"data_parallel_sharding_strategy": "optim", "fp8_recipe": "tensorwise"},
        {"debug_nan": True},
        {"replay_interval": 2},
        {"residual_type": "parallel"},
        {"pipeline_schedule": "zb-h1", "pipeline_model_parallel_size": 2},
        EXPERTS | {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    ],
)
def test_what_cannot_be_captured_is_refused_with_a_cure(settings: dict) -> None:
    (error,) = errors_of(**settings)
    assert error.startswith("cuda_graph_impl local with ") and error.count("; ") == 1


def test_recomputed_experts_are_outside_of_a_graph_of_attention() -> None:
    settings = EXPERTS | {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    assert errors_of(**settings, cuda_graph_scope=["attn"]) == []


def test_layers_and_compiled_layers_are_captured() -> None:
    assert errors_of() == errors_of(torch_compile=True) == []
    assert errors_of(fp8_format="hybrid", params_dtype="bf16", torch_compile=True) == []
    assert errors_of(fp8_format="e2m1", fp8_recipe="nvfp4", params_dtype="bf16") == []
    assert errors_of(cuda_graph_scope=["full"], recompute_granularity="selective") == []
