"""scripts/launch_slurm with stubs of Slurm and torchrun: what is started, and what signals do."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.harness import HANG_S

SCRIPT = Path(__file__).parents[1] / "scripts" / "launch_slurm"
STUBS = {
    # Like srun: a task per node. SIGTERM is an order to kill the tasks at once.
    "srun": """while [[ $1 == -* ]]; do shift; done
tasks= code=0 id=0
trap 'exec 2>/dev/null; kill -KILL $tasks; exit 143' TERM
for node in node7 node8; do
    SLURM_NODEID=$id SLURMD_NODENAME=$node "$@" &
    tasks="$tasks $!" id=1
done
echo $tasks > tasks
for task in $tasks; do wait $task || code=$?; done
exit $code
""",
    # Like scancel with a signal: the tasks get it, srun and the script do not.
    "scancel": 'echo "scancel $@" >> log; kill "-${1#--signal=}" $(cat tasks)\n',
    # Like torchrun: SIGTERM ends it after a save, SIGUSR1 must not reach it.
    "torchrun": 'set -- $TORCH_ELASTIC_SHUTDOWN_TIMEOUT $OMP_NUM_THREADS $GLOO_SOCKET_IFNAME "$@"\n'
    'echo "$@" > started$SLURM_NODEID\n'
    "trap 'echo saved >> log; exit 1' TERM\nkill -USR1 $$\necho survived >> log\n"
    'test "$MODE" = done && exit 3\nwhile :; do sleep 0.02; done\n',
    "nanotrain": 'echo "$@" >> asked; echo "$VERDICT"\n',
    "scontrol": 'test "$1" = show && printf "node7\\nnode8\\n" || echo "$@" >> log\n',
    "nvidia-smi": 'test "$MODE $SLURMD_NODENAME" = "hangs node8" && exec sleep 60\n'
    'count=8; test "$MODE $SLURMD_NODENAME" = "lost node8" && count=7\n'
    'for i in $(seq $count); do echo "GPU $i"; done\n',
}


@pytest.fixture
def job(tmp_path):
    """Start the script in an allocation of two nodes."""
    for name, text in STUBS.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{text}")
        path.chmod(0o755)
    slurm = {
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_NNODES": "2",
    }
    slurm |= {"SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_ON_NODE": "96", "GLOO_SOCKET_IFNAME": "eth1"}
    slurm |= {
        "NANOTRAIN_NUMA": "node",
        "SLURM_JOB_ID": "41",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}

    def start(mode: str, **variables: str) -> subprocess.Popen:
        environment = {**inherited, **slurm, "MODE": mode, **variables}
        return subprocess.Popen(
            ["bash", str(SCRIPT), "--lr", "1"], env=environment, stderr=subprocess.PIPE, text=True
        )

    return start


def wait_for(path: Path, text: str) -> None:
    end = time.monotonic() + HANG_S
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < end, f"no {text!r} in {path}"
        time.sleep(0.02)


def test_it_starts_one_torchrun_per_node_and_returns_its_exit_code(job, tmp_path):
    assert job("done").wait(HANG_S) == 3
    for rank in (0, 1):
        assert (tmp_path / f"started{rank}").read_text() == (
            f"150 12 eth1 --node-rank {rank} --nnodes 2 --nproc-per-node 8 --rdzv-backend static --master-addr node7 "
            "--master-port 29500 --numa-binding node -m nanotrain.train --lr 1\n"
        )
    assert (tmp_path / "log").read_text() == "survived\n" * 2
    assert not list(tmp_path.glob(".nanotrain-*"))


@pytest.mark.parametrize(
    ("number", "end"),
    [(signal.SIGUSR1, "requeue 41\n"), (signal.SIGTERM, "")],
    ids=["time limit", "cancelled"],
)
def test_a_signal_lets_every_node_save_and_the_time_limit_queues_it_again(
    job, tmp_path, number, end
):
    process = job("train")
    wait_for(tmp_path / "log", "survived\nsurvived")
    process.send_signal(number)
    process.wait(HANG_S)
    assert (
        tmp_path / "log"
    ).read_text() == "survived\n" * 2 + "scancel --signal=TERM 41\n" + "saved\n" * 2 + end


@pytest.mark.parametrize(
    ("verdict", "calls"),
    [
        ("restart: rank 1 was killed", ["requeue 41"]),
        (
            "exclude node8.cluster,node7: they are gone",
            ["requeuehold 41", "update JobId=41 ExcNodeList=node7,node8", "release 41"],
        ),
        ("stop: the same start fails again", []),
        ("", []),
    ],
)
def test_a_failed_job_obeys_its_verdict(job, tmp_path, verdict, calls):
    process = job("done", VERDICT=verdict)
    _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 3 and f"verdict: {verdict}\n" in errors
    assert (tmp_path / "log").read_text().splitlines() == ["survived"] * 2 + calls
    arguments = (tmp_path / "asked").read_text()
    assert re.fullmatch(r"verdict --exit-code 3 --since \d{10} --lr 1\n", arguments)


def test_a_job_is_not_restarted_without_end(job, tmp_path):
    process = job("done", VERDICT="restart: again", SLURM_RESTART_COUNT="10")
    _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 3
    assert errors.endswith("not started again after 10 restarts; NANOTRAIN_RESTARTS allows more\n")
    assert "requeue" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("mode", "what"),
    [("lost", "node node8 shows 7 of 8 GPUs"), ("hangs", "node node8 does not answer in 2 s")],
)
def test_a_bad_node_is_named_before_the_start(job, tmp_path, mode, what):
    process = job(mode, NANOTRAIN_HEALTH_S="2" if mode == "hangs" else "60")
    _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 2
    assert errors.splitlines() == [
        f"error: {what}",
        "error: nothing is started; submit again without these nodes: sbatch --exclude=node8 ...",
    ]
    assert not (tmp_path / "started0").exists()


def test_a_node_without_the_folder_is_named(job, tmp_path):
    (tmp_path / "touch").write_text("#!/bin/bash\n")  # as if the marker were on another file system
    (tmp_path / "touch").chmod(0o755)
    process = job("done")
    _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 2
    assert f"error: node node7 has no {tmp_path}\nerror: node node8 has no {tmp_path}\n" in errors
