"""Law L1 for features of the model, and for stages of any lengths: every layout computes what one rank computes."""

from functools import cache
from typing import Any

import pytest

from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.compare import assert_alike
from tests.laws.worlds import GLOBAL_BATCH, Case, Outcome, train_here

STEPS, OPTIM = 3, {"lr": 3e-3, "adam_eps": 1e-5}
YARN = {
    "position_embedding_type": "yarn",
    "rotary_scaling_factor": 3.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 4.0,
    "mscale_all_dim": 0.5,
}
MODELS: dict[str, dict[str, Any]] = {
    "window": {"num_layers": 3, "window_size": 5, "window_attn_skip_freq": "2"},
    "four layers": {"num_layers": 4},
    "yarn, squared ReLU": YARN | {"kv_channels": 16, "rotary_percent": 0.5, "activation": "squared_relu"},
    "yarn with MLA, experts in turn": YARN
    | {
        "num_query_groups": None,
        "multi_latent_attention": True,
        "kv_lora_rank": 16,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
        "activation": "quick_geglu",
        "num_experts": 4,
        "moe_ffn_hidden_size": 24,
        "moe_router_force_load_balancing": True,
    },
}
VPP = {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2}
SP = {"sequence_parallel": True}
# model, ranks, strategy and sizes of axes, options
LAYOUTS: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("window", 4, {"strategy": "optim_grads", "tp": 2, "cp": 2}, SP),
    ("window", 2, {"strategy": "optim", "cp": 2}, {"cp_comm_type": "allgather"}),
    ("window", 2, {"strategy": "optim", "cp": 2}, {"cp_comm_type": "a2a"}),
    ("yarn, squared ReLU", 4, {"strategy": "optim", "tp": 2, "cp": 2}, SP),
    ("yarn, squared ReLU", 4, {"strategy": "optim_grads_params", "pp": 2}, {"pipeline_schedule": "zb-h1"}),
    ("four layers", 4, {"strategy": "optim", "pp": 2}, VPP | {"pipeline_model_parallel_layout": "E|tt|tt|L"}),
    ("four layers", 2, {"strategy": "optim_grads_params", "pp": 2}, {"pipeline_model_parallel_layout": "Ettt|tL"}),
    ("yarn with MLA, experts in turn", 4, {"strategy": "optim", "tp": 2, "cp": 2, "etp": 1, "ep": 2}, {}),
]


@cache
def single_rank(model: str) -> list[Outcome]:
    case = Case(STEPS).but(train={"micro_batch_size": GLOBAL_BATCH}, optim=OPTIM, model=MODELS[model])
    return run_ranks(1, train_here, case)


@pytest.mark.parametrize(("model", "num_ranks", "sizes", "options"), LAYOUTS, ids=str)
def test_a_feature_trains_as_on_one_rank(
    model: str, num_ranks: int, sizes: dict[str, Any], options: dict[str, Any]
) -> None:
    parallel = {SHORT_NAMES[name]: value for name, value in sizes.items()} | options
    case = Case(STEPS).but(train={"micro_batch_size": 2}, optim=OPTIM, parallel=parallel, model=MODELS[model])
    outcomes = run_ranks(num_ranks, train_here, case, **sizes)
    assert_alike(outcomes, single_rank(model), row=f"{model} {sizes} {options}", lr=OPTIM["lr"])
