"""The loss gap of a tiny twin by recipe: `python benchmarks/low_precision_loss.py`.

One model, the same initial weights and the same samples, trained in bf16 and with the products of
each recipe in the emulation of a CPU. Samples are sequences of a random Markov chain, which a model
learns to its entropy of 0.863 nats per token. The gap is that of the mean losses of the last steps,
relative to bf16; a second run in bf16 with other initial weights shows what is noise.

    256 tokens per step   3 layers of width 128   100 steps
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.load import load
from nanotrain.data.batch import Sample
from nanotrain.data.build import DatasetSplits
from nanotrain.plan.plan import plan_run
from nanotrain.runs.folder import RunFolder
from nanotrain.train.build import build_run
from nanotrain.train.run import RunInputs
from nanotrain.train.step import train_step

VOCAB, LENGTH = 128, 64
ODDS = [0.7, 0.2, 0.07, 0.03]
CHOICES = len(ODDS)
SIZES = ["--num-layers", "3", "--hidden-size", "128", "--num-attention-heads", "4"]
TRAINING = [
    *("--vocab-size", str(VOCAB), "--seq-length", str(LENGTH), "--mock-data"),
    *("--micro-batch-size", "4", "--global-batch-size", "4", "--num-workers", "0"),
    *("--lr", "3e-3", "--lr-warmup-iters", "20", "--lr-decay-style", "cosine"),
    *("--eval-interval", "0", "--no-save", "--bf16", "--swiglu"),
]
NVFP4 = ["--fp4-format", "e2m1"]
RECIPES: dict[str, list[str]] = {
    "bf16": [],
    "bf16, another seed": ["--seed", "4321"],
    "fp8 tensorwise, hybrid": ["--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"],
    "fp8 blockwise": ["--fp8-format", "e4m3", "--fp8-recipe", "blockwise"],
    "mxfp8": ["--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"],
    "nvfp4": NVFP4,
    "nvfp4, last layer in bf16": [
        *(*NVFP4, "--first-last-layers-bf16"),
        *("--num-layers-at-start-in-bf16", "0", "--num-layers-at-end-in-bf16", "1"),
    ],
}


def transitions() -> np.ndarray:
    """[V, choices]: the tokens that may follow a token."""
    return np.random.default_rng(0).integers(0, VOCAB, (VOCAB, CHOICES))


@dataclass(frozen=True)
class MarkovChain:
    """Sequences in which one of four tokens follows a token, with the probabilities `ODDS`."""

    samples_per_epoch: int = 1_000_000
    table: np.ndarray = field(default_factory=transitions)

    def __getitem__(self, index: int) -> Sample:
        draw = np.random.default_rng(index)
        picks = draw.choice(CHOICES, size=LENGTH + 1, p=ODDS)
        stream = [draw.integers(0, VOCAB)]
        for pick in picks[1:]:
            stream.append(self.table[stream[-1], pick])
        tokens = np.array(stream)
        return Sample(
            tokens=tokens[:-1], labels=tokens[1:], loss_mask=np.ones(LENGTH, dtype=np.float32)
        )


def losses_of(flags: Sequence[str], *, steps: int) -> list[float]:
    """The losses of a run with these flags."""
    with TemporaryDirectory() as folder:
        steps_flags = ["--train-iters", str(steps), "--run-dir", folder]
        config = load([*SIZES, *TRAINING, *steps_flags, *flags]).config
        plan = plan_run(config, 1, rank=0)
        data = DatasetSplits(MarkovChain(), None, None)
        inputs = RunInputs(RunFolder(Path(folder)), data)
        run = build_run(plan, inputs, context=ParallelContext.attach(plan.topology))
        losses = []
        for _ in range(steps):
            batch = run.batch_iterator.next()
            assert batch is not None
            losses.append(train_step(run, batch).loss)
        run.batches.close()
    return losses


def main(arguments: Sequence[str] | None = None, show: Callable[[str], None] = print) -> None:
    """Print a row per recipe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--last", type=int, default=20, help="steps of the mean")
    options = parser.parse_args(arguments)
    show(
        f"| products | loss at step 1 | mean of the last {options.last} of {options.steps} | gap |"
    )
    show("|---|---:|---:|---:|")
    expected = None
    for name, flags in RECIPES.items():
        losses = losses_of(flags, steps=options.steps)
        mean = sum(losses[-options.last :]) / options.last
        expected = expected or mean
        gap = 100 * (mean / expected - 1)
        show(f"| {name} | {losses[0]:.4f} | {mean:.4f} | {gap:+.2f} % |")


if __name__ == "__main__":
    main()
