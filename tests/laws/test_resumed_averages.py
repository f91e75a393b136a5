"""Law L3 on another layout for weights of corpora in the loss and means of saves: a run that stopped
on two ranks goes on in its folder with another layout. Its losses, also of each corpus, are those of
the run that did not stop, and the mean of a save before and one after the stop is theirs to the bit.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from nanotrain.checkpoint.read import read_global_tensors
from nanotrain.checkpoint.store import read_manifest
from tests.harness import SHORT_NAMES, run_ranks
from tests.laws.command_line import VOCAB_SIZE, arguments, run_command_lines
from tests.laws.megatron_file import write_tokens

LR = 1e-2
HOW = f"""--save-interval 2 --average-saves 2 --data-loss-weights web=1 math=4 --micro-batch-size 2
    --lr {LR} --adam-eps 1e-5 --lr-decay-style constant --lr-warmup-iters 0 --log-interval 1"""
# ranks, sizes of axes, options
LAYOUTS = {
    "one rank": (1, {}, ""),
    "tensor parallel": (2, {"tp": 2}, "--sequence-parallel"),
    "context parallel": (2, {"cp": 2}, "--micro-batch-size 4"),
    "pipeline parallel": (2, {"pp": 2}, "--data-parallel-sharding-strategy optim_grads"),
    "four ranks": (4, {"tp": 2}, "--data-parallel-sharding-strategy optim_grads_params"),
}


def line(run: Path, *more: str) -> list[str]:
    """The command line of a run on a blend of two corpora, which lie beside its folder."""
    for name, seed, numel in (("web", 1, 1200), ("math", 2, 500)):
        prefix = run.parent / name
        if not prefix.with_suffix(".idx").exists():
            tokens = np.random.default_rng(seed).integers(0, VOCAB_SIZE, numel)
            write_tokens(prefix, tokens.astype(np.uint16))
    blend = f"--data-path 0.7 {run.parent / 'web'} 0.3 {run.parent / 'math'}"
    return arguments(run, blend, HOW, *more)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of two runs on two ranks: one of six steps, and one that stopped after four."""
    folder = tmp_path_factory.mktemp("runs")
    sharded = "--data-parallel-sharding-strategy optim"
    full = line(folder / "full", "--train-iters 6", sharded)
    half = line(folder / "half", "--train-iters 4", sharded)
    run_ranks(2, run_command_lines, full, half, strategy="optim")
    return folder


def losses_of(run: Path) -> list[list[float]]:
    """The loss, that of each corpus and the gradient norm of every step."""
    found = []
    for text in (run / "metrics.jsonl").read_text().splitlines():
        step = json.loads(text)
        found.append([step["loss"], *step["source_losses"].values(), step["grad_norm"]])
    return found


def weights_of(step_folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, or of a mean, by name."""
    manifest = read_manifest(step_folder)
    names = [name for name in manifest.tensors if name.startswith("model/")]
    return dict(read_global_tensors(step_folder, names))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weighted_losses_and_means_of_saves_go_on(runs: Path, layout: str) -> None:
    num_ranks, sizes, options = LAYOUTS[layout]
    run = runs / layout.replace(" ", "-")
    shutil.copytree(runs / "half", run)
    axes = " ".join(
        f"--{SHORT_NAMES[axis].replace('_', '-')} {size}" for axis, size in sizes.items()
    )
    run_ranks(num_ranks, run_command_lines, line(run, "--train-iters 6", axes, options))

    full = runs / "full"
    losses, expected = losses_of(run), losses_of(full)
    assert len(losses) == 6 and losses[:4] == expected[:4]
    for found, step in zip(losses[4:], expected[4:], strict=True):
        assert found == pytest.approx(step, rel=1e-5)

    mean = weights_of(run / "averages" / "step-00000006")
    saves = [weights_of(run / "checkpoints" / f"step-0000000{step}") for step in (4, 6)]
    uninterrupted = weights_of(full / "averages" / "step-00000006")
    assert mean.keys() == uninterrupted.keys()
    for name, tensor in mean.items():
        before, after = (save[name].double() for save in saves)
        assert torch.equal(tensor, ((before + after) / 2).float()), name
        torch.testing.assert_close(tensor, uninterrupted[name], rtol=0, atol=1e-2 * LR, msg=name)
