"""The commands that start a training on a number of GPUs."""

from math import gcd

GPUS_OF_A_MACHINE = 8
GPUS_OF_A_TRAY = 4  # machine of a rack whose GPUs are one NVLink domain, as of GB200 NVL72


def launch_lines(arguments: str, *, world_size: int, gpus_per_node: int) -> list[str]:
    """The command of one machine; of several the launcher's, torchrun's and Slurm's.

    Args:
        arguments: arguments of the training.
        world_size: GPUs of the run.
        gpus_per_node: GPUs of an NVLink domain.

    >>> launch_lines("+config=tiny", world_size=4, gpus_per_node=8)
    ['nanotrain train --nproc-per-node 4 +config=tiny']
    """
    is_rack = gpus_per_node > GPUS_OF_A_MACHINE
    per_machine = gcd(world_size, GPUS_OF_A_TRAY if is_rack else gpus_per_node)
    if world_size <= gpus_per_node and not is_rack:
        return [f"nanotrain train --nproc-per-node {world_size} {arguments}"]
    num_machines = world_size // per_machine
    rendezvous = "--rdzv-backend c10d --rdzv-id JOB --rdzv-endpoint HOST:29500"
    ranks = f"--nnodes {num_machines} --nproc-per-node {per_machine}"
    slurm = f"--nodes {num_machines} --gpus-per-node {per_machine}"
    return [
        "on every machine, where HOST is one of them, either line:",
        f"nanotrain train {ranks} {rendezvous} {arguments}",
        f"torchrun {ranks} {rendezvous} -m nanotrain.train {arguments}",
        "with Slurm:",
        f"sbatch {slurm} scripts/launch_slurm {arguments}",
    ]
