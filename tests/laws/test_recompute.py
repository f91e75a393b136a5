"""Law L7: recomputation and offloading change no bit of losses, gradient norms, weights and router
statistics.
"""

from typing import Any

import pytest
import torch

from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.test_every_axis import MODELS
from tests.laws.test_mla import DEEPSEEK
from tests.laws.worlds import Case, micro_batch_size, train_cases

FULL = {"recompute_granularity": "full"}
SETTINGS: dict[str, dict[str, Any]] = {
    "full": FULL,
    "uniform 3": FULL | {"recompute_method": "uniform", "recompute_num_layers": 3},
    "uniform 2": FULL | {"recompute_method": "uniform", "recompute_num_layers": 2},
    "block 1": FULL | {"recompute_method": "block", "recompute_num_layers": 1},
    "core_attn": {"recompute_granularity": "selective"},
    "modules": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "layernorm", "mlp", "moe"],
    },
    # forced: a user's run on a CPU is refused
    "offload": {"cpu_offloading": True, "cpu_offloading_num_layers": 3},
    "outputs": {
        "recompute_granularity": "selective",
        "recompute_modules": ["layernorm", "moe_act", "mla_up_proj"],
    },
    "pointwise": {"recompute_granularity": "selective", "recompute_modules": ["pointwise"]},
    "pointwise and MLPs": {
        "recompute_granularity": "selective",
        "recompute_modules": ["pointwise", "mlp", "moe"],
    },
}
WITH_MTP = DEEPSEEK | {"mtp_num_layers": 1}
DROPOUT = {"gpt2": {"attention_dropout": 0.1, "hidden_dropout": 0.1}}
SP, ZB = {"sequence_parallel": True}, {"pipeline_schedule": "zb-h1"}
VPP = {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
# model, dtype, ranks, strategy and sizes of axes, options, settings
ROWS: list[tuple[str, str, int, dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    (
        "deepseek",
        "fp32",
        1,
        {},
        {},
        ("full", "block 1", "modules", "outputs", "offload", "pointwise", "pointwise and MLPs"),
    ),
    ("gpt2", "bf16", 1, {}, {}, ("uniform 2", "core_attn")),
    (
        "deepseek",
        "fp32",
        2,
        {"strategy": "optim", "pp": 2},
        ZB,
        ("uniform 2", "outputs", "offload", "pointwise"),
    ),
    ("llama", "bf16", 2, {"strategy": "optim_grads", "pp": 2}, VPP, ("full", "outputs")),
    (
        "gpt2",
        "bf16",
        2,
        {"strategy": "optim_grads", "tp": 2},
        SP | OVERLAP,
        ("uniform 3", "modules", "pointwise"),
    ),
    ("llama", "fp32", 2, {"cp": 2}, {}, ("full", "core_attn", "pointwise")),
    ("gpt2", "bf16", 2, {"cp": 2}, {"cp_comm_type": "a2a"}, ("core_attn",)),
    ("llama", "fp8", 1, {}, {}, ("uniform 2", "pointwise")),
    ("capacity", "fp32", 2, {"strategy": "optim", "tp": 2, "etp": 2}, {}, ("outputs", "pointwise")),
    (
        "biased",
        "fp32",
        2,
        {"strategy": "optim_grads_params", "ep": 2},
        OVERLAP,
        ("uniform 3", "offload", "pointwise"),
    ),
    (
        "biased",
        "fp32",
        4,
        {"strategy": "optim_grads_params", "tp": 2, "pp": 2, "etp": 2},
        SP | ZB,
        ("uniform 2",),
    ),
]


@pytest.mark.parametrize(
    ("model", "dtype", "num_ranks", "sizes", "options", "settings"), ROWS, ids=str
)
def test_recomputation_changes_no_bit(
    model: str,
    dtype: str,
    num_ranks: int,
    sizes: dict[str, Any],
    options: dict[str, Any],
    settings: tuple[str, ...],
) -> None:
    fp8 = {"fp8_format": "hybrid"} if dtype == "fp8" else {}
    plain = Case(2).but(
        train={
            "micro_batch_size": micro_batch_size(num_ranks, sizes, 2, global_batch=4),
            "global_batch_size": 4,
        },
        model={"num_layers": 4}
        | (MODELS | {"deepseek": DEEPSEEK | {"mtp_num_layers": 1}})[model]
        | DROPOUT.get(model, {}),
        parallel={SHORT_NAMES[name]: value for name, value in sizes.items()} | options,
        precision={"params_dtype": "bf16" if fp8 else dtype} | fp8,
    )
    cases = [plain, *(plain.but(memory=SETTINGS[name]) for name in settings)]
    for kept, *recomputed in run_ranks(num_ranks, train_cases, cases, **sizes, shares=True):
        for name, outcome in zip(settings, recomputed, strict=True):
            assert outcome.losses == kept.losses and outcome.grad_norms == kept.grad_norms, name
            assert outcome.mtp_losses == kept.mtp_losses, name
            assert outcome.moe == kept.moe, f"{name}: routers count a batch twice"
            different = [
                box.name
                for box in kept.weights
                if not torch.equal(kept.weights[box], outcome.weights[box])
            ]
            assert not different, name
