"""Stages: what their actions run, their parameters on a rank, sharded parameters, and the host."""

from dataclasses import replace

import pytest
from torch.utils.flop_counter import FlopCounterMode

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.parallel.pp.actions import ActionKind
from nanotrain.plan.plan import plan_run
from nanotrain.planner.parts import Streams
from nanotrain.planner.stage_time import Stages
from nanotrain.spec.stages import StageSpec
from tests.harness import run_ranks
from tests.laws.worlds import Case, build_here, train_steps
from tests.planner.scenarios import llama

FORWARD, BACKWARD = ActionKind.forward, ActionKind.full_backward


def times(stages: Stages) -> dict[tuple[int, ActionKind], Streams]:
    """The streams of the actions of the first stage."""
    return {
        (0, kind): stages.streams(stages.scenario.stages[0][0], kind)
        for kind in (FORWARD, BACKWARD)
    }


TIED = {"untie_embeddings_and_output_weights": False}


@pytest.mark.parametrize(
    "values",
    [{}, {"tp": 2}, {"pp": 2, "gbs": 8, "mtp_num_layers": 1}, {"num_experts": 8, "ep": 4}, TIED],
)
def test_parameters_are_those_of_the_plan(values: dict[str, object]) -> None:
    scenario = llama(8, **values)
    stages = Stages(scenario)
    for rank, specs in enumerate(scenario.stages):
        plan = plan_run(scenario.config, 8, rank=rank * scenario.topology.dense.stride("pp"))
        for spec, stage in zip(specs, plan.stages, strict=True):
            numel = stages.numel([spec])
            assert numel.dense + numel.expert == sum(param.box.numel for param in stage.params)
            assert numel.expert == sum(
                param.box.numel for param in stage.params if param.spec.is_expert
            )
            assert numel.tensors == len(stage.params)


def test_full_recomputation_adds_a_forward_of_the_layers() -> None:
    plain, full = (
        times(Stages(llama(8, **more))) for more in ({}, {"recompute_granularity": "full"})
    )
    assert full[0, FORWARD].compute == plain[0, FORWARD].compute
    added = full[0, BACKWARD].compute - plain[0, BACKWARD].compute
    assert 0.8 * plain[0, FORWARD].compute < added < plain[0, FORWARD].compute


def recomputed_flops(ctx: ParallelContext, num_mtp: int | None, more: dict[str, object]) -> int:
    """FLOPs of a step of a run that are added by full recomputation."""
    totals = []
    for granularity in ("full", None):
        memory = {"recompute_granularity": granularity, **(more if granularity else {})}
        case = Case(overrides={"model": {"mtp_num_layers": num_mtp}, "memory": memory})
        run = build_here(ctx, case)
        with FlopCounterMode(display=False) as counter:
            train_steps(run, 1)
        totals.append(counter.get_total_flops())
    return totals[0] - totals[1]


def planned_flops(stages: Stages, layers: range) -> list[float]:
    """FLOPs that run again of layers of a stage with the head, and of two of multi-token prediction
    behind them.
    """
    spec = StageSpec(0, layers.start, layers.stop, has_embedding=False, has_head=True)
    units = dict(zip(stages.modules(spec), stages.units(spec), strict=True))
    assert not units["head"].recomputed
    return [sum(part.flops for part in units[layer].recomputed) for layer in (*layers, 2, 3)]


METHODS = [{}, {"recompute_method": "block", "recompute_num_layers": 1}]


@pytest.mark.parametrize("more", METHODS, ids=["uniform", "block"])
def test_multi_token_prediction_runs_its_block_again_as_a_run_does(more: dict[str, object]) -> None:
    """Not its projection and not the head, also behind no layers of the model."""
    added = run_ranks(1, recomputed_flops, None, more)[0]
    per_layer = added if more else added // 2
    assert run_ranks(1, recomputed_flops, 2, more)[0] - added == 2 * per_layer > 0
    model = {"num_layers": 2, "mtp_num_layers": 2, "recompute_granularity": "full"}
    stages = Stages(llama(1, engine="nanotrain", **model, **more))
    first, second, *further = planned_flops(stages, range(2))
    assert first > 0 and further == [first, first]
    assert second == (0 if more else first)
    assert planned_flops(stages, range(2, 2)) == further


def test_selective_recomputation_adds_the_modules() -> None:
    plain, attention, mlp = (
        times(Stages(llama(8, **more)))[0, BACKWARD].compute
        for more in (
            {},
            {"recompute_granularity": "selective"},
            {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
        )
    )
    assert plain < attention < mlp


def test_pointwise_recomputation_repeats_no_product_and_less_than_norms_and_mlps() -> None:
    plain, norms, pointwise, mlp = (
        times(
            Stages(
                llama(
                    8,
                    engine="nanotrain",
                    recompute_granularity="selective",
                    recompute_modules=modules,
                )
            )
        )
        for modules in (["core_attn"], ["layernorm"], ["pointwise"], ["pointwise", "mlp"])
    )
    assert norms[0, BACKWARD].products == pointwise[0, BACKWARD].products
    assert pointwise[0, BACKWARD].products < plain[0, BACKWARD].products
    assert pointwise[0, BACKWARD].products < mlp[0, BACKWARD].products
    assert norms[0, BACKWARD].compute < pointwise[0, BACKWARD].compute
    assert pointwise[0, BACKWARD].compute < mlp[0, BACKWARD].compute
    assert pointwise[0, BACKWARD].collectives == norms[0, BACKWARD].collectives


def test_sharded_parameters_are_gathered_beside_the_unit_before() -> None:
    values = {"strategy": "optim_grads_params", "gbs": 64}
    exposed = times(Stages(llama(64, **values)))
    hidden = times(Stages(llama(64, overlap_param_gather=True, overlap_grad_reduce=True, **values)))
    assert hidden[0, FORWARD].exposed["dp"] < 0.5 * exposed[0, FORWARD].exposed["dp"]
    assert hidden[0, BACKWARD].exposed["dp"] < 0.7 * exposed[0, BACKWARD].exposed["dp"]
    kept = times(Stages(llama(64, reshard_after_forward=False, **values)))
    assert kept[0, FORWARD].exposed["dp"] == exposed[0, FORWARD].exposed["dp"]
    # gathered once, not again
    assert kept[0, BACKWARD].exposed["dp"] < 0.9 * exposed[0, BACKWARD].exposed["dp"]


def test_small_layers_wait_for_the_host() -> None:
    small = {
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_query_groups": 8,
        "ffn_hidden_size": 1024,
        "seq_length": 512,
    }
    for values, is_bound in ((small, True), ({}, False)):
        stages = Stages(llama(8, **values))
        streams = times(stages)[0, FORWARD]
        assert (stages.seconds(streams) > streams.seconds) == is_bound
    graphs = Stages(llama(8, options={"cuda_graphs": True}, **small))
    assert graphs.host_s(times(graphs)[0, FORWARD]) < times(graphs)[0, FORWARD].seconds


@pytest.mark.parametrize("contention", [0.0, 0.1, 1.0])
def test_turns_hide_the_shorter_of_transfer_and_operators_but_for_contention(
    contention: float,
) -> None:
    scenario = llama(8)
    overlap = replace(scenario.engine.overlap, contention=contention)
    stages = Stages(replace(scenario, engine=replace(scenario.engine, overlap=overlap)))
    factor = scenario.engine.operators.time_factor
    assert stages._overlapped_s(2.0, 9.0) == pytest.approx((1 - contention) * 2.0)
    assert stages._overlapped_s(9.0, 2.0) == pytest.approx((1 - contention) * factor * 2.0)
    assert stages._overlapped_s(0.0, 2.0) == stages._overlapped_s(2.0, 0.0) == 0.0
