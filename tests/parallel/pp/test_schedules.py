"""Properties of every schedule, for any number of stages and microbatches (L6); the order of
interleaved 1F1B.
"""

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from nanotrain.config.parallel import ParallelConfig
from nanotrain.errors import ScheduleError
from nanotrain.parallel.pp.actions import (
    Action,
    ActionKind,
    PipelineShape,
    Schedule,
    forward,
    full_backward,
)
from nanotrain.parallel.pp.draw import draw_schedule
from nanotrain.parallel.pp.schedules import (
    SCHEDULES,
    backwards_of,
    build_schedule,
    forward_only,
    forwards_of,
    interleaved,
    num_warmup,
    one_f_one_b,
    split_rounds,
)
from nanotrain.parallel.pp.simulate import Costs, simulate
from nanotrain.parallel.pp.transfers import plan_rank

shapes = st.builds(PipelineShape, st.integers(1, 6), st.integers(2, 4), st.integers(1, 13))


@given(shapes)
def test_after_the_warmup_forwards_and_backwards_alternate(shape: PipelineShape) -> None:
    if shape.num_microbatches % shape.num_ranks:
        return
    for rank, actions in enumerate(interleaved(shape).actions):
        warmup = min(num_warmup(shape, rank), len(actions) // 2)
        kinds = [action.kind for action in actions]
        assert kinds[:warmup] == [ActionKind.forward] * warmup
        steady = kinds[warmup : len(kinds) - warmup]
        assert steady == [ActionKind.forward, ActionKind.full_backward] * (len(steady) // 2)


def torch_schedule(shape: PipelineShape) -> Schedule | None:
    """The order of torch's ScheduleInterleaved1F1B; None where its rounds would differ in size."""
    planner: Any = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)
    planner.pp_group_size, planner.n_local_stages = shape.num_ranks, shape.num_stages_per_rank
    planner._n_microbatches = shape.num_microbatches
    num_rounds = max(1, shape.num_microbatches // shape.num_ranks)
    planner.microbatches_per_round = shape.num_microbatches // num_rounds
    if shape.num_microbatches % num_rounds:
        return None
    kinds = {"FORWARD": ActionKind.forward, "FULL_BACKWARD": ActionKind.full_backward}
    return Schedule(
        tuple(
            tuple(
                Action(kinds[op.computation_type.name], op.stage_index, op.microbatch_index)
                for op in planner._calculate_single_rank_operations(rank)
                if op is not None
            )
            for rank in range(shape.num_ranks)
        )
    )


@given(shapes.filter(lambda shape: shape.num_ranks > 1))
@example(PipelineShape(8, 4, 9))
@example(PipelineShape(4, 2, 10))
@example(PipelineShape(6, 3, 4))
def test_no_step_is_longer_than_that_of_torch_or_of_a_shorter_last_round(
    shape: PipelineShape,
) -> None:
    duration = simulate(interleaved(shape)).duration
    if (theirs := torch_schedule(shape)) is not None:
        assert duration <= simulate(theirs).duration
        if shape.num_microbatches % shape.num_ranks == 0:  # with transfers that take time too
            assert interleaved(shape) == theirs
    multiple = -(-shape.num_microbatches // shape.num_ranks) * shape.num_ranks
    full = interleaved(replace(shape, num_microbatches=multiple))
    kept = tuple(
        tuple(a for a in actions if a.microbatch < shape.num_microbatches)
        for actions in full.actions
    )
    assert duration <= simulate(Schedule(kept)).duration


def test_nine_microbatches_on_eight_ranks_take_the_time_of_torch() -> None:
    assert simulate(interleaved(PipelineShape(8, 4, 9))).duration == 129


@given(shapes, st.data())
def test_a_rank_runs_rounds_of_microbatches_through_its_stages(
    shape: PipelineShape, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, shape.num_ranks - 1))
    forwards, backwards = forwards_of(shape, rank), backwards_of(shape, rank)
    stages = [action.stage for action in forwards[:: len(split_rounds(shape)[0])]]
    assert stages[: shape.num_stages_per_rank] == list(shape.stages_of(rank))
    assert {(a.stage, a.microbatch) for a in forwards} == {
        (a.stage, a.microbatch) for a in backwards
    }


def test_a_warmup_longer_than_the_forwards_runs_them_all_first() -> None:
    assert (
        " ".join(map(str, one_f_one_b(PipelineShape(4, 1, 2)).actions[0])) == "F0.0 F0.1 B0.0 B0.1"
    )


TAKES_SEVERAL = ("gpipe", "interleaved")
NAMES = list(SCHEDULES)
PER_RANK = {"zb-v": 2, "dualpipev": 2}  # stages on a rank; one where not listed


def stages_of(name: str, shape: PipelineShape, rank: int) -> list[int]:
    """The stages of a rank, as the configuration places them."""
    sizes = {"pipeline_model_parallel_size": shape.num_ranks, "pipeline_schedule": name}
    return ParallelConfig(
        num_virtual_stages_per_pipeline_rank=shape.num_stages_per_rank, **sizes
    ).stages_of(rank)


@st.composite
def named_shapes(draw: st.DrawFn) -> tuple[str, PipelineShape]:
    name = draw(st.sampled_from(NAMES))
    num_ranks = draw(st.integers(1, 8))
    fewest = 2 if name == "interleaved" and num_ranks > 1 else 1
    per_rank = (
        draw(st.integers(fewest, 4))
        if name in TAKES_SEVERAL and num_ranks > 1
        else PER_RANK.get(name, 1)
    )
    return name, PipelineShape(num_ranks, per_rank, draw(st.integers(1, 20)))


def bubble(
    name: str, num_ranks: int, per_rank: int, num_microbatches: int, **costs: float
) -> Fraction:
    schedule = SCHEDULES[name](PipelineShape(num_ranks, per_rank, num_microbatches))
    return Fraction(simulate(schedule, costs=Costs(**costs)).bubble_fraction).limit_denominator(
        10_000
    )


@given(named_shapes())
def test_every_action_of_every_stage_and_microbatch_runs_once_on_its_rank(named) -> None:
    name, shape = named
    schedule = SCHEDULES[name](shape)
    is_split = name in ("zb-h1", "zb-v") and shape.num_ranks * shape.num_stages_per_rank > 1

    for rank, actions in enumerate(schedule.actions):
        every = sorted(
            (s, m) for s in stages_of(name, shape, rank) for m in range(shape.num_microbatches)
        )
        for is_part in (
            lambda k: k is ActionKind.forward,
            lambda k: k.has_dgrad,
            lambda k: k.has_wgrad,
        ):
            assert sorted((a.stage, a.microbatch) for a in actions if is_part(a.kind)) == every
        if name != "dualpipev":  # which splits some
            assert is_split != any(a.kind is ActionKind.full_backward for a in actions)


@given(named_shapes())
def test_every_schedule_finishes_and_is_never_faster_than_its_work(named) -> None:
    name, shape = named
    timeline = simulate(SCHEDULES[name](shape))

    assert timeline.duration >= shape.num_stages_per_rank * shape.num_microbatches * 3
    assert 0 <= timeline.bubble_fraction < 1
    for spans in timeline.spans:
        assert all(
            before.end <= after.start for before, after in zip(spans, spans[1:], strict=False)
        )


@given(named_shapes())
def test_microbatches_reach_a_stages_gradients_in_order(named) -> None:
    # so that every schedule sums the same numbers in the same order
    name, shape = named
    schedule = SCHEDULES[name](shape)

    for stage in range(shape.num_stages):
        order = [a.microbatch for a in schedule if a.kind.has_wgrad and a.stage == stage]
        assert order == list(range(shape.num_microbatches))


@given(named_shapes())
def test_no_rank_exceeds_the_memory_bound_of_its_schedule(named) -> None:
    name, shape = named
    ranks, total = range(shape.num_ranks), shape.num_stages_per_rank * shape.num_microbatches
    timeline = simulate(SCHEDULES[name](shape))

    few = tuple(min(shape.num_microbatches, shape.num_ranks - rank) for rank in ranks)
    if name in ("1f1b", "zb-h1"):
        assert timeline.peak_in_flight == few
        assert all(held <= max(few) for held in timeline.peak_until_wgrad)
    elif name == "gpipe":
        assert timeline.peak_in_flight == (total,) * shape.num_ranks
    elif name in PER_RANK:
        most = 2 * shape.num_ranks + (name == "dualpipev")
        assert max(timeline.peak_in_flight) <= max(timeline.peak_until_wgrad) <= min(most, total)
        if shape.num_microbatches >= 2 * shape.num_ranks:
            assert timeline.peak_until_wgrad == (min(most, total),) * shape.num_ranks
    else:
        bounds = [min(total, num_warmup(shape, rank) + 1) for rank in ranks]
        assert all(
            alive <= bound for alive, bound in zip(timeline.peak_in_flight, bounds, strict=True)
        )
        if shape.num_microbatches % shape.num_ranks == 0:
            assert list(timeline.peak_in_flight) == bounds


@pytest.mark.parametrize(
    ("name", "per_rank", "expected"),
    [
        ("gpipe", 1, Fraction(3, 11)),
        ("1f1b", 1, Fraction(3, 11)),
        ("interleaved", 2, Fraction(3, 19)),
        ("interleaved", 4, Fraction(3, 35)),
        ("zb-h1", 1, Fraction(1, 9)),
        ("zb-v", 2, Fraction(1, 17)),
        ("dualpipev", 2, Fraction(1, 17)),
    ],
)
def test_four_ranks_and_eight_microbatches_have_the_textbook_bubble(
    name, per_rank, expected
) -> None:
    assert bubble(name, 4, per_rank, 8) == expected


@given(
    p=st.integers(1, 8),
    v=st.integers(2, 4),
    rounds=st.integers(1, 4),
    f=st.integers(1, 4),
    b=st.integers(1, 6),
)
def test_bubbles_follow_the_formulas(p: int, v: int, rounds: int, f: int, b: int) -> None:
    m, costs = p * rounds, {"forward": f, "backward": b}

    assert (
        bubble("1f1b", p, 1, m, **costs)
        == bubble("gpipe", p, 1, m, **costs)
        == Fraction(p - 1, m + p - 1)
    )
    assert bubble("interleaved", p, v, m, **costs) == Fraction(p - 1, v * m + p - 1)


@given(p=st.integers(2, 8), more=st.integers(0, 12), unit=st.integers(1, 5))
def test_the_zero_bubble_schedule_has_a_third_of_the_bubble_of_1f1b(
    p: int, more: int, unit: int
) -> None:
    # Given forward, input and weight gradients that take equally long, and enough microbatches to
    # fill the pipeline,
    m, costs = 2 * p + more, {"forward": unit, "backward": 2 * unit, "weight": unit}

    assert bubble("zb-h1", p, 1, m, **costs) == Fraction(p - 1, 3 * m + p - 1)


@given(p=st.integers(2, 8), m=st.integers(1, 20))
def test_splitting_backwards_never_costs_time(p: int, m: int) -> None:
    assert bubble("zb-h1", p, 1, m) <= bubble("1f1b", p, 1, m)


@given(named_shapes())
def test_validation_runs_every_microbatch_forward_only(named) -> None:
    name, shape = named
    p, v, m = shape.num_ranks, shape.num_stages_per_rank, shape.num_microbatches
    schedule = forward_only(SCHEDULES[name](shape))

    assert len(set(schedule)) == len(list(schedule)) == p * v * m
    assert all(action.kind is ActionKind.forward for action in schedule)
    duration = simulate(schedule).duration
    assert duration == v * m + p - 1 if m % p == 0 and name not in PER_RANK else duration >= v * m


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_several_stages_on_a_rank_are_refused_with_a_fix(name) -> None:
    with pytest.raises(ScheduleError, match="2 stages per rank.*--pipeline-schedule interleaved"):
        SCHEDULES[name](PipelineShape(4, 2, 8))


def test_interleaving_a_single_stage_is_refused_with_a_fix() -> None:
    with pytest.raises(ScheduleError, match="--num-virtual-stages-per-pipeline-rank 2"):
        SCHEDULES["interleaved"](PipelineShape(4, 1, 8))


@pytest.mark.parametrize("name", NAMES)
def test_without_a_pipeline_one_microbatch_is_in_flight_at_a_time(name: str) -> None:
    (actions,) = build_schedule(name, PipelineShape(1, 1, 3)).actions
    assert " ".join(map(str, actions)) == "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2"


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_on_one_rank_keeps_what_it_must(name) -> None:
    alive = simulate(SCHEDULES[name](PipelineShape(1, PER_RANK.get(name, 1), 3))).peak_in_flight
    assert alive == ({"gpipe": 3, "zb-v": 2, "dualpipev": 3}.get(name, 1),)


def test_a_new_schedule_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a schedule from outside the package: every microbatch forward, then backward, before the
    # next one,
    def one_at_a_time(shape: PipelineShape) -> Schedule:
        numbers = range(shape.num_microbatches)
        make = (forward, full_backward)
        return Schedule(
            tuple(tuple(m(s, i) for i in numbers for m in make) for s in range(shape.num_ranks))
        )

    monkeypatch.setitem(SCHEDULES, "one-at-a-time", one_at_a_time)

    # then it is planned and drawn by its name.
    shape = PipelineShape(2, 1, 3)
    assert plan_rank(build_schedule("one-at-a-time", shape), 1).num_microbatches == 3
    assert "in flight  1 1" in draw_schedule("one-at-a-time", shape)


@st.composite
def paired_shapes(draw: st.DrawFn) -> tuple[str, PipelineShape]:
    name = draw(st.sampled_from(["1f1b", "interleaved", "dualpipev"]))
    num_ranks = draw(st.integers(1 if name == "1f1b" else 2, 6))
    per_rank = draw(st.integers(2, 3)) if name == "interleaved" else PER_RANK.get(name, 1)
    return name, PipelineShape(num_ranks, per_rank, draw(st.integers(1, 20)), has_pairs=True)


@given(paired_shapes())
def test_pairs_play_through_and_cost_little_time(named) -> None:
    name, shape = named
    schedule = build_schedule(name, shape)
    timeline, plain = (
        simulate(schedule),
        simulate(build_schedule(name, replace(shape, has_pairs=False))),
    )

    assert timeline.duration <= plain.duration + 3 * shape.num_ranks
    assert (
        len(set(schedule)) == len(list(schedule)) == 2 * shape.num_stages * shape.num_microbatches
        or name == "dualpipev"
    )
    for pair in schedule.pairs:
        assert pair.forward.microbatch != pair.backward.microbatch
    warmups = [num_warmup(shape, rank) for rank in range(shape.num_ranks)]
    in_pairs = [
        sum(action in pair for pair in schedule.pairs for action in actions)
        for actions in schedule.actions
    ]
    per_rank = shape.num_stages_per_rank * shape.num_microbatches
    if name != "dualpipev":
        assert in_pairs == [2 * max(0, per_rank - warmup) for warmup in warmups]
    for rank in range(shape.num_ranks):
        plan = plan_rank(schedule, rank)
        assert list(plan.actions) == list(schedule.actions[rank])
        freed = list(schedule.freeing_first(rank))
        assert sorted(freed) == sorted(plan.actions) and (freed != list(plan.actions)) == (
            in_pairs[rank] > 0
        )


@given(paired_shapes(), st.integers(1, 9), st.integers(2, 9))
def test_actions_begin_after_what_they_need_and_pairs_together(
    named, forward_s: int, backward_s: int
) -> None:
    name, shape = named
    schedule = build_schedule(name, shape)
    timeline = simulate(schedule, costs=Costs(forward=forward_s, backward=backward_s))
    span_of = {span.action: span for spans in timeline.spans for span in spans}
    first_of = {action: pair.forward for pair in schedule.pairs for action in pair}
    for action in span_of:
        begins = span_of[first_of.get(action, action)].start
        assert all(
            span_of[needed].complete <= begins for needed in schedule.dependencies_of(action)
        )


def test_results_of_a_pair_are_sent_at_its_end() -> None:
    shape = PipelineShape(2, 1, 4, has_pairs=True)
    (spans, _) = simulate(build_schedule("1f1b", shape)).spans
    first, second = spans[3], spans[4]
    assert [str(first.action), str(second.action)] == ["F0.3", "B0.0"]
    assert first.complete == second.complete == second.end > first.end
