"""Laws L1 and L3 over NCCL on 2 to 8 GPUs: every layout trains as one rank does, and a resumed run
as a whole one.

LAYOUTS_ON=cpu pytest -m gpu tests/gpu/test_layouts_gpu.py                       # the same over gloo, on 4 ranks
scripts/without_gpu --gpus 4 pytest -m gpu tests/gpu/test_layouts_gpu.py         # over the stand-in of NCCL
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import HANG_S
from tests.laws.command_line import arguments, assert_same_to_the_bit, steps_of

DEVICE = os.environ.get("LAYOUTS_ON", "cuda")
NUM_DEVICES = torch.cuda.device_count() if DEVICE == "cuda" else 4
HOW = f"""--device {DEVICE} --num-layers 4 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2
    --global-batch-size 16 --micro-batch-size 2 --train-iters 4 --no-save --lr-warmup-iters 0 --deterministic-mode"""
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather --data-parallel-sharding-strategy"
SEQUENCES = "--tensor-model-parallel-size 2 --sequence-parallel"
STAGES = "--pipeline-model-parallel-size 2"
# ranks, flags of the layout, and of the model on both sides
LAYOUTS = {
    "dp, ZeRO-1": (2, f"{OVERLAP} optim", ""),
    "dp, ZeRO-2, compiled": (2, f"{OVERLAP} optim_grads --torch-compile", ""),
    "dp, ZeRO-3": (2, f"{OVERLAP} optim_grads_params", ""),
    "tp and sequences": (2, SEQUENCES, ""),
    "tp in pieces, registered": (2, f"{SEQUENCES} --tp-comm-overlap --nccl-ub", ""),
    "dp, tp in pieces": (4, f"{SEQUENCES} --tp-comm-overlap --nccl-ub {OVERLAP} optim", ""),
    "pp, zero bubble": (2, f"{STAGES} --pipeline-schedule zb-h1", ""),
    "cp, ring": (2, "--context-parallel-size 2", ""),
    "ep": (2, f"--expert-model-parallel-size 2 {OVERLAP} optim_grads", EXPERTS),
    "tp, pp": (4, f"{SEQUENCES} {STAGES}", ""),
    "dp, tp, ZeRO-3": (4, f"{SEQUENCES} {OVERLAP} optim_grads_params", ""),
    "dp of two instances": (4, f"{OVERLAP} optim --num-distributed-optimizer-instances 2", ""),
    "dp, tp, pp": (8, f"{SEQUENCES} {STAGES} {OVERLAP} optim", ""),
    "dp, ep, pp": (8, f"{STAGES} --expert-model-parallel-size 2 {OVERLAP} optim_grads", EXPERTS),
}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and NUM_DEVICES < 2, reason=f"needs 2 GPUs, of {NUM_DEVICES}"
    ),
]


def train(folder: Path, num_ranks: int, *flags: str) -> Path:
    """Train under torchrun; the run folder."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_ranks}",
    ]
    command = [*launcher, "-m", "nanotrain.train", *arguments(folder, HOW, *flags)]
    finished = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=HANG_S
    )
    assert finished.returncode == 0, finished.stdout
    return folder


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The steps of one rank, by flags of the model."""
    folder = tmp_path_factory.mktemp("one")
    return {
        model: steps_of(train(folder / f"run-{number}", 1, model, "--no-torch-compile"))
        for number, model in enumerate(("", EXPERTS))
    }


def require(num_ranks: int) -> None:
    if num_ranks > NUM_DEVICES:
        pytest.skip(f"needs {num_ranks} GPUs, of {NUM_DEVICES}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_one_rank_does(layout: str, one_rank: Any, tmp_path: Path) -> None:
    num_ranks, how, model = LAYOUTS[layout]
    require(num_ranks)
    compiles = "" if "--torch-compile" in how else "--no-torch-compile"
    steps = steps_of(train(tmp_path / "run", num_ranks, model, how, compiles))
    for name, tolerance in (("loss", 1e-4), ("grad_norm", 1e-3)):
        expected = [step[name] for step in one_rank[model]]
        assert [step[name] for step in steps] == pytest.approx(expected, rel=tolerance), name


@pytest.mark.parametrize("layout", ["dp, ZeRO-3", "tp and sequences", "dp, tp, ZeRO-3"])
def test_a_resumed_run_is_one_that_never_stopped(layout: str, tmp_path: Path) -> None:
    num_ranks, how, model = LAYOUTS[layout]
    require(num_ranks)
    flags = model, how, "--no-torch-compile --save --save-interval 2"
    full = train(tmp_path / "full", num_ranks, *flags)
    for _ in range(2):
        halves = train(tmp_path / "halves", num_ranks, *flags, "--exit-interval 2")
    assert_same_to_the_bit(halves, full)
