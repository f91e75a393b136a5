"""NVFP4 in a run: random words by sample and name, the same bits again, training like bf16."""

from pathlib import Path

import torch

from nanotrain.kernels.fp8.layer import Fp8Layer
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.step import train_step
from tests.train.parts.test_fp8_amaxes import STEPS, falling_losses
from tests.train.small_run import Spy, small_run, train

NVFP4 = ["--bf16", "--fp4-format", "e2m1"]


def losses_of(folder: Path, *arguments: str, stops: tuple[str, ...] = ("4",)) -> list[float]:
    losses = []
    for stop in stops:
        with small_run(folder, *STEPS, *NVFP4, *arguments, "--train-iters", stop) as run:
            spy = Spy()
            train(run, spy, CheckpointHook())
            losses += [report.output.loss for report in spy.reports]
    return losses


def test_a_run_repeats_to_the_bit_recomputed_and_resumed(tmp_path: Path) -> None:
    straight = losses_of(tmp_path / "straight")
    full = ["--recompute-granularity", "full", "--recompute-method", "uniform"]
    assert losses_of(tmp_path / "full", *full, "--recompute-num-layers", "1") == straight
    assert losses_of(tmp_path / "stopped", stops=("2", "4")) == straight
    assert losses_of(tmp_path / "seed", "--seed", "7") != straight


def test_layers_have_their_global_names_and_every_microbatch_other_words(tmp_path: Path) -> None:
    with small_run(tmp_path, *STEPS, *NVFP4) as run:
        (stage,) = run.stages.values()
        layers = [module for module in stage.modules() if isinstance(module, Fp8Layer)]
        assert len({layer.key.word for layer in layers}) == len(layers) == 7
        words = []
        for _ in range(2):
            batch = run.batch_iterator.next()
            assert batch is not None
            train_step(run, batch)
            words.append(layers[0].options.rounding.tokens)
        assert words[0].shape == words[1].shape and not torch.equal(*words)


def test_training_follows_that_of_bf16(tmp_path: Path) -> None:
    expected = falling_losses(tmp_path / "bf16", "--bf16")
    losses = falling_losses(tmp_path / "nvfp4", *NVFP4)
    assert losses[0] != expected[0] and abs(losses[0] - expected[0]) < 0.02
    assert abs(losses[-1] - expected[-1]) < 0.15  # measured 0.08
    some = ["--num-layers", "4", "--first-last-layers-bf16", "--num-layers-at-end-in-bf16", "2"]
    with small_run(tmp_path / "some", *NVFP4, *some) as run:
        names = [
            name for name, module in run.stages[0].named_modules() if isinstance(module, Fp8Layer)
        ]
    assert {name.split(".")[1] for name in names} == {"1"}
