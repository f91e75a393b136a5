"""Law L1 for multi-token prediction: every layout computes what one rank computes, in the model and
in its layers.
"""

from typing import Any

import pytest

from nanotrain.comm.parallel_context import ParallelContext
from tests.harness import run_ranks
from tests.laws.compare import Row, assert_row_trains_as_one_rank
from tests.laws.test_bytes import measure_all
from tests.laws.test_mla import DEEPSEEK
from tests.laws.test_model_features import EXPERTS
from tests.laws.worlds import Case, build_here

# of the gradient, much more than the default, so that a wrong one shows
MTP = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.8}
REPEATED = MTP | {"mtp_use_repeated_layer": True}
MODELS = {
    "repeated": REPEATED | {"num_layers": 3},
    "repeated experts": EXPERTS
    | REPEATED
    | {"moe_router_load_balancing_type": ["seq_aux_loss"], "moe_aux_loss_coeff": [0.1]},
    "tied": MTP | {"num_layers": 3},
    "untied": MTP | {"untie_embeddings_and_output_weights": True, "hidden_dropout": 0.1},
    "deepseek": DEEPSEEK | {"num_layers": 2, "moe_layer_freq": "[0]*1+[1]*1", "mtp_num_layers": 1},
    "of a pattern": EXPERTS
    | MTP
    | {
        "num_layers": 3,
        "hybrid_layer_pattern": "ME*/*E/*E",  # the last layer of the model is attention alone
        "mamba_state_dim": 6,
        "mamba_head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_num_groups": 4,
    },
}
SP, ZB, ZERO3 = (
    {"sequence_parallel": True},
    {"pipeline_schedule": "zb-h1"},
    {"strategy": "optim_grads_params"},
)
VPP = {"pipeline_schedule": "interleaved", "num_virtual_stages_per_pipeline_rank": 2}
LAYOUTS: list[Row] = [
    ("untied", 2, {"strategy": "optim_grads", "tp": 2}, {}),
    ("untied", 2, {"strategy": "optim", "cp": 2}, {}),
    ("untied", 2, ZERO3, {"reshard_after_forward": False}),
    ("untied", 4, ZERO3 | {"pp": 2}, ZB),
    ("tied", 2, ZERO3, {"overlap_param_gather": True, "ddp_average_in_collective": True}),
    (
        "tied",
        2,
        {"strategy": "no_shard", "pp": 2},
        VPP | {"pipeline_model_parallel_layout": "Et|tt|m*2|L"},
    ),
    ("tied", 4, {"strategy": "optim", "tp": 2, "pp": 2}, ZB | SP),
    (
        "tied",
        4,
        ZERO3 | {"pp": 2, "vpp": 2, "schedule": "dualpipev"},
        {"pipeline_model_parallel_layout": "E|t|t|tmmL"},
    ),
    ("repeated", 2, ZERO3, {"overlap_param_gather": True}),
    ("repeated", 4, {"strategy": "optim_grads", "tp": 2, "pp": 2}, ZB | SP),
    ("repeated experts", 4, ZERO3 | {"tp": 2, "ep": 2, "etp": 1, "cp": 2}, {}),
    ("of a pattern", 2, {"strategy": "optim_grads", "cp": 2}, {}),
    ("of a pattern", 4, ZERO3 | {"tp": 2, "pp": 2, "ep": 2, "etp": 1}, SP),
    ("deepseek", 2, {"strategy": "optim_grads", "ep": 2}, {}),
    ("deepseek", 4, ZERO3 | {"tp": 2, "pp": 2, "etp": 1, "ep": 2}, {}),
]


@pytest.mark.parametrize("row", LAYOUTS, ids=str)
def test_multi_token_prediction_trains_as_on_one_rank(row: Row) -> None:
    assert_row_trains_as_one_rank(row, MODELS)


@pytest.mark.parametrize(
    ("memory", "options"),
    [
        ({"recompute_granularity": "full"}, {}),
        # all messages have one size, so wrong counts would change the gradients alone
        ({"recompute_granularity": "full"}, {"moe_expert_rank_capacity_factor": 2.0}),
        ({"recompute_granularity": "selective", "recompute_modules": ["moe"]}, {}),
    ],
    ids=str,
)
def test_every_pass_of_a_repeated_layer_is_recomputed_with_its_own_rows(
    memory: dict[str, Any], options: dict[str, Any]
) -> None:
    """Both predictions send rows by one dispatcher, in numbers of their own."""
    row: Row = ("repeated experts", 2, {"strategy": "optim_grads", "ep": 2}, options)
    assert_row_trains_as_one_rank(row, MODELS, memory=memory)


AHEAD = {"overlap_param_gather": True}
# of the model, of the parallel section, of recomputation
GATHERED = [
    ("tied", {}, {}),
    ("untied", AHEAD | {"fsdp_double_buffer": True}, {}),
    ("tied", AHEAD | {"fsdp_prefetch_depth": 2}, {"recompute_granularity": "full"}),
    ("untied", {"reshard_after_forward": False}, {}),
    ("experts", AHEAD, {}),
    ("repeated", AHEAD, {"recompute_granularity": "full"}),
]


def test_gathers_of_multi_token_prediction_are_planned() -> None:
    """Law L5: units that read embedding and head too, gathered one by one."""
    models = MODELS | {"experts": MTP | {"num_experts": 2}}
    strategy = {"data_parallel_sharding_strategy": "optim_grads_params"}
    train = {"micro_batch_size": 1, "global_batch_size": 4}
    cases = [
        Case(steps=1).but(
            train=train, model=models[model], parallel=strategy | options, memory=memory
        )
        for model, options, memory in GATHERED
    ]
    for by_case in run_ranks(2, measure_all, cases, strategy="optim_grads_params", shares=True):
        for measured, row in zip(by_case, GATHERED, strict=True):
            assert (
                "fsdp_double_buffer" in row[1]
                or measured["resident"] == measured["planned resident"]
            ), row
            assert measured["sent"] == measured["planned sent"], row


def scales_of(ctx: ParallelContext, case: Case) -> tuple[list[float], list[float]]:
    """The factors of the summed losses of the layers in a step, and by hand."""
    run = build_here(ctx, case)
    batch = run.batch_iterator.next()
    assert batch is not None
    number = run.plan.shape.num_mtp_predictions
    by_hand = []
    for depth in range(number):
        targets = sum(float(part.mtp[depth].num_target_tokens) for part in batch.microbatches)
        # the mean over layers of the means over their targets, in units of the summed loss
        by_hand.append(0.6 / number * batch.num_target_tokens / targets)
    return list(run.parts.context(batch)["mtp_scales"]), by_hand


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_scaling_factor_is_of_the_mean_over_the_layers(number: int) -> None:
    case = Case(1).but(
        model={"mtp_num_layers": number, "mtp_loss_scaling_factor": 0.6},
        train={"micro_batch_size": 4},
    )
    ((scales, by_hand),) = run_ranks(1, scales_of, case, shares=True)
    assert scales == pytest.approx(by_hand, rel=1e-9) and len(scales) == number
    assert len({*scales}) == number, "layers further on have fewer targets"
