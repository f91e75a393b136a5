"""Laws of frozen parameters: `--freeze` and `--train-only`.

They have no gradient, no optimizer state and no bytes of either; they never change; and any layout
trains the others as one rank does.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.plan.traffic import sent_bytes
from nanotrain.spec.trainable import TrainableSet
from nanotrain.train.run import Run
from nanotrain.train.step import microbatch_contexts, train_step
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.command_line import (
    arguments,
    assert_same_to_the_bit,
    run_command_lines,
    saved_tensors,
)
from tests.laws.compare import assert_alike
from tests.laws.test_layer_kinds import MODELS
from tests.laws.worlds import (
    GLOBAL_BATCH,
    MODEL,
    SEQ_LENGTH,
    VOCAB_SIZE,
    Case,
    Outcome,
    assemble,
    build_here,
    micro_batch_size,
    outcome_of,
    train_here,
    train_steps,
)

LR = 3e-3
DENSE: dict[str, Any] = {"num_layers": 3}
EXPERTS = {
    "num_layers": 2,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 22,
    "moe_aux_loss_coeff": 1e-2,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_bias_update_rate": 0.01,
}
DSA = MODELS["sparse attention"] | {"dsa_indexer_share_freq": "0"}
MODEL_OF = {"dense": DENSE, "experts": EXPERTS, "dsa": DSA}
# the trained parameters of a model: a name for messages, and patterns
LOWER = {"freeze": ["embedding.*", "layers.0.*"]}
MIDDLE = {"train_only": ["layers.1.attention.*"], "freeze": ["*.output.weight"]}
EMBEDDING = {"train_only": ["embedding.*"]}
ROUTERS = {"freeze": ["*.router.*", "layers.1.mlp.experts.up.*"]}
INDEXER = {"train_only": ["layers.*.attention.indexer.*"]}
SP = {"sequence_parallel": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# model, patterns, ranks, sizes, options of the parallel section, other sections
ROWS: list[tuple[str, dict[str, list[str]], int, dict[str, Any], dict[str, Any], Any]] = [
    ("dense", LOWER, 2, {"strategy": "no_shard"}, OVERLAP, {}),
    ("dense", MIDDLE, 2, {"strategy": "optim"}, OVERLAP, {}),
    ("dense", LOWER, 2, {"strategy": "optim_grads_params"}, OVERLAP, {}),
    ("dense", MIDDLE, 2, {"strategy": "optim_grads"}, {}, {"memory": FULL}),
    ("dense", LOWER, 2, {"tp": 2}, SP, {}),
    ("dense", LOWER, 3, {"pp": 3}, {"pipeline_schedule": "1f1b"}, {}),
    ("dense", MIDDLE, 3, {"pp": 3}, {"pipeline_schedule": "zb-h1"}, {}),
    ("dense", EMBEDDING, 3, {"pp": 3}, {"pipeline_schedule": "gpipe"}, {}),
    ("dense", MIDDLE, 2, {"cp": 2}, {}, {}),
    ("experts", ROUTERS, 4, {"ep": 2, "strategy": "optim"}, {}, {}),
    ("experts", LOWER, 2, {"ep": 2, "strategy": "optim_grads_params"}, {}, {}),
    ("dsa", INDEXER, 2, {"tp": 2}, SP, {}),
]


def case_of(model: str, patterns: dict[str, list[str]], steps: int = 2) -> Case:
    optim = {"lr": LR, "adam_eps": 1e-5} | patterns
    return Case(steps).but(model=MODEL_OF[model], optim=optim)


@cache
def one_rank(model: str, patterns: str, steps: int = 2) -> Outcome:
    """The outcome of one rank; patterns as JSON, as the key of the cache."""
    case = case_of(model, json.loads(patterns), steps).but(train={"micro_batch_size": GLOBAL_BATCH})
    ((outcome,),) = [run_ranks(1, train_here, case, shares=True)]
    return outcome


@cache
def initial(model: str) -> dict[str, torch.Tensor]:
    """The initial weights by name."""
    case = case_of(model, {}).but(train={"micro_batch_size": GLOBAL_BATCH})
    ((outcome,),) = [run_ranks(1, build_only, case, shares=True)]
    return assemble([outcome])


def build_only(ctx: ParallelContext, case: Case) -> Outcome:
    return outcome_of(build_here(ctx, case), [])


def measured(ctx: ParallelContext, case: Case) -> tuple[Outcome, dict[str, int]]:
    """The outcome of a case, and bytes of the plan and of the run."""
    run = build_here(ctx, case)
    planned = run.plan.resident_bytes
    counts = {
        "resident": resident_bytes(run),
        "planned resident": planned.total - planned.grad_buckets - planned.units,
    }
    first = train_steps(run, 1)
    ctx.traffic.reset()
    rest = train_steps(run, case.steps - 1)
    for dp in run.data_parallel:
        dp.wait_for_params()
    # tokens of experts depend on the routers
    planned_bytes = {key: n for key, n in sent_bytes(run.plan).items() if key[0] != "ep"}
    counts["planned sent"] = sum(planned_bytes.values()) * (case.steps - 1)
    counts["sent"] = sum(ctx.traffic.bytes(group, op) for group, op in planned_bytes)
    for dp in run.data_parallel:
        for name, (param, _) in dp._views.items():
            assert param.requires_grad == dp.params[name].spec.is_trainable, name
    return outcome_of(run, [*first, *rest]), counts


def resident_bytes(run: Run) -> int:
    """Bytes that are allocated for parameters, gradients and optimizer state between steps."""
    held = list(run.optimizer.allocated_tensors)
    for dp in run.data_parallel:
        for bucket in dp.buckets:
            held += [bucket.params.full, bucket.params.shard]
            if hasattr(bucket, "grads"):
                held += [bucket.grads.shard, bucket.grads.main]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}
    return sum(storages.values())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[2:5]}")
def test_every_layout_trains_the_rest_as_one_rank_and_holds_the_planned_bytes(row: Any) -> None:
    model, patterns, num_ranks, sizes, options, sections = row
    parallel = {SHORT_NAMES[name]: size for name, size in sizes.items()} | options
    train = {"micro_batch_size": micro_batch_size(num_ranks, sizes)}
    case = case_of(model, patterns).but(parallel=parallel, train=train, **sections)
    found = run_ranks(num_ranks, measured, case, **sizes, shares=True)
    outcomes = [outcome for outcome, _ in found]
    single = one_rank(model, json.dumps(patterns))
    assert_alike(outcomes, [single], row=str(row), lr=LR)
    trainable = TrainableSet(*(tuple(patterns.get(key, ())) for key in ("freeze", "train_only")))
    weights = assemble(outcomes)
    for name, before in initial(model).items():
        is_same = torch.equal(weights[name], before)
        assert is_same or trainable.includes(name), f"{name} is frozen and has changed"
    changed = [name for name, before in initial(model).items() if not weights[name].equal(before)]
    assert changed
    for _, counts in found:
        assert counts["resident"] == counts["planned resident"], row
        assert counts["sent"] == counts["planned sent"], row


def flops_of_a_step(ctx: ParallelContext, cases: list[Case]) -> list[dict[str, int]]:
    """FLOPs of a step of each case, and of its forward passes."""
    counts = []
    for case in cases:
        run = build_here(ctx, case)
        batch = run.batch_iterator.next()
        assert batch is not None
        contexts = microbatch_contexts(run, batch, loss_scale=1.0)
        with FlopCounterMode(display=False) as forward, torch.no_grad():
            for context in contexts:
                run.runnable[0].module(None, context)
        with FlopCounterMode(display=False) as step:
            train_step(run, batch)
        counts.append({"forward": forward.get_total_flops(), "step": step.get_total_flops()})
    return counts


def test_a_step_computes_no_product_that_only_frozen_weights_need() -> None:
    model = DENSE | {"untie_embeddings_and_output_weights": True}
    sets: list[dict[str, list[str]]] = [
        {"train_only": ["head.weight"]},
        {"train_only": ["layers.2.mlp.down.weight"]},
        {"train_only": ["layers.2.mlp.*"]},
    ]
    cases = [case_of("dense", patterns).but(model=model) for patterns in sets]
    cases = [case.but(train={"micro_batch_size": GLOBAL_BATCH}) for case in cases]
    ((head, down, mlp),) = run_ranks(1, flops_of_a_step, cases, shares=True)
    tokens = GLOBAL_BATCH * SEQ_LENGTH
    logits = 2 * tokens * MODEL.hidden_size * VOCAB_SIZE
    linear = 2 * tokens * MODEL.hidden_size * MODEL.ffn_hidden_size
    assert head["step"] - head["forward"] == logits  # its wgrad
    assert down["step"] - down["forward"] == logits + linear  # dgrad of the head, wgrad of down
    # besides: dgrad of down, wgrad of gate and up, but no dgrad of them
    assert mlp["step"] - mlp["forward"] == logits + 4 * linear


ONE_AND_ONE = "--train-iters 2 --micro-batch-size 6 --params-dtype bf16 --ema-decay 0.8"
ATTENTION = "--train-only layers.*.attention.*"


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_a_resume_with_the_same_set_is_exact_and_frozen_weights_are_saved(
    tmp_path: Path, strategy: str
) -> None:
    how = f"{ONE_AND_ONE} --data-parallel-sharding-strategy {strategy} {ATTENTION}"
    full, halves = tmp_path / "full", tmp_path / "halves"
    stopping = arguments(halves, how, "--exit-interval 1")
    run_ranks(2, run_command_lines, arguments(full, how), stopping, stopping, strategy=strategy)
    assert_same_to_the_bit(halves, full)
    names = saved_tensors(full)
    assert "model/embedding.word.weight" in names
    assert not any("embedding" in name for name in names if not name.startswith("model/"))


def losses_of(ctx: ParallelContext, cases: list[Case]) -> list[list[float]]:
    return [train_here(ctx, case).losses for case in cases]


def test_attention_is_dense_where_only_its_indexer_is_trained() -> None:
    cases = []
    for patterns in (INDEXER, {}):
        case = case_of("dsa", patterns, 1).but(train={"micro_batch_size": GLOBAL_BATCH})
        cases += [case, case.but(model={"dsa_indexer_topk": SEQ_LENGTH})]
    ((warm_up, dense, trained, dense_trained),) = run_ranks(1, losses_of, cases, shares=True)
    assert warm_up == dense == dense_trained
    assert trained != pytest.approx(dense, rel=1e-4)
