"""Tasks of srun and mpirun are told from torchrun's ranks, batch scripts and shells."""

import os
import subprocess
import sys

import pytest

from nanotrain.errors import ConfigError
from nanotrain.scheduler import require_one_launcher, require_one_task, started_tasks

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
SEVERAL = [
    STEP | {"SLURM_NTASKS": "8", "SLURM_PROCID": "2"},
    STEP | {"ENVIRONMENT": "BATCH"},  # srun in a batch script
    {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
    {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"},
    {"PMI_SIZE": "4", "PMI_RANK": "0"},
    {"MV2_COMM_WORLD_SIZE": "4"},
    STEP | {"SLURM_STEP_NUM_TASKS": "1", "PMI_SIZE": "4"},  # mpirun in a step
]
ONE = [
    {},
    {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"},  # a shell of salloc on the login node
    # a batch script
    {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "ENVIRONMENT": "BATCH"},
    STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
    STEP | {"SLURM_PTY_PORT": "40000"},  # srun --pty bash
    STEP | {"SLURM_STEP_ID": "4294967290"},  # a shell of salloc on a node
    {"OMPI_COMM_WORLD_SIZE": "1"},
    {"PMI_SIZE": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
    {"PMI_SIZE": "many"},
]


@pytest.mark.parametrize("environment", SEVERAL)
def test_tasks_are_counted_and_refused_unless_torchrun_ranked_them(
    environment: dict[str, str],
) -> None:
    tasks = started_tasks(environment)
    assert tasks is not None and tasks.number == 4
    with pytest.raises(ConfigError, match=f"{tasks.program} started 4 tasks.*--nproc-per-node 4"):
        require_one_task(environment)
    require_one_task(environment | {"RANK": "0", "WORLD_SIZE": "4"})


@pytest.mark.parametrize("environment", ONE)
def test_a_single_task_and_shells_in_an_allocation_are_one_process(
    environment: dict[str, str],
) -> None:
    assert started_tasks(environment) is None
    require_one_task(environment)
    require_one_launcher(environment, num_machines=1)


def test_every_machine_has_one_launcher() -> None:
    require_one_launcher(STEP, num_machines=4)
    with pytest.raises(ConfigError, match="4 tasks.*a job of 2 machines.*--ntasks-per-node=1"):
        require_one_launcher(STEP, num_machines=2)


@pytest.mark.parametrize("options", [[], ["--nproc-per-node", "2"]])
def test_a_training_of_a_task_ends_before_its_first_file(tmp_path, options: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nanotrain", "train", *options, "+config=tiny"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.getcwd()} | SEVERAL[0],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: srun started 4 tasks (SLURM_STEP_NUM_TASKS)")
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
