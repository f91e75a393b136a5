"""What the start of a rank costs, and the table of it in docs/gpu.md."""

from pathlib import Path

import pytest

from nanotrain.topology.start import StartCost, start_cost
from nanotrain.topology.topology import Topology
from tests.harness import parallel_config

GPU_PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
LAYOUTS = {"tp 8, pp 4": {"tp": 8, "pp": 4}, "tp 8, pp 16, cp 2": {"tp": 8, "pp": 16, "cp": 2}}


def test_groups_with_the_same_ranks_share_one_process_group():
    assert start_cost(Topology.of(parallel_config(), 1), 0) == StartCost(0, 0, 0, 0)
    # world, dp, dp_cp and the other names of all ranks are one group
    assert start_cost(Topology.of(parallel_config(), 4), 0).num_process_groups == 1
    # tp, dp and the world
    assert start_cost(Topology.of(parallel_config(tp=2), 4), 3).num_process_groups == 3


@pytest.mark.parametrize(
    ("num_ranks", "layout"), [(1024, "tp 8, pp 4"), (1024, "tp 8, pp 16, cp 2"), (16384, "tp 8, pp 16, cp 2")]
)
def test_the_table_of_the_page_is_computed(num_ranks, layout):
    cost = start_cost(Topology.of(parallel_config(**LAYOUTS[layout]), num_ranks), 0)
    row = (
        f"| {num_ranks:,} | {layout} | {cost.num_process_groups} | {cost.num_ranks:,} | {cost.control_sockets:,} | "
        f"{cost.control_store_bytes / 1e6:,.1f} MB | {cost.control_store_bytes * num_ranks / 1e9:,.1f} GB |"
    )
    assert row in GPU_PAGE.read_text(), row
