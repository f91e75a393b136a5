"""Law L1 for update rules: a rule updates the weights as on one rank, however main params and state
are sharded.

Muon's rows have the iteration in fp32: it amplifies rounding of small singular values up to 500
times, and a bf16 rounding of the input, which a last bit of a gradient may change, to some percent
of an update. That equal gradients give equal bits in bf16 too is held by tests/optim/test_muon.py.
Lion's update is a sign, which the last bit of a gradient near zero may change;
tests/optim/test_lion.py compares shards with full tensors.
"""

from functools import cache
from typing import Any

import pytest

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.plan.traffic import sent_bytes
from nanotrain.train.step import train_step
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.compare import assert_alike
from tests.laws.test_every_axis import BIASED, EXPERTS, OVERLAP, SP, ZB
from tests.laws.worlds import GLOBAL_BATCH, Case, Outcome, build_here, train_here

LR, STEPS = 3e-3, 3
RULES: dict[str, dict[str, Any]] = {
    "muon": {
        "muon_fp32_matmul_prec": "highest",
        "muon_extra_scale_factor": 0.2,
        "muon_use_nesterov": True,
        "decoupled_lr": 2e-3,
        "weight_decay_incr_style": "linear",
        "start_weight_decay": 0.1,
        "end_weight_decay": 0.5,
    },
    "sgd": {
        "sgd_momentum": 0.8,
        "weight_decay_incr_style": "cosine",
        "start_weight_decay": 0.0,
        "end_weight_decay": 0.5,
    },
}
KDA = {  # narrow projections, convolutions and low rank beside square matrices
    "linear_attention_type": "kda",
    "linear_attention_freq": "2",
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
MODELS = {"llama": {}, "experts": EXPERTS, "biased": BIASED, "kda": KDA}
ROWS = [
    ("sgd", "llama", 4, {"tp": 2, "strategy": "optim_grads"}, SP),
    ("sgd", "experts", 4, {"pp": 2, "ep": 2, "strategy": "optim_grads_params"}, {}),
    ("muon", "llama", 2, {"strategy": "no_shard"}, {}),
    ("muon", "llama", 4, {"tp": 2, "strategy": "optim"}, SP | OVERLAP),
    # replicated key and value projections
    ("muon", "llama", 4, {"tp": 4, "strategy": "no_shard"}, {}),
    ("muon", "llama", 4, {"pp": 2, "strategy": "optim_grads"}, ZB),
    ("muon", "experts", 4, {"ep": 2, "instances": 2, "strategy": "optim_grads"}, OVERLAP),
    (
        "muon",
        "experts",
        4,
        {"ep": 2, "instances": 2, "strategy": "optim"},
        {"outer_dp_sharding_strategy": "optim"},
    ),
    (
        "muon",
        "llama",
        4,
        {"instances": 2, "strategy": "optim_grads"},
        {"outer_dp_sharding_strategy": "optim"},
    ),
    ("muon", "experts", 4, {"tp": 2, "etp": 2, "strategy": "optim_grads_params"}, {}),
    ("muon", "kda", 2, {"tp": 2, "strategy": "optim"}, SP),
    (
        "muon",
        "biased",
        8,
        {"tp": 2, "etp": 1, "ep": 2, "instances": 2, "strategy": "optim_grads_params"},
        SP,
    ),
]


def case_of(rule: str, model: str) -> Case:
    optim = RULES[rule] | {"optimizer": rule, "lr": LR, "adam_eps": 1e-5}
    return Case(STEPS).but(optim=optim, model=MODELS[model])


# rule and dtypes -> sections of the configuration; a rank's shards have parts of matrices and of
# vectors
BYTES: dict[str, dict[str, Any]] = {
    "muon": {"optim": {"optimizer": "muon"}, "precision": {"params_dtype": "bf16"}},
    "muon, fp32": {"optim": {"optimizer": "muon", "muon_fp32_matmul_prec": "highest"}},
    "muon, blockwise": {"optim": {"optimizer": "muon", "muon_tp_mode": "blockwise"}},
    "half on the host": {
        "optim": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
    },
    "lion": {"optim": {"optimizer": "lion"}},
    "sgd": {"optim": {"optimizer": "sgd", "sgd_momentum": 0.0}},
    "adam, low": {
        "precision": {"params_dtype": "bf16", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp16"}
    },
    "adam, main fp16": {"precision": {"params_dtype": "bf16", "main_params_dtype": "fp16"}},
    "adam, average": {"optim": {"ema_decay": 0.9}, "precision": {"params_dtype": "bf16"}},
    "adam, main bf16": {"precision": {"params_dtype": "bf16", "main_params_dtype": "bf16"}},
}


def bytes_of(
    ctx: ParallelContext, cases: list[Case]
) -> list[tuple[int, int, dict[Any, int], dict[Any, int]]]:
    """Allocated and planned bytes of the optimizer, all-to-alls of a step and the planned ones."""
    results = []
    for case in cases:
        run = build_here(ctx, case)
        params = {
            bucket.params.shard.untyped_storage().data_ptr()
            for dp in run.data_parallel
            for bucket in dp.buckets
        }
        state = [
            t
            for t in run.optimizer.allocated_tensors
            if t.untyped_storage().data_ptr() not in params
        ]
        ctx.traffic.reset()
        batch = run.batch_iterator.next()
        assert batch is not None
        train_step(run, batch)
        counts = {
            (group, "all_to_all"): ctx.traffic.bytes(group, "all_to_all") for group in ctx.groups
        }
        planned = {
            key: count for key, count in sent_bytes(run.plan).items() if key[1] == "all_to_all"
        }
        sent = {key: count for key, count in counts.items() if count}
        results.append(
            (sum(t.nbytes for t in state), run.plan.resident_bytes.optimizer, sent, planned)
        )
    return results


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
def test_bytes_of_state_and_of_matrices_are_the_planned(strategy: str) -> None:
    """Law L5 for every rule and dtype."""
    sizes = {"tp": 2, "strategy": strategy}
    parallel = {SHORT_NAMES[name]: value for name, value in sizes.items()}
    one = Case(1).but(parallel=parallel, train={"micro_batch_size": 6}, model={"num_layers": 1})
    cases = [one.but(**each) for each in BYTES.values()]
    for results in run_ranks(4, bytes_of, cases, **sizes, shares=True):
        for name, (allocated, planned, sent, planned_sent) in zip(BYTES, results, strict=True):
            assert allocated == planned, name
            assert sent == planned_sent, name
            assert bool(sent) == name.startswith("muon"), name
            assert (("tp", "all_to_all") in sent) == (name in ("muon", "muon, fp32")), name


@cache
def single_rank(rule: str, model: str) -> list[Outcome]:
    return run_ranks(
        1,
        train_here,
        case_of(rule, model).but(train={"micro_batch_size": GLOBAL_BATCH}),
        shares=True,
    )


@pytest.mark.parametrize(("rule", "model", "num_ranks", "sizes", "options"), ROWS, ids=str)
def test_a_layout_trains_as_one_rank_does(
    rule: str, model: str, num_ranks: int, sizes: Any, options: Any
) -> None:
    parallel = {SHORT_NAMES[name]: value for name, value in sizes.items()} | options
    micro_batch = 1 if num_ranks == 8 else 3
    case = case_of(rule, model).but(parallel=parallel, train={"micro_batch_size": micro_batch})
    outcomes = run_ranks(num_ranks, train_here, case, **sizes, shares=True)
    assert_alike(
        outcomes, single_rank(rule, model), row=f"{rule} {model} {num_ranks} ranks {sizes}", lr=LR
    )
