"""Times of the dispatch to experts: what is sent to a node once, and what the shared expert hides."""

from dataclasses import replace
from typing import Any

import pytest

from nanotrain.planner.dispatch_time import dispatch_part, hide_behind_shared, router_part
from nanotrain.planner.parts import Part
from nanotrain.planner.rank_clock import RankClock
from nanotrain.spec.kinds import MLPS
from nanotrain.spec.operators import Dispatch, Router
from tests.planner.scenarios import llama

MOE = {"num_experts": 64, "moe_router_topk": 8, "moe_ffn_hidden_size": 1024}


def clock(num_ranks: int = 64, **values: Any) -> RankClock:
    return RankClock(llama(num_ranks, **MOE | {"ep": num_ranks} | values))


def dispatch(times: RankClock) -> Part:
    operators = MLPS["moe"].operators(times.sizes)
    return dispatch_part(times, next(each for each in operators if isinstance(each, Dispatch)))


def test_tokens_are_sent_once_to_each_node() -> None:
    times = {
        name: dispatch(clock(options={"dispatcher": name})).before
        for name in ("alltoall", "hierarchical", "flex", "allgather")
    }
    assert times["flex"] == times["hierarchical"] < times["alltoall"] < times["allgather"]


def test_tokens_in_fp8_take_half_of_the_time_on_their_way_there() -> None:
    """H + H / 128 bytes per token for 2 H; gradients are sent in bf16."""
    fp8 = {"fp8_format": "e4m3", "fp8_recipe": "blockwise"}
    wide = dispatch(clock(**fp8))
    narrow = dispatch(clock(moe_dispatch_fwd_dtype="fp8", **fp8))
    assert 0.5 * wide.before < narrow.before < 0.55 * wide.before
    assert narrow.last == wide.last


def test_a_router_takes_at_least_as_long_as_its_launches() -> None:
    times = clock(8)
    operators = MLPS["moe"].operators(times.sizes)
    (router,) = (each for each in operators if isinstance(each, Router))
    part = router_part(times, router)
    assert part.forward >= 20 * times.engine.launches.operator_s


@pytest.mark.parametrize(("engine", "is_hidden"), [("nanotrain", True), ("megatron", False)])
def test_a_shared_expert_hides_the_dispatch_where_both_run_at_once(
    engine: str, is_hidden: bool
) -> None:
    times = clock(engine=engine)
    sent = dispatch(times)
    hidden = hide_behind_shared(times, sent, shared=[Part("moe", 1.0, 1.0)])
    assert (hidden.before == hidden.last == 0.0) == is_hidden


@pytest.mark.parametrize("contention", [0.0, 0.25, 1.0])
def test_a_shared_expert_hides_what_contention_leaves(contention: float) -> None:
    """With contention 1 a hidden second costs one of the operators, so overlap hides nothing."""
    times = clock(engine="nanotrain")
    engine = times.engine
    times.engine = replace(engine, overlap=replace(engine.overlap, contention=contention))
    factor = engine.operators.time_factor
    sent = Part("moe", before=0.5, last=0.7)
    shared = [Part("moe", 0.1, 0.2), Part("moe", 0.05, 0.1, 9.0)]
    hidden = hide_behind_shared(times, sent, shared=shared)
    assert hidden.before == pytest.approx(0.5 - factor * (1 - contention) * 0.15)
    assert hidden.last == pytest.approx(0.7 - factor * (1 - contention) * 0.3)
    assert (hidden.forward, hidden.dgrad) == (sent.forward, sent.dgrad)
