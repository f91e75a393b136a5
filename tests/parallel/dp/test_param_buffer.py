"""Buffers of frozen parameters: gathered when they were loaded, and at no other time."""

import pytest

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.parallel.dp.data_parallel import DataParallel
from tests.harness import run_ranks
from tests.laws.worlds import Case, build_here


def gathers(ctx: ParallelContext, case: Case) -> list[int]:
    """Bytes sent by three gathers: of initial weights, after a load, and once more."""
    run = build_here(ctx, case)
    frozen = [dp for dp in run.data_parallel if not isinstance(dp, DataParallel)]
    assert {name for dp in frozen for name in dp.params} == {"embedding.word.weight"}
    (buffer,) = frozen
    assert buffer.grads_summed_over("tp") == []
    counts = []
    for is_loaded in (False, True, False):
        if is_loaded:
            buffer.mark_loaded()
        ctx.traffic.reset()
        buffer.start_param_gather()
        buffer.wait_for_params()
        counts.append(ctx.traffic.bytes("dp_shard"))
    assert counts[1] in (0, buffer.layout.numel // 2 * 4)
    return counts


@pytest.mark.parametrize(
    ("strategy", "is_gathered"),
    [("no_shard", False), ("optim", True), ("optim_grads_params", False)],
)
def test_frozen_parameters_are_gathered_after_a_load(strategy: str, is_gathered: bool) -> None:
    case = Case().but(optim={"freeze": ["embedding.*"]}, train={"micro_batch_size": 6})
    case = case.but(parallel={"data_parallel_sharding_strategy": strategy})
    for before, after, again in run_ranks(2, gathers, case, strategy=strategy, shares=True):
        assert before == again == 0
        assert (after > 0) == is_gathered
