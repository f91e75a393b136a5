"""Pipelines of several ranks are bit-equal to one rank and notify their callbacks alike."""

import random
import time
from functools import partial

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.kernels.deferred_wgrad import WgradQueue
from nanotrain.parallel.pp.actions import PipelineShape, Schedule
from nanotrain.parallel.pp.executor import (
    MAX_SENDS,
    Pipeline,
    RunnableStage,
    run_forward,
    run_schedule,
)
from nanotrain.parallel.pp.schedules import SCHEDULES, forward_only
from nanotrain.parallel.pp.simulate import simulate
from nanotrain.parallel.pp.transfers import TransferBatch, plan_rank
from tests.harness import ranks
from tests.parallel.pp.random_schedules import random_schedule
from tests.parallel.pp.toys import B, H, Recorder, S, ToyStage, batches, reference

SCALE = 0.125
VARIANTS = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("zb-h1", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("gpipe", 2),
    ("zb-v", 2),
    ("dualpipev", 2),
]


def pipeline_of(ctx: ParallelContext) -> Pipeline:
    pipeline = Pipeline(ctx.group("pp"), (B, S, H), torch.float32, torch.device("cpu"))
    pipeline.connect()
    return pipeline


def run_and_compare(
    pipeline: Pipeline,
    schedule: Schedule,
    shape: PipelineShape,
    *,
    has_queue: bool = True,
    tolerance: float = 0.0,
) -> list[ToyStage]:
    """Run a step and compare everything with one rank; returns this rank's stages."""
    modules, recorders = {}, {}
    for index in sorted({action.stage for action in schedule.actions[pipeline.group.index]}):
        modules[index] = ToyStage(
            index, shape.num_stages, queue=WgradQueue() if has_queue else None
        )
        recorders[index] = Recorder(modules[index])
    stages = {
        index: RunnableStage(module, (recorders[index],), module.queue)
        for index, module in modules.items()
    }
    expected, references = reference(shape.num_stages, shape.num_microbatches, grad_scale=SCALE)

    loss = run_schedule(
        plan_rank(schedule, pipeline.group.index),
        stages,
        microbatches=batches(shape.num_microbatches),
        grad_scale=SCALE,
        pipeline=pipeline,
    )

    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    close(loss, expected if shape.num_stages - 1 in modules else torch.zeros(()))
    for index, module in modules.items():
        recorders[index].check(module, shape.num_microbatches)
        for name, param in module.named_parameters():
            where = f"gradient of {name} of stage {index} in {shape}"
            close(
                param.grad,
                references[index].get_parameter(name).grad,
                msg=lambda text, where=where: f"{where}: {text}",
            )
    return list(modules.values())


def run_all(ctx: ParallelContext, largest: int) -> None:
    pipeline = pipeline_of(ctx)
    for name, num_stages_per_rank in VARIANTS:
        for num_microbatches in range(1, largest + 1):
            shape = PipelineShape(pipeline.group.size, num_stages_per_rank, num_microbatches)
            schedule = SCHEDULES[name](shape)
            modules = run_and_compare(pipeline, schedule, shape)
            bound = simulate(schedule).peak_in_flight[pipeline.group.index]
            assert max(module.peak_alive for module in modules) <= bound, (name, shape)
            if num_stages_per_rank == 1:
                assert modules[0].peak_alive == bound, (name, shape)


@ranks(2, pp=2, shares=True)
def test_two_ranks_equal_one_in_every_schedule_with_1_to_9_microbatches(ctx):
    run_all(ctx, 9)


@ranks(4, pp=4, shares=True)
def test_four_ranks_equal_one_in_every_schedule_with_1_to_9_microbatches(ctx):
    run_all(ctx, 9)


@ranks(3, pp=3, shares=True)
def test_split_backwards_are_right_where_no_layer_can_defer(ctx):
    for num_microbatches in (1, 4):
        shape = PipelineShape(3, 1, num_microbatches)
        run_and_compare(pipeline_of(ctx), SCHEDULES["zb-h1"](shape), shape, has_queue=False)


@ranks(3, pp=3, shares=True)
def test_any_valid_order_runs(ctx):
    pipeline = pipeline_of(ctx)
    for seed in range(12):
        chance = random.Random(seed)
        shape = PipelineShape(3, chance.choice((1, 2)), chance.randint(1, 5))
        schedule = random_schedule(shape, chance, is_split=chance.random() < 0.5)
        # Microbatches come in any order, and sums of floats depend on it.
        run_and_compare(pipeline, schedule, shape, tolerance=1e-5)


@ranks(3, pp=3, shares=True)
def test_ranks_of_unequal_speed_give_the_same_results(ctx):
    pipeline, chance = pipeline_of(ctx), random.Random(ctx.rank)
    shape = PipelineShape(3, 2, 4)
    register_module_forward_pre_hook(lambda *_: time.sleep(chance.random() / 200))
    run_and_compare(pipeline, SCHEDULES["interleaved"](shape), shape)


@ranks(2, pp=2, shares=True)
def test_validation_runs_forward_only_and_sums_on_the_rank_of_the_last_stage(ctx):
    pipeline = pipeline_of(ctx)
    for name, num_stages_per_rank in (("gpipe", 1), ("gpipe", 2), ("zb-v", 2)):
        for num_microbatches in (1, 3, 4):
            shape = PipelineShape(2, num_stages_per_rank, num_microbatches)
            expected, _ = reference(shape.num_stages, num_microbatches, grad_scale=1.0)
            schedule = forward_only(SCHEDULES[name](shape))
            modules = {
                i: ToyStage(i, shape.num_stages)
                for i in {action.stage for action in schedule.actions[ctx.rank]}
            }
            stages = {index: RunnableStage(module) for index, module in modules.items()}

            plan = plan_rank(schedule, ctx.rank)
            loss = run_forward(
                plan, stages, microbatches=batches(num_microbatches), pipeline=pipeline
            )

            assert torch.equal(
                loss, expected if shape.num_stages - 1 in modules else torch.zeros(())
            )
            assert all(
                param.grad is None for module in modules.values() for param in module.parameters()
            )


@ranks(2, pp=2, shares=True)
def test_sent_outputs_are_freed(ctx):
    # Given a schedule that keeps nine graphs on the first rank,
    shape = PipelineShape(2, 1, 9)
    (module,) = run_and_compare(pipeline_of(ctx), SCHEDULES["gpipe"](shape), shape)

    # then the graphs are kept but not what they have put out: those under way and the newest one
    # only.
    assert module.peak_alive == 9
    if ctx.rank == 0:
        assert module.peak_outputs <= MAX_SENDS + 1


@ranks(3, pp=3, shares=True)
def test_sent_bytes_are_the_planned_ones(ctx):
    pipeline = pipeline_of(ctx)
    for name, num_stages_per_rank in VARIANTS:
        shape = PipelineShape(3, num_stages_per_rank, 5)
        before = ctx.traffic.bytes("pp", "p2p")
        run_and_compare(pipeline, SCHEDULES[name](shape), shape)
        sent = ctx.traffic.bytes("pp", "p2p") - before
        plan = plan_rank(SCHEDULES[name](shape), ctx.rank)
        num_sends = sum(len(step.sends) for step in plan.steps if isinstance(step, TransferBatch))
        assert sent == num_sends * B * S * H * 4, (name, shape)


@pytest.mark.parametrize("num_stages_per_rank", [2, 3])
@pytest.mark.parametrize("num_microbatches", [1, 2, 5])
def test_one_rank_passes_hidden_states_between_its_own_stages(
    num_stages_per_rank, num_microbatches
):
    shape = PipelineShape(1, num_stages_per_rank, num_microbatches)
    for name in ("gpipe", "interleaved"):
        run_and_compare(Pipeline.single_rank(), SCHEDULES[name](shape), shape)
