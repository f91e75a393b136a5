"""Tasks that srun or mpirun started as copies of one command, each of which would train alone.

    started_tasks         number of the tasks, from variables of the scheduler
    require_one_task      no task is one of several without being one of torchrun's ranks
    require_one_launcher  as many tasks start ranks as the job has machines

torchrun and the launcher set RANK in every process that they start.

A batch script and a shell in an allocation have the SLURM_NTASKS of the allocation and are one
process. Only a step, which srun starts, consists of tasks (Slurm documentation: "srun", output
environment variables).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from nanotrain.errors import ConfigError

# variables with the number of tasks: Open MPI, MPICH and Intel MPI, MVAPICH
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
INTERACTIVE_STEP = "4294967290"  # step of a shell that salloc starts (SLURM_INTERACTIVE_STEP)
MEETING = "--rdzv-backend c10d --rdzv-id JOB --rdzv-endpoint HOST:29500"
ONE_PER_MACHINE = {"srun": "srun --ntasks-per-node=1", "mpirun": "mpirun --map-by ppr:1:node"}


@dataclass(frozen=True)
class Tasks:
    """Tasks of which this process is one."""

    number: int
    program: str  # srun or mpirun
    variable: str  # where the scheduler states the number


def started_tasks(environment: Mapping[str, str]) -> Tasks | None:
    """The tasks that were started with this process; None if it is the only one.

    >>> started_tasks({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"})
    Tasks(number=4, program='mpirun', variable='OMPI_COMM_WORLD_SIZE')
    """
    variable = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environment else "SLURM_NTASKS"
    if is_task_of_step(environment) and size_of(environment, variable) > 1:
        return Tasks(size_of(environment, variable), "srun", variable)
    for variable in MPI_SIZES:
        if size_of(environment, variable) > 1:
            return Tasks(size_of(environment, variable), "mpirun", variable)
    return None


def is_task_of_step(environment: Mapping[str, str]) -> bool:
    """Whether srun started this process, and not as a shell."""
    if environment.get("SLURM_STEP_ID") == INTERACTIVE_STEP or "SLURM_PTY_PORT" in environment:
        return False
    if "SLURM_STEP_ID" in environment:
        return True
    # a batch script has a SLURM_PROCID of 0, too
    return "SLURM_PROCID" in environment and environment.get("ENVIRONMENT") != "BATCH"


def size_of(environment: Mapping[str, str], variable: str) -> int:
    """The number in a variable; 1 without one."""
    text = environment.get(variable, "")
    return int(text) if text.isdecimal() else 1


def require_one_task(environment: Mapping[str, str]) -> None:
    """Check that this process is the only one, or one of torchrun's ranks.

    Raises:
        ConfigError: it is one of several tasks.
    """
    tasks = None if "RANK" in environment else started_tasks(environment)
    if tasks is not None:
        raise ConfigError(
            f"{tasks.program} started {tasks.number} tasks ({tasks.variable}), and this one has no "
            "RANK",
            why="every task would train alone, as a run of one rank in the same folder",
            fix=f"on one machine nanotrain train --nproc-per-node {tasks.number} without "
            f"{tasks.program}; on several {one_per_machine(tasks)}",
        )


def require_one_launcher(environment: Mapping[str, str], *, num_machines: int) -> None:
    """Check that this launcher is the only one, or one per machine of the job.

    Args:
        environment: environment of this process.
        num_machines: largest number of machines (`--nnodes`).

    Raises:
        ConfigError: more tasks than machines start ranks.
    """
    tasks = None if "RANK" in environment else started_tasks(environment)
    if tasks is not None and tasks.number > num_machines:
        machines = "1 machine" if num_machines == 1 else f"{num_machines} machines"
        raise ConfigError(
            f"{tasks.program} started {tasks.number} tasks ({tasks.variable}), and each starts the "
            f"ranks of a job of {machines}",
            why="a machine has one task, which starts all of its ranks",
            fix=one_per_machine(tasks),
        )


def one_per_machine(tasks: Tasks) -> str:
    """The command that starts one launcher per machine."""
    command = f"{ONE_PER_MACHINE[tasks.program]} nanotrain train --nnodes MACHINES"
    text = f"{command} --nproc-per-node GPUS {MEETING} ..."
    return f"{text}, or sbatch scripts/launch_slurm ..." if tasks.program == "srun" else text
