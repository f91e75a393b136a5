"""A corpus has the same bytes whoever writes its parts: one process, shares by hand, a Slurm array,
a Ray cluster.
"""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from nanotrain.cli.main import main
from nanotrain.data.corpus_info import read_info
from nanotrain.data.token_format import bin_path, idx_path, sums_path
from nanotrain.prepare import executors
from tests.harness import HANG_S

TEXTS = [f"document {i} {'word ' * (i % 50)}" for i in range(400)]
# Slurm as far as an array needs it: sbatch runs the script from its input once per index, squeue
# lists what runs.
SBATCH = """#!{python}
import os, re, subprocess, sys
script, options = sys.stdin.read(), " ".join(sys.argv[1:])
if "--partition=gone" in options:
    sys.exit("sbatch: error: invalid partition specified: gone")
last, output = re.search(r"--array=1-(\\d+)", options)[1], re.search(r"--output=(\\S+)", options)[1]
for index in range(1, int(last) + 1):
    if "--comment=lose" in options:
        continue
    environment = dict(os.environ, SLURM_ARRAY_TASK_ID=str(index))
    with open(output.replace("%A", "7").replace("%a", str(index)), "w") as file:
        subprocess.run(["sh"], input=script, text=True, env=environment, stdout=file, stderr=file)
print("7;cluster")
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("nanotrain.prepare.chunks._MIN_BYTES", 2000)
    monkeypatch.setattr(executors, "POLL_S", 0.05)
    file = tmp_path / "in.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return file


def line(source: Path, output: Path, *more: str) -> list[str]:
    return [
        "prepare",
        "--input",
        str(source),
        "--output",
        str(output),
        "--tokenizer",
        "bpe:280",
        "--workers",
        "1",
        *more,
    ]


def content(prefix: Path) -> list[bytes]:
    files = (
        bin_path(prefix),
        idx_path(prefix),
        sums_path(prefix),
        prefix.with_name(f"{prefix.name}.tokenizer") / "tokenizer.json",
    )
    return [file.read_bytes() for file in files]


@pytest.fixture
def expected(source: Path, tmp_path: Path) -> list[bytes]:
    assert main(line(source, tmp_path / "one")) == 0
    return content(tmp_path / "one")


def test_shares_on_several_machines_join_to_the_same_bytes(
    source: Path, tmp_path: Path, expected: list[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    for share in (3, 1, 4):
        assert main(line(source, tmp_path / "four", "--part", f"{share}/4")) == 0
    assert "share 4/4 is complete; " in capsys.readouterr().out
    assert not bin_path(tmp_path / "four").exists()
    assert main(line(source, tmp_path / "four")) == 0  # which writes what is missing, too
    assert "resuming: " in capsys.readouterr().out
    assert content(tmp_path / "four") == expected
    info = read_info(tmp_path / "four")
    assert info == replace(read_info(tmp_path / "one"), tokenizer="four.tokenizer")
    assert info.inputs == {str(source): hashlib.sha256(source.read_bytes()).hexdigest()}
    assert len(info.tokenizer_sha256) == 64
    assert main(line(source, tmp_path / "four", "--part", "1/4")) == 0
    assert "already prepared" in capsys.readouterr().out


def test_shares_that_start_at_once_train_one_tokenizer(
    source: Path, tmp_path: Path, expected: list[bytes]
) -> None:
    codes: list[int] = []
    threads = [
        threading.Thread(
            target=lambda share=share: codes.append(
                main(line(source, tmp_path / "two", "--part", share))
            )
        )
        for share in ("1/2", "2/2")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert codes == [0, 0]
    assert main(line(source, tmp_path / "two")) == 0
    assert content(tmp_path / "two") == expected


def slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f'#!/bin/sh\nexec {sys.executable} -m nanotrain "$@"\n'
    for name, text in (
        ("sbatch", SBATCH.replace("{python}", sys.executable)),
        ("squeue", "#!/bin/sh\n"),
        ("nanotrain", program),
    ):
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")


def test_a_slurm_array_writes_the_same_bytes(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    slurm(tmp_path, monkeypatch)
    # of one part: other processes divide with other bounds than this test
    small = source.with_name("small.jsonl")
    small.write_text(source.read_text()[:3000].rpartition("\n")[0] + "\n")
    assert main(line(small, tmp_path / "one")) == 0
    monkeypatch.setattr("nanotrain.prepare.chunks._MIN_BYTES", 1 << 20)
    array = ["--executor", "slurm", "--workers", "2", "--sbatch"]
    monkeypatch.setattr(executors, "GONE_S", 0.1)
    assert main(line(small, tmp_path / "array", *array, "partition=gone")) == 2
    assert "sbatch refused the job: sbatch: error: invalid partition" in capsys.readouterr().err
    assert main(line(small, tmp_path / "array", *array, "partition=cpu mem=8G")) == 0
    assert content(tmp_path / "array") == content(tmp_path / "one")
    # a job of which a task was lost
    assert main(line(small, tmp_path / "lost", *array, "comment=lose")) == 2
    assert "the Slurm job 7 has ended, and 1 part is missing" in capsys.readouterr().err
    assert main(line(small, tmp_path / "lost")) == 0
    assert content(tmp_path / "lost") == content(tmp_path / "one")


def test_a_ray_cluster_writes_the_same_bytes(
    source: Path, tmp_path: Path, expected: list[bytes]
) -> None:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        assert main(line(source, tmp_path / "ray", "--executor", "ray", "--workers", "2")) == 0
    finally:
        ray.shutdown()
    assert content(tmp_path / "ray") == expected


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--part", "5/4"], "--part 5/4 cannot be read"),
        (["--part", "0/4"], "--part 0/4 cannot be read"),
        (["--part", "half"], "--part half cannot be read"),
        (["--part", "1/2", "--executor", "ray"], "the executor divides the input"),
        (["--part", "1/2", "--streaming"], "a stream is read by one machine"),
        (["--sbatch", "mem=8G"], "--sbatch has no effect"),
        (["--executor", "slurm"], "sbatch"),
    ],
)
def test_mistakes_are_one_message(
    source: Path, tmp_path: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line(source, tmp_path / "out", *more)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif("NANOTRAIN_DRILLS" not in os.environ, reason="set NANOTRAIN_DRILLS=1 to run it")
def test_a_worker_killed_twenty_times_changes_no_byte(source: Path, tmp_path: Path) -> None:
    rows = source.with_name("rows.jsonl")
    rows.write_text(source.read_text() * 200)
    assert main(line(rows, tmp_path / "one")) == 0
    draw, kills = random.Random(0), 0
    command = [
        sys.executable,
        "-m",
        "nanotrain",
        *line(rows, tmp_path / "killed", "--workers", "2"),
    ]
    while True:
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            if kills < 20:
                workers: list[int] = []
                while not workers and process.poll() is None:  # until the tokenizer is trained
                    time.sleep(0.1)
                    workers = [
                        worker for child in children(process.pid) for worker in children(child)
                    ]
                time.sleep(draw.uniform(0.0, 3.0))
                if process.poll() is None:
                    with suppress(ProcessLookupError):
                        os.kill(draw.choice(workers), signal.SIGKILL)
                        kills += 1
            if process.wait(HANG_S) == 0:
                break
    assert kills > 5 and content(tmp_path / "killed") == content(tmp_path / "one")


def children(pid: int) -> list[int]:
    """Processes that a process has started; of the trainer a fork server, whose children are the
    workers.
    """
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []
