"""The number of ranks by the options of launchers and of Slurm."""

import pytest

from nanotrain.audit.launch_ranks import MAX_RANKS, batch_options, ranks_of_launch

BATCH = """#!/bin/bash
#SBATCH --nodes=2 --ntasks=4  # of a queue
##SBATCH --nodes=7
#SBATCH -p long
"""


def test_lines_of_a_batch_script_may_have_several_options():
    assert batch_options(BATCH) == {"--nodes": "2", "--ntasks": "4", "-p": "long"}


@pytest.mark.parametrize(
    ("launch", "ranks"),
    [
        ("srun python", 4),
        ("srun python3.12 -u", 4),
        ("srun /env/bin/python", 4),
        ("srun -n 3 python", 3),
        ("/usr/bin/torchrun --nproc_per_node $GPUS", None),
        ("torchrun --nproc_per_node 3", 3),
        ("torchrun --nproc_per_node 3 --nnodes $NODES", 6),
        ("srun --gres=gpu:5 torchrun --nproc_per_node auto", 10),
        ("srun --gres=shard:5 torchrun --nproc_per_node auto", None),
        ("accelerate launch --num_processes 6", 6),
        ("$LAUNCHER", None),
        (f"torchrun --nproc_per_node {MAX_RANKS + 1}", None),
    ],
)
def test_ranks_of_a_launch(launch, ranks):
    assert ranks_of_launch(launch.split(), batch_options(BATCH)) == ranks
