"""scripts/launch_slurm with stubs of Slurm and torchrun: what is started, and what signals do."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.harness import HANG_S

SCRIPT = Path(__file__).parents[1] / "scripts" / "launch_slurm"
STUBS = {
    "srun": 'exec "$@"\n',
    # like torchrun: SIGTERM ends it after a save, SIGUSR1 must not reach it
    "torchrun": 'echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT $OMP_NUM_THREADS $GLOO_SOCKET_IFNAME $@" > started\n'
    "trap 'echo saved >> log; exit 1' TERM\nkill -USR1 $$\necho survived >> log\n"
    'test "$MODE" = done && exit 3\nwhile :; do sleep 0.02; done\n',
    "scontrol": 'test "$1" = show && echo node7 || echo "$@" >> log\n',
}


@pytest.fixture
def job(tmp_path):
    """Start the script in an allocation of two nodes."""
    for name, text in STUBS.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{text}")
        path.chmod(0o755)
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2"}
    slurm |= {"SLURM_CPUS_ON_NODE": "96", "GLOO_SOCKET_IFNAME": "eth1", "NANOTRAIN_NUMA": "node"}
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    environment = {**inherited, **slurm, "SLURM_JOB_ID": "41", "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def start(mode: str) -> subprocess.Popen:
        return subprocess.Popen(["bash", str(SCRIPT), "--lr", "1"], env={**environment, "MODE": mode})

    return start


def wait_for(path: Path, text: str) -> None:
    end = time.monotonic() + HANG_S
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < end, f"no {text!r} in {path}"
        time.sleep(0.02)


def test_it_starts_one_torchrun_per_node_and_returns_its_exit_code(job, tmp_path):
    assert job("done").wait(HANG_S) == 3
    assert (tmp_path / "started").read_text() == (
        "150 12 eth1 --nnodes 2 --nproc-per-node 8 --rdzv-id 41 --rdzv-backend c10d --rdzv-endpoint node7:29500 "
        "--numa-binding node -m nanotrain.train --lr 1\n"
    )
    assert (tmp_path / "log").read_text() == "survived\n"


@pytest.mark.parametrize(
    ("number", "log"),
    [(signal.SIGUSR1, "survived\nsaved\nrequeue 41\n"), (signal.SIGTERM, "survived\nsaved\n")],
    ids=["time limit", "cancelled"],
)
def test_a_signal_lets_the_run_save_and_the_time_limit_queues_it_again(job, tmp_path, number, log):
    process = job("train")
    wait_for(tmp_path / "log", "survived")
    process.send_signal(number)
    process.wait(HANG_S)
    assert (tmp_path / "log").read_text() == log
