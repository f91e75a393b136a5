"""Law L1 over CUDA and NCCL: ranks on fake GPUs compute the losses of one process on the CPU.

The runs take the paths of GPUs: streams, pinned memory, caching allocator, ProcessGroupNCCL, attention on the device.
Only the kernels are the CPU's (tests/fake_cuda). It needs a CUDA build of torch, and no GPU.
"""

import json
import os
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
    "experts": (2, "tiny_moe", "", "--expert-model-parallel-size 2 --data-parallel-sharding-strategy optim_grads"),
    "window and sinks, offload": (
        1,
        "tiny",
        "--window-size 8,0 --softmax-type learnable",
        "--cpu-offloading --cpu-offloading-num-layers 2 --optimizer-cpu-offload",
    ),
}  # fmt: skip

pytestmark = pytest.mark.skipif(bool(is_possible()), reason=f"no fake GPU here: {is_possible()}")


def rows(command: list[str], folder: Path) -> list[dict[str, float]]:
    """Run a command of training; the rows of its metrics."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, "--run-dir", folder], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", CASES)
def test_ranks_on_fake_gpus_train_as_one_process_on_the_cpu(name, tmp_path):
    num_ranks, recipe, flags, layout = CASES[name]
    train = ["-m", "nanotrain.train", *MODEL.format(recipe=recipe).split(), *flags.split()]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    fake = [sys.executable, ROOT / "scripts/without_gpu", "--gpus", str(num_ranks), "--build-in", ROOT / "build"]
    on_gpus = [*torchrun, *train, *layout.split(), "--device", "cuda"]
    found = rows([*map(str, fake), *on_gpus, "--no-torch-compile"], tmp_path / "gpus")
    expected = rows([sys.executable, *train, "--device", "cpu"], tmp_path / "cpu")
    for key, tolerance in (("loss", 1e-6), ("grad_norm", 1e-4)):
        assert [row[key] for row in found] == pytest.approx([row[key] for row in expected], rel=tolerance)
