"""Law L1 for QK-clip: heads are clipped by the same factors in every layout, and the clipped
weights are one rank's.
"""

from functools import cache
from typing import Any

import pytest

from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.compare import assert_alike
from tests.laws.test_mla import DIRECT
from tests.laws.worlds import GLOBAL_BATCH, Case, Outcome, assemble, train_here

LR, STEPS = 3e-3, 3
MODELS: dict[str, dict[str, Any]] = {"biases": {"add_qkv_bias": True}, "mla": DIRECT}
# A microbatch and a token decide which heads exceed the threshold: about half of them do.
CLIP = {"qk_clip": True, "qk_clip_threshold": 0.02, "qk_clip_alpha": 0.25}
ROWS = [
    ("biases", 2, {"strategy": "no_shard", "cp": 2}, {"cp_comm_type": "p2p"}),
    ("biases", 4, {"tp": 4, "strategy": "optim"}, {}),  # replicated key projections
    (
        "biases",
        4,
        {"pp": 2, "strategy": "optim_grads"},
        {"pipeline_schedule": "zb-h1", "overlap_param_gather": True},
    ),
    ("mla", 4, {"tp": 2, "strategy": "optim_grads_params"}, {"sequence_parallel": True}),
    ("mla", 4, {"cp": 2, "instances": 2, "strategy": "optim"}, {"cp_comm_type": "a2a"}),
]


def case_of(model: str, clip: dict[str, Any]) -> Case:
    muon = {"optimizer": "muon", "muon_fp32_matmul_prec": "highest", "muon_extra_scale_factor": 0.2}
    return Case(STEPS).but(optim=muon | {"lr": LR, "adam_eps": 1e-5} | clip, model=MODELS[model])


@cache
def single_rank(model: str) -> list[Outcome]:
    one = {"micro_batch_size": GLOBAL_BATCH}
    outcomes = run_ranks(1, train_here, case_of(model, CLIP).but(train=one), shares=True)
    plain = assemble(run_ranks(1, train_here, case_of(model, {}).but(train=one), shares=True))
    clipped = assemble(outcomes)
    ratios = {
        name: clipped[name].norm() / plain[name].norm() for name in clipped if ".attention." in name
    }
    for name in ("query.weight", "kv_up.weight" if model == "mla" else "key.weight"):
        assert ratios[f"layers.0.attention.{name}"] < 0.9, f"{name} was hardly clipped: {ratios}"
    return outcomes


@pytest.mark.parametrize(("model", "num_ranks", "sizes", "options"), ROWS, ids=str)
def test_heads_are_clipped_as_on_one_rank(
    model: str, num_ranks: int, sizes: Any, options: Any
) -> None:
    parallel = {SHORT_NAMES[name]: value for name, value in sizes.items()} | options
    case = case_of(model, CLIP).but(parallel=parallel, train={"micro_batch_size": 3})
    outcomes = run_ranks(num_ranks, train_here, case, **sizes, shares=True)
    assert_alike(outcomes, single_rank(model), row=f"{model} {num_ranks} ranks {sizes}", lr=LR)
