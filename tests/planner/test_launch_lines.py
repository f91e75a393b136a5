"""The commands of a layout on one machine, on several, and on racks of trays with four GPUs."""

import pytest

from nanotrain.planner.launch_lines import launch_lines


@pytest.mark.parametrize(
    ("world_size", "gpus_per_node", "machines", "per_machine"),
    [(16, 8, 2, 8), (2048, 8, 256, 8), (12, 8, 3, 4), (2048, 72, 512, 4), (72, 72, 18, 4)],
)
def test_the_ranks_of_all_machines_are_the_world(world_size, gpus_per_node, machines, per_machine):
    lines = launch_lines("+config=x", world_size=world_size, gpus_per_node=gpus_per_node)
    assert machines * per_machine == world_size
    ranks = f"--nnodes {machines} --nproc-per-node {per_machine} "
    assert [ranks in line for line in lines] == [False, True, True, False, False]
    assert f"--nodes {machines} --gpus-per-node {per_machine} scripts/launch_slurm" in lines[-1]
    assert all(line.endswith("+config=x") for line in (lines[1], lines[2], lines[4]))
