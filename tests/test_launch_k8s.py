"""scripts/launch_k8s: the job that it prints."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.harness import HANG_S

SCRIPT = Path(__file__).parents[1] / "scripts" / "launch_k8s"
NEEDED = {"IMAGE": "my/nanotrain:0.1", "VOLUME": "my-claim"}

MACHINES = {
    "NAME": "llama",
    "NODES": "4",
    "GPUS": "2",
    "RDMA": "rdma/ib=8",
    "NANOTRAIN_NUMA": "node",
    "OTHER_NCCL_X": "1",
}
GRACE = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "150"}  # seconds for the last save, as in launch_slurm
NETWORK = {
    "NCCL_SOCKET_IFNAME": "eth0",
    "GLOO_SOCKET_IFNAME": "=it's",
    "NCCL_IB_HCA": "mlx5_0:1,mlx5_1:1",
}


def render(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(
        ["sh", str(SCRIPT), *words], env=environment, capture_output=True, text=True, timeout=HANG_S
    )


def meeting(name: str, nodes: int, gpus: int) -> list[str]:
    """The arguments with which the pods meet."""
    where = [f"--master-addr={name}-0.{name}", "--master-port=29500"]
    return [f"--nnodes={nodes}", f"--nproc-per-node={gpus}", "--rdzv-backend=static", *where]


def container_of(job: dict[str, Any]) -> dict[str, Any]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container


def test_a_job_of_four_machines():
    done = render(
        *("+config=llama7b", "--data-path", "/data/it's here", "--lr=1e-3"),
        **NEEDED,
        **MACHINES,
        **NETWORK,
    )
    service, job = yaml.safe_load_all(done.stdout)
    selector = {"job-name": "llama"}
    assert service["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": selector,
    }
    assert (
        job["spec"]["completions"],
        job["spec"]["parallelism"],
        job["spec"]["completionMode"],
    ) == (4, 4, "Indexed")
    container = container_of(job)
    training = ["+config=llama7b", "--data-path", "/data/it's here", "--lr=1e-3"]
    assert container["args"] == [
        *meeting("llama", 4, 2),
        "--numa-binding=node",
        "-m",
        "nanotrain.train",
        *training,
    ]
    (rule,) = job["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"].popitem()[1]
    assert rule == {
        "labelSelector": {"matchLabels": selector},
        "topologyKey": "kubernetes.io/hostname",
    }
    assert {row["name"]: row["value"] for row in container["env"]} == {
        "OMP_NUM_THREADS": "1",
        **GRACE,
        **NETWORK,
    }
    assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > int(*GRACE.values())
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "2", "rdma/ib": "8"}}
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}


def test_without_variables():
    _, job = yaml.safe_load_all(render(**NEEDED, OMP_NUM_THREADS="6").stdout)
    container = container_of(job)
    assert {row["name"]: row["value"] for row in container["env"]} == {
        "OMP_NUM_THREADS": "6",
        **GRACE,
    }
    assert container["args"] == [*meeting("nanotrain", 1, 8), "-m", "nanotrain.train"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    assert not container["securityContext"]["capabilities"]["add"]


def test_a_pod_has_the_node_rank_of_its_index(tmp_path):
    _, job = yaml.safe_load_all(render(**NEEDED).stdout)
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "3"}
    command = [*container_of(job)["command"], "--lr", "a  b"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S)
    assert done.stdout == "--node-rank 3 --lr a  b\n" and done.returncode == 0


@pytest.mark.parametrize(
    ("verdict", "code"),
    [("restart: x", 1), ("exclude node7: x", 4), ("stop: x", 3), ("", 3)],
)
def test_a_failed_pod_obeys_the_verdict(tmp_path, verdict, code):
    _, job = yaml.safe_load_all(render("--lr", "a  b", **NEEDED, NODES="3").stdout)
    spec = job["spec"]
    assert spec["backoffLimit"] == 30 and spec["template"]["spec"]["restartPolicy"] == "Never"
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [3, 4]
    for name, text in (
        ("torchrun", "exit 1"),
        ("nanotrain", 'for word; do echo "<$word>"; done >&2\necho "$VERDICT"'),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "0"}
    container = container_of(job)
    done = subprocess.run(
        [*container["command"], *container["args"]],
        env=environment | {"VERDICT": verdict},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == code and f"verdict: {verdict}\n" in done.stderr
    words = [line[1:-1] for line in done.stderr.splitlines() if line.startswith("<")]
    assert words[:3] == ["verdict", "--exit-code", "1"] and words[5:] == ["--lr", "a  b"]


def test_a_deleted_pod_saves_and_is_not_judged(tmp_path):
    _, job = yaml.safe_load_all(render(**NEEDED).stdout)
    program = "trap 'echo saved; exit 1' TERM\necho ready\nwhile :; do sleep 0.02; done\n"
    (tmp_path / "torchrun").write_text(f"#!/bin/sh\n{program}")
    (tmp_path / "torchrun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "0"}
    pod = subprocess.Popen(
        container_of(job)["command"], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert pod.stdout.readline() == "ready\n"
    pod.terminate()
    rest, _ = pod.communicate(timeout=HANG_S)
    assert rest == "saved\n" and pod.returncode == 1


def test_an_image_and_a_volume_are_needed():
    for missing in NEEDED:
        done = render(**{name: value for name, value in NEEDED.items() if name != missing})
        assert done.returncode != 0 and f"{missing}: name " in done.stderr, missing


def test_help_prints_the_use_and_needs_no_variable() -> None:
    for script in ("launch_k8s", "launch_slurm"):
        for flag in ("--help", "-h"):
            shown = subprocess.run(
                ["bash", str(SCRIPT.with_name(script)), flag],
                env={"PATH": os.environ["PATH"]},
                capture_output=True,
                text=True,
                timeout=HANG_S,
            )
            assert shown.returncode == 0 and not shown.stderr
            assert f"scripts/{script} +config=llama7b --data-path" in shown.stdout
            assert "set -" not in shown.stdout and "#" not in shown.stdout
