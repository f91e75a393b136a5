"""Law L1 for the rules of hidden matrices beyond plain Muon, each in the layouts that divide a
matrix in another way: shards, instances, tensor-parallel blocks, replicated heads, stages, experts.

Iterations are in fp32, see test_optimizers.py.
"""

from functools import cache
from typing import Any

import pytest

from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.compare import assert_alike
from tests.laws.test_every_axis import EXPERTS, SP, ZB
from tests.laws.test_mla import MLA
from tests.laws.worlds import GLOBAL_BATCH, Case, Outcome, train_here

LR, STEPS = 3e-3, 3
MUON = {
    "optimizer": "muon",
    "muon_fp32_matmul_prec": "highest",
    "muon_extra_scale_factor": 0.2,
    "muon_use_nesterov": True,
}
RULES: dict[str, dict[str, Any]] = {
    "heads": MUON | {"muon_split_qkv_per_head": True},
    "gram": MUON | {"muon_ns_algorithm": "gram"},
}
MODELS: dict[str, dict[str, Any]] = {"llama": {}, "mla": MLA, "experts": EXPERTS}
ACROSS = {"outer_dp_sharding_strategy": "optim"}
Layout = tuple[str, int, dict[str, Any], dict[str, Any]]
LAYOUTS: list[Layout] = [
    ("llama", 2, {"strategy": "no_shard"}, {}),
    ("llama", 4, {"tp": 4, "strategy": "no_shard"}, {}),
    ("llama", 4, {"tp": 2, "strategy": "optim"}, SP),
    ("llama", 4, {"pp": 2, "strategy": "optim_grads"}, ZB),
    ("llama", 4, {"instances": 2, "strategy": "optim_grads"}, ACROSS),
    ("experts", 4, {"tp": 2, "etp": 2, "strategy": "optim_grads_params"}, {}),
    ("experts", 4, {"ep": 2, "instances": 2, "strategy": "optim"}, {}),
]
MLA_LAYOUTS: list[Layout] = [
    ("mla", 4, {"tp": 2, "strategy": "optim_grads"}, SP),
    ("mla", 4, {"cp": 2, "strategy": "optim_grads_params"}, {}),
]
ROWS = [("heads", layout) for layout in (*LAYOUTS, *MLA_LAYOUTS)]
ROWS += [("gram", layout) for layout in (*LAYOUTS[1:4], *LAYOUTS[5:], MLA_LAYOUTS[0])]


def case_of(rule: str, model: str) -> Case:
    optim = RULES[rule] | {"lr": LR, "adam_eps": 1e-5}
    return Case(STEPS).but(optim=optim, model=MODELS[model])


@cache
def single_rank(rule: str, model: str) -> list[Outcome]:
    case = case_of(rule, model).but(train={"micro_batch_size": GLOBAL_BATCH})
    return run_ranks(1, train_here, case, shares=True)


@pytest.mark.parametrize(("rule", "layout"), ROWS, ids=str)
def test_a_layout_trains_as_one_rank_does(rule: str, layout: Layout) -> None:
    model, num_ranks, sizes, options = layout
    parallel = {SHORT_NAMES[name]: value for name, value in sizes.items()} | options
    case = case_of(rule, model).but(parallel=parallel, train={"micro_batch_size": 3})
    outcomes = run_ranks(num_ranks, train_here, case, **sizes, shares=True)
    assert_alike(outcomes, single_rank(rule, model), row=f"{rule} {layout}", lr=LR)
