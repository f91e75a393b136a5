"""Laws L1 and L5 over CUDA and NCCL: ranks on fake GPUs compute the losses of one process in the
planned memory.

The runs take the paths of GPUs: streams, pinned memory, caching allocator, ProcessGroupNCCL,
attention on the device. Only the kernels are the CPU's (tests/fake_cuda). It needs a CUDA build of
torch, and no GPU.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_cuda.build import is_possible

ROOT = Path(__file__).resolve().parents[2]
MODEL = """+config={recipe} --mock-data --vocab-size 256 --num-layers 4 --hidden-size 64 --num-attention-heads 4
    --ffn-hidden-size 96 --seq-length 32 --micro-batch-size 1 --global-batch-size 4 --train-iters 3 --log-interval 1
    --eval-iters 1 --eval-interval 3 --lr-warmup-iters 0 --generate-tokens 0 --no-save --no-report --num-workers 0"""
# name -> ranks, recipe, flags of both runs, flags of the layout
CASES = {
    "pipeline and ZeRO-1": (
        4,
        "tiny",
        "",
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --data-parallel-sharding-strategy optim "
        "--overlap-grad-reduce --overlap-param-gather",
    ),
    "tensors and ZeRO-3": (
        4,
        "tiny",
        "",
        "--tensor-model-parallel-size 2 --sequence-parallel --data-parallel-sharding-strategy optim_grads_params",
    ),
    "ring attention over documents": (
        2,
        "tiny",
        "--reset-attention-mask --reset-position-ids",
        "--context-parallel-size 2",
    ),
    "attention to gathered keys": (2, "tiny", "", "--context-parallel-size 2 --cp-comm-type allgather"),
    "experts": (
        2,
        "tiny_moe",
        "",
        "--expert-model-parallel-size 2 --moe-expert-rank-capacity-factor 2 "
        "--data-parallel-sharding-strategy optim_grads",
    ),
    "window and sinks, offload, profile": (
        1,
        "tiny",
        "--window-size 8,0 --softmax-type learnable",
        "--cpu-offloading --cpu-offloading-num-layers 2 --optimizer-cpu-offload "
        "--profile --profile-step-start 2 --profile-step-end 2",
    ),
}  # fmt: skip

pytestmark = pytest.mark.skipif(bool(is_possible()), reason=f"no fake GPU here: {is_possible()}")


NUMBER = r"([\d.]+) (MB|GB)"


def run(command: list[str]) -> str:
    """Run a command; what it prints."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows(command: list[str], folder: Path) -> list[dict[str, float]]:
    """Run a command of training; the rows of its metrics."""
    run([*command, "--run-dir", str(folder)])
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def on_fake_gpus(num_ranks: int, train: list[str], *flags: str) -> list[str]:
    """The command of a run on fake GPUs, with flags of `scripts/without_gpu`."""
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_ranks),
    ]
    return [
        *fake_gpus(num_ranks, *flags),
        *torchrun,
        *train,
        "--device",
        "cuda",
        "--no-torch-compile",
    ]


def fake_gpus(number: int, *flags: str) -> list[str]:
    """What comes before a command that runs on fake GPUs."""
    fake = [
        sys.executable,
        ROOT / "scripts/without_gpu",
        "--gpus",
        number,
        "--build-in",
        ROOT / "build",
        *flags,
    ]
    return list(map(str, fake))


@pytest.mark.parametrize("name", CASES)
def test_ranks_on_fake_gpus_train_as_one_process_on_the_cpu(name, tmp_path):
    num_ranks, recipe, flags, layout = CASES[name]
    train = ["-m", "nanotrain.train", *MODEL.format(recipe=recipe).split(), *flags.split()]
    found = rows(on_fake_gpus(num_ranks, [*train, *layout.split()]), tmp_path / "gpus")
    expected = rows([sys.executable, *train, "--device", "cpu"], tmp_path / "cpu")
    for key, tolerance in (("loss", 1e-6), ("grad_norm", 1e-4)):
        assert [row[key] for row in found] == pytest.approx(
            [row[key] for row in expected], rel=tolerance
        )


TWO_RUNS = """
import nanotrain
from nanotrain.config.load import load

for folder in ("first", "second"):
    nanotrain.pretrain(load({words} + ["--run-dir", folder]).config)
"""


def test_a_program_trains_twice(tmp_path):
    words = [
        *MODEL.format(recipe="tiny").split(),
        "--tensor-model-parallel-size",
        "2",
        "--device",
        "cuda",
    ]
    program = tmp_path / "program.py"
    program.write_text(TWO_RUNS.format(words=[*words, "--no-torch-compile"]))
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        str(program),
    ]
    run([*fake_gpus(4), "env", "--chdir", str(tmp_path), *torchrun])
    first, second = (
        (tmp_path / folder / "metrics.jsonl").read_text() for folder in ("first", "second")
    )
    assert [json.loads(row)["loss"] for row in first.splitlines()] == [
        json.loads(row)["loss"] for row in second.splitlines()
    ]


PLANNED = {
    "plain": "",
    "sharded gradients": "--data-parallel-sharding-strategy optim_grads",
    "fp32": "--params-dtype fp32",
    "multi-latent attention": """--multi-latent-attention --q-lora-rank 256 --kv-lora-rank 128 --qk-head-dim 128
        --qk-pos-emb-head-dim 64 --v-head-dim 128 --position-embedding-type rope --disable-bias-linear""",
}


@pytest.mark.parametrize("flags", PLANNED.values(), ids=PLANNED)
def test_the_peak_of_the_allocator_is_planned(flags, tmp_path):
    num_ranks = 2 if "optim_grads" in flags else 1
    words = f"""+config=gpt2_124m --mock-data --vocab-size 50304 --micro-batch-size 4 --global-batch-size 8
        --train-iters 2 --eval-interval 0 --generate-tokens 0 --no-save --no-report --num-workers 0 {flags}"""
    train = ["-m", "nanotrain.train", *words.split()]
    printed = run([*on_fake_gpus(num_ranks, train, "--no-values"), "--run-dir", str(tmp_path)])
    summary = re.search(rf"planned {NUMBER} per rank; measured at most {NUMBER}", printed)
    assert summary is not None, printed
    planned, measured = (float(summary[i]) * {"MB": 1, "GB": 1000}[summary[i + 1]] for i in (1, 3))
    assert 0.998 * measured <= planned <= 1.05 * measured  # both are rounded to three digits


@pytest.mark.parametrize("major", [9, 10])
def test_the_tests_marked_gpu_pass_with_the_values_of_the_cpu(major):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
        "tests/gpu",
    ]
    printed = run([*fake_gpus(1, "--major", str(major)), *command])
    assert "CUDA device" not in printed, "some were skipped, as if there were no GPU"
