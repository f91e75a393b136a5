"""Which groups a start creates and what they cost, and the table of it in docs/gpu.md."""

from pathlib import Path

import pytest

from nanotrain.topology.start import CONTROL_FAN_OUT, StartCost, control_levels, partitions, start_cost
from nanotrain.topology.topology import Topology
from tests.harness import parallel_config

GPU_PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
LAYOUTS = {"tp 8, pp 4": {"tp": 8, "pp": 4}, "tp 8, pp 16, cp 2": {"tp": 8, "pp": 16, "cp": 2}}


def test_groups_with_the_same_ranks_share_one_process_group():
    assert start_cost(Topology.of(parallel_config(), 1), 0) == StartCost(0, 0, 0, 0, 0)
    # world, dp, dp_cp and the other names of all ranks are one group
    assert start_cost(Topology.of(parallel_config(), 4), 0).num_process_groups == 1
    # tp, dp and the world
    assert start_cost(Topology.of(parallel_config(tp=2), 4), 3).num_process_groups == 3
    # the first and the last of two stages are both stages
    assert "embed" not in partitions(Topology.of(parallel_config(pp=2), 4))


@pytest.mark.parametrize(("size", "fan_out"), [(1, 3), (2, 3), (7, 3), (32, 32), (33, 32), (100, 3)])
def test_the_control_tree_connects_every_rank_once(size, fan_out):
    groups = {ranks for rank in range(size) for ranks in control_levels(rank, size, fan_out=fan_out)}
    assert all(1 < len(ranks) <= fan_out for ranks in groups)
    assert sorted(rank for ranks in groups for rank in ranks[1:]) == list(range(1, size))  # one parent each
    for rank in range(size):
        levels = control_levels(rank, size, fan_out=fan_out)
        assert all(rank in ranks for ranks in levels)
        assert all(ranks[0] == rank for ranks in levels[:-1])  # only the first rank goes on to the next level
    assert CONTROL_FAN_OUT == 32


@pytest.mark.parametrize(
    ("num_ranks", "layout"), [(1024, "tp 8, pp 4"), (1024, "tp 8, pp 16, cp 2"), (16384, "tp 8, pp 16, cp 2")]
)
def test_the_table_of_the_page_is_computed(num_ranks, layout):
    topology = Topology.of(parallel_config(**LAYOUTS[layout]), num_ranks)
    first, last = start_cost(topology, 0), start_cost(topology, num_ranks - 1)
    # levels above the leaves have the same groups for their first ranks only
    levels = {ranks for rank in range(0, num_ranks, CONTROL_FAN_OUT) for ranks in control_levels(rank, num_ranks)}
    total = sum(len(ranks) * len(ranks) * (154 + 8 * len(ranks)) for ranks in levels)
    row = (
        f"| {num_ranks:,} | {layout} | {first.num_splits} | {first.num_process_groups} | {first.num_ranks:,} | "
        f"{first.control_sockets}, {last.control_sockets} | {first.control_store_bytes / 1e3:,.1f} kB, "
        f"{last.control_store_bytes / 1e3:,.1f} kB | {total / 1e6:,.1f} MB |"
    )
    assert row in GPU_PAGE.read_text(), row
