"""The clock of a step: bubbles, overlap and the parts of the total, in closed form where there is
one.
"""

from dataclasses import replace
from itertools import pairwise

import pytest

from nanotrain.config.load import load
from nanotrain.parallel.pp.actions import ActionKind, PipelineShape
from nanotrain.parallel.pp.schedules import SCHEDULES, build_schedule
from nanotrain.parallel.pp.simulate import Costs, simulate
from nanotrain.planner.collectives import collective_s
from nanotrain.planner.hardware import gpu_of
from nanotrain.planner.kernels import memory_s
from nanotrain.planner.scenario import scenario_of
from nanotrain.planner.stage_time import Numel
from nanotrain.planner.step_time import (
    HOST_UPDATE,
    UPDATE_LAUNCHES,
    StepClock,
    predict_step,
    steps_of,
)
from tests.planner.scenarios import llama


def equal_stages(clock: StepClock, forward: float = 1.0, backward: float = 2.0) -> StepClock:
    """A clock on which every stage takes the same time and transfers take none."""
    times = {"F": forward, "B": backward, "I": backward - forward, "W": forward}
    clock.durations = {key: times[key[1].value] for key in clock.durations}
    clock.__dict__["transfer_s"] = 0.0
    return clock


def test_one_stage_has_no_bubble() -> None:
    time = predict_step(llama(8, mbs=1, gbs=32))
    assert time.bubble == pytest.approx(0, abs=1e-9)
    assert "pp" not in time.exposed


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 100), (8, 37)])
def test_equal_stages_wait_as_long_as_the_closed_form_says(p: int, m: int) -> None:
    clock = equal_stages(StepClock(llama(p, pp=p, gbs=m)))
    lengths, runs = clock.lengths, [clock.run(length) for length in clock.lengths]
    duration = runs[0].duration + (m - lengths[0]) * clock.per_microbatch(runs)
    assert duration == pytest.approx(3 * (m + p - 1))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_clock_agrees_with_the_simulator_of_schedules(name: str) -> None:
    v = 2 if name in ("interleaved", "zb-v", "dualpipev") else 1
    shape = PipelineShape(4, v, 8)
    clock = equal_stages(StepClock(llama(4, pp=4, v=v, gbs=8, pipeline_schedule=name)))
    expected = simulate(build_schedule(name, shape), costs=Costs(1, 2, 1, 0)).duration
    assert clock.run(8).duration == pytest.approx(expected)
    num_actions = sum(len(step.actions) for step in steps_of(name, shape))
    assert num_actions == sum(map(len, build_schedule(name, shape).actions))


@pytest.mark.parametrize(
    "values",
    [
        {"strategy": "optim"},
        {"tp": 4, "strategy": "optim_grads"},
        {"pp": 4, "gbs": 64},
        {"strategy": "optim_grads_params"},
    ],
)
def test_the_parts_add_up_to_the_total(values: dict[str, object]) -> None:
    time = predict_step(llama(16, **{"gbs": 32, **values}))
    parts = (
        time.compute,
        time.bubble,
        time.optimizer,
        time.data,
        time.host,
        *time.exposed.values(),
    )
    assert all(part >= 0 for part in parts)
    assert time.total == pytest.approx(sum(parts))
    assert time.likely[0] < time.total < time.likely[1]
    assert time.tokens_per_s_per_gpu == pytest.approx(
        time.scenario.config.train.global_batch_size * 4096 / time.total / 16
    )
    assert 0.05 < time.mfu < 0.75


@pytest.mark.parametrize("field", ["memory_bandwidth", "node", "network"])
def test_more_bandwidth_is_never_slower(field: str) -> None:
    slow = llama(64, tp=2, pp=2, gbs=128, strategy="optim")
    value = getattr(slow.gpu, field)
    faster = (
        1.5 * value if isinstance(value, float) else replace(value, bandwidth=1.5 * value.bandwidth)
    )
    fast = replace(slow, gpu=replace(slow.gpu, **{field: faster}))
    assert predict_step(fast).total <= predict_step(slow).total


def test_overlap_hides_reductions_and_gathers() -> None:
    exposed = predict_step(llama(64, strategy="optim", gbs=128))
    hidden = predict_step(
        llama(64, strategy="optim", gbs=128, overlap_grad_reduce=True, overlap_param_gather=True)
    )
    assert hidden.exposed["dp"] < 0.3 * exposed.exposed["dp"]
    assert hidden.compute == exposed.compute


def test_a_longer_step_extends_a_shorter_one_exactly() -> None:
    short, long = (predict_step(llama(8, pp=8, gbs=number)) for number in (31, 47))
    longer = predict_step(llama(8, pp=8, gbs=63))
    assert longer.total - long.total == pytest.approx(long.total - short.total)


def test_the_timeline_has_every_action() -> None:
    spans = StepClock(llama(16, pp=4, gbs=16)).timeline().spans
    assert [len(of_rank) for of_rank in spans] == [2 * 4] * 4
    assert all(one.end <= two.start for of_rank in spans for one, two in pairwise(of_rank))


def test_names_change_nothing() -> None:
    scenario = llama(8, gbs=16, run_dir="runs/one", tp=2)
    other = llama(8, gbs=16, run_dir="runs/two", tp=2)
    assert predict_step(scenario).total == predict_step(other).total


def test_an_update_on_the_host_takes_longer() -> None:
    plain, offloaded = (
        llama(8, gbs=8, strategy="optim", **more) for more in ({}, {"optimizer_cpu_offload": True})
    )
    assert predict_step(offloaded).optimizer > 2 * predict_step(plain).optimizer


def test_a_pipeline_of_many_nodes_or_little_memory_can_wait_for_its_transfers() -> None:
    fast, wide = (llama(size, engine="nanotron", pp=2, gbs=512) for size in (128, 512))
    assert predict_step(wide).exposed["pp"] > 20 * predict_step(fast).exposed["pp"]
    assert (
        predict_step(fast, memory_share=0.9).exposed["pp"] > 20 * predict_step(fast).exposed["pp"]
    )
    inside = llama(8, engine="nanotron", pp=2, gbs=512)
    assert predict_step(inside, memory_share=0.9).total == predict_step(inside).total


def test_without_a_pipeline_steps_on_many_nodes_lose_time_and_their_hosts_too() -> None:
    few, many = (
        predict_step(llama(size, engine="nanotron", tp=8, gbs=size)) for size in (256, 512)
    )
    assert (few.data, many.data) == (0.0, 0.7)
    assert many.host > few.host


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_instances_sum_their_gradient_shards_once_per_step(strategy: str) -> None:
    clocks = (
        StepClock(
            llama(512, strategy=strategy, gbs=2048, num_distributed_optimizer_instances=number)
        )
        for number in (1, 64)
    )
    runs = [(clock, clock.run(clock.shape.num_microbatches)) for clock in clocks]
    reductions = [max(0.0, clock.reduced_at(run, 0) - run.duration) for clock, run in runs]
    assert reductions[1] > reductions[0]
    assert (reductions[0] == 0) == (strategy == "optim_grads_params")


@pytest.mark.parametrize("number", [99, 100])
@pytest.mark.parametrize("name", SCHEDULES)
def test_few_microbatches_extend_to_many_of_unequal_stages(name: str, number: int) -> None:
    v = 2 if name in ("interleaved", "zb-v", "dualpipev") else 1
    clock = equal_stages(StepClock(llama(4, pp=4, v=v, gbs=number, pipeline_schedule=name)))
    clock.durations = {
        key: seconds * (1 + 0.1 * (key[0] % 3)) for key, seconds in clock.durations.items()
    }
    lengths, runs = clock.lengths, [clock.run(length) for length in clock.lengths]
    extended = runs[0].duration + (number - lengths[0]) * clock.per_microbatch(runs)
    assert extended == pytest.approx(clock.run(clock.shape.num_microbatches).duration, rel=0.02)


def exposed_experts(*flags: str) -> tuple[float, float]:
    """The share of a step of `deepseek_v3` on 2,048 GPUs in which nothing hides tokens on their
    way; its seconds.
    """
    loaded = load(["+config=deepseek_v3", *flags], to_train=False)
    time = predict_step(scenario_of(loaded.config, 2048, gpu=gpu_of("h100")))
    return time.exposed.get("ep", 0.0) / time.total, time.total


def test_turns_hide_half_of_the_transfers_of_deepseek_v3() -> None:
    (before, plain), (after, total) = (
        exposed_experts(),
        exposed_experts("--overlap-moe-expert-parallel-comm"),
    )
    print(f"exposed expert traffic {before:.1%} of the step, in turns {after:.1%}")
    assert after < 0.6 * before < 0.1 and total < plain


def test_pairs_end_together_on_the_clock() -> None:
    loaded = load(["+config=deepseek_v3", "--overlap-moe-expert-parallel-comm"], to_train=False)
    clock = StepClock(scenario_of(loaded.config, 2048, gpu=gpu_of("h100")))
    run, longer, more = map(clock.run, (40, 56, 72))
    steady, later = clock.hidden_s([run, longer])[3], clock.hidden_s([longer, more])[3]
    # none in warmup and cooldown
    assert steady == pytest.approx(later) and steady > run.hidden[3] / 40
    pairs = [step for step in run.steps if len(step.actions) == 2]
    assert pairs and all(len(step.received) + step.num_sent > 0 for step in pairs)
    drawn = [span for of_rank in clock.timeline().spans for span in of_rank]
    num_pairs = sum(len(step.actions) == 2 for step in clock.steps(clock.lengths[0]))
    assert sum(span.end < 0.999 * span.complete for span in drawn) == num_pairs


MOE = {"num_experts": 64, "moe_router_topk": 8, "moe_ffn_hidden_size": 1024, "strategy": "optim"}


@pytest.mark.parametrize(
    ("world_size", "values", "dense", "expert"),
    [
        (16, {"ep": 8}, 16, 2),
        (16, {"ep": 16}, 16, 1),
        (32, {"ep": 4, "tp": 2}, 16, 4),  # experts are as wide over tp
        (32, {"ep": 4, "tp": 2, "expert_tensor_parallel_size": 1}, 16, 8),
        (32, {"ep": 4, "num_distributed_optimizer_instances": 2}, 16, 4),
        (32, {"ep": 8, "pp": 2, "gbs": 64}, 16, 2),
        (32, {"ep": 8, "strategy": "no_shard"}, 1, 1),
        (16, {"ep": 4, "cp": 2, "gbs": 64}, 16, 4),
    ],
)
def test_an_update_is_of_the_shards_of_dense_and_of_expert_parameters(
    world_size: int, values: dict[str, object], dense: int, expert: int
) -> None:
    clock = StepClock(llama(world_size, **MOE | {"gbs": 128} | values))
    engine = clock.scenario.engine
    specs = clock.scenario.stages[0]
    numel = clock.stages.numel(specs)
    assert numel.expert > 0 and numel.dense > 0
    updated = numel.dense / dense + numel.expert / expert
    seconds = memory_s(clock.gpu, engine.optimizer.update_bytes * updated)
    seconds += UPDATE_LAUNCHES * engine.launches.operator_s
    assert clock.update_s(0) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("world_size", "values", "crosses"),
    [
        (8, {"pp": 8}, False),
        (16, {"pp": 2, "tp": 8}, True),
        (16, {"pp": 4, "tp": 4}, True),  # the first two neighbours are on one node
        (16, {"pp": 8, "tp": 2}, True),
        (32, {"pp": 8, "tp": 4}, True),
        (32, {"pp": 2, "tp": 4}, True),
    ],
)
def test_transfers_take_the_time_of_the_slowest_link(
    world_size: int, values: dict[str, object], crosses: bool
) -> None:
    clock = StepClock(llama(world_size, **{"gbs": 64} | values))
    num_bytes = clock.stages.sizes.outside * clock.stages.sizes.width
    inside, across = (
        collective_s(clock.gpu, "p2p", num_bytes=num_bytes, ranks=pair) for pair in ((0, 1), (7, 8))
    )
    assert across > 1.5 * inside
    assert clock.transfer_s == (across if crosses else inside)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_overlap_hides_something_and_at_most_what_computes(strategy: str) -> None:
    """A step with overlap is shorter than one without, by no more than there is to hide."""
    values = {"strategy": strategy, "gbs": 128}
    flags = {"overlap_grad_reduce": True}
    if strategy != "no_shard":
        flags["overlap_param_gather"] = True
    plain, hidden = (predict_step(llama(64, **values | more)) for more in ({}, flags))
    assert plain.exposed["dp"] > hidden.exposed["dp"] > 0
    assert hidden.total < plain.total
    assert plain.total - hidden.total <= plain.exposed["dp"]
    assert hidden.compute == plain.compute and hidden.optimizer == plain.optimizer


@pytest.mark.parametrize("fraction", [0.25, 0.5, 1.0])
def test_a_part_of_the_update_on_the_host_takes_its_share(fraction: float) -> None:
    values = {"gbs": 8, "strategy": "optim"}
    host = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
    plain, offloaded = (StepClock(llama(8, **values | more)) for more in ({}, host))
    numel = plain.stages.numel(plain.scenario.stages[0])
    updated = fraction * numel.dense / 8
    engine = plain.scenario.engine
    host_bytes = updated * engine.optimizer.update_bytes
    copied = updated * (4 + 2)  # main gradients in fp32 there, parameters in bf16 back
    more = copied / plain.gpu.host_bandwidth + host_bytes / HOST_UPDATE
    assert offloaded.update_s(0) - plain.update_s(0) == pytest.approx(more, rel=1e-6)


def test_of_overlapped_gathers_the_first_bucket_is_waited_for() -> None:
    values = {"strategy": "optim", "gbs": 128, "overlap_param_gather": True}
    values["overlap_grad_reduce"] = True
    plain = StepClock(llama(64, strategy="optim", gbs=128))
    seconds = plain.gathers_s(0)
    numel = plain.stages.numel(plain.scenario.stages[0])
    for size in (numel.dense // 4, numel.dense // 16):
        clock = StepClock(llama(64, **values, ddp_bucket_size=size))
        num_buckets = round(numel.dense / size)
        forward_s = clock.durations[0, ActionKind.forward]
        assert seconds / num_buckets > seconds - forward_s, "the others are hidden"
        assert clock.gathers_s(0) == pytest.approx(seconds / num_buckets)


def test_replicas_of_expert_shards_are_summed_in_their_own_groups() -> None:
    """Of 32 ranks two instances: dense shards are over 16, those of ep 8 over 2."""
    more = MOE | {"ep": 8, "gbs": 128, "num_distributed_optimizer_instances": 2}
    clock = StepClock(llama(32, **more))
    numel = Numel(1_600_000, 3_200_000, 1)
    itemsize = clock.stages.precision.grads.itemsize
    expected = 0.0
    for group, operation, number in (
        ("dp_shard", "reduce_scatter", numel.dense),
        ("expert_dp_shard", "reduce_scatter", numel.expert),
        ("dp_replicate", "all_reduce", numel.dense // 16),
        ("expert_dp_replicate", "all_reduce", numel.expert // 2),
    ):
        ranks = clock.scenario.ranks(group)
        num_bytes = number * itemsize
        expected += collective_s(clock.gpu, operation, num_bytes=num_bytes, ranks=ranks)
    assert clock._bucket_reduction_s(numel, 1) == pytest.approx(expected)
