"""Times of memory-bound operators and collectives of a rank, and its sizes."""

from dataclasses import replace

import pytest

from nanotrain.planner.collectives import collective_s
from nanotrain.planner.kernels import memory_s
from nanotrain.planner.rank_clock import RankClock, scenario_sizes
from tests.planner.scenarios import llama

MOE = {"num_experts": 64, "moe_router_topk": 8, "moe_ffn_hidden_size": 1024, "ep": 8}


def test_an_operator_takes_the_time_of_its_bytes() -> None:
    clock = RankClock(llama(8))
    part = clock.memory("norm", 3e9, backward=5e9, launches=(2, 4))
    assert part.forward == memory_s(clock.gpu, 3e9)
    assert part.dgrad == memory_s(clock.gpu, 5e9) > part.forward
    assert (part.wgrad, part.launches, part.num_bytes) == (0.0, (2, 4, 0), 3e9)
    nothing = clock.memory("view", 0, backward=0)
    assert nothing.forward == nothing.dgrad == 0.0


@pytest.mark.parametrize(("bf16", "factor"), [(True, 2), (None, 1)])
def test_a_cpu_reads_16_bits_as_32(bf16: bool | None, factor: int) -> None:
    clock = RankClock(llama(8, gpu="cpu", engine="nanotrain", bf16=bf16))
    assert clock.gpu.is_cpu
    part = clock.memory("norm", 1e9, backward=0)
    assert part.forward == memory_s(clock.gpu, factor * 1e9)


@pytest.mark.parametrize("axis", ["tp", "dp_shard", "cp"])
def test_a_collective_is_over_the_group_of_its_axis(axis: str) -> None:
    clock = RankClock(llama(32, tp=2, cp=2, gbs=64, strategy="optim"))
    sizes = {"tp": 2, "dp_shard": 16, "cp": 2}
    ranks = clock.scenario.ranks(axis)
    assert len(ranks) == sizes[axis]
    expected = collective_s(clock.gpu, "all_gather", num_bytes=1e8, ranks=ranks)
    assert clock.collective(axis, "all_gather", num_bytes=1e8) == expected > 0


def test_tensor_parallelism_over_nodes_stalls_the_device() -> None:
    inside, across = (RankClock(llama(32, tp=size, num_query_groups=16)) for size in (8, 16))
    for clock, stalls in ((inside, 0), (across, 16)):
        ranks = clock.scenario.ranks("tp")
        plain = collective_s(clock.gpu, "all_reduce", num_bytes=1e8, ranks=ranks)
        found = clock.collective("tp", "all_reduce", num_bytes=1e8)
        assert found - plain == pytest.approx(stalls * clock.engine.network.device_stall_s)


def test_rows_of_experts_follow_from_the_choices_and_the_imbalance() -> None:
    plain = llama(8, **MOE)
    tokens = scenario_sizes(plain).routed_tokens
    for imbalance in (1.0, 1.25):
        sizes = scenario_sizes(replace(plain, imbalance=imbalance))
        assert sizes.routed_rows == int(tokens * 8 * imbalance)
        assert sizes.expert_rows == sizes.routed_rows
    padded = llama(8, **MOE, moe_expert_rank_capacity_factor=1.5)
    sizes = scenario_sizes(replace(padded, imbalance=1.0))
    assert sizes.expert_rows == int(sizes.routed_rows * 1.5)
    assert scenario_sizes(llama(8)).expert_rows == 0
