"""Law L3: a stopped and resumed run equals an uninterrupted run, to the bit.

With the real command line under torchrun's agent where processes, signals and data workers matter,
else on the ranks of the test harness. Another layout sums in another order, so its losses agree to
1e-5.
"""

import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nanotrain.train import fit as trainer
from nanotrain.train import phases
from nanotrain.train.main import main
from tests.harness import HANG_S, forkserver, run_ranks
from tests.laws.command_line import (
    GLOBAL_BATCH,
    Finished,
    ForkedRanks,
    arguments,
    assert_same_to_the_bit,
    run_command_lines,
    steps_of,
    train_under_torchrun,
)
from tests.laws.megatron_file import write_tokens

TEN = "--train-iters 10 --micro-batch-size 6"
STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
# Every strategy with main params of their own, the fewest and the most sharded without, and with a
# loss scale.
PRECISIONS = [
    *((strategy, "bf16") for strategy in STRATEGIES),
    *((strategy, "fp32") for strategy in ("no_shard", "optim_grads")),
    *((strategy, "fp16") for strategy in ("optim", "optim_grads_params")),
]
# A busy machine is many times slower than an idle one.
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(("strategy", "dtype"), PRECISIONS)
def test_three_and_three_steps_are_six(tmp_path: Path, strategy: str, dtype: str) -> None:
    how = f"--train-iters 6 --micro-batch-size 6 --params-dtype {dtype} --data-parallel-sharding-strategy {strategy}"
    how += " --overlap-grad-reduce --ema-decay 0.8"
    if dtype == "fp16":  # overflows and a growing scale before and after the stop
        how += " --initial-loss-scale 2097152 --hysteresis 1 --loss-scale-window 2"
    full, halves = tmp_path / "full", tmp_path / "halves"
    stopping = arguments(halves, how, "--exit-interval 3")

    run_ranks(2, run_command_lines, arguments(full, how), stopping, stopping, strategy=strategy)

    skipped = [step["skipped"] for step in steps_of(full)]
    assert len(skipped) == 6
    assert [any(skipped[:3]), any(skipped[3:])] == [dtype == "fp16"] * 2
    assert_same_to_the_bit(halves, full)


def test_a_killed_run_repeats_the_steps_after_its_last_checkpoint(tmp_path: Path) -> None:
    full, killed = tmp_path / "full", tmp_path / "killed"
    run_ranks(
        2,
        run_command_lines,
        arguments(full, TEN),
        arguments(killed, TEN, "--save-interval 4 --exit-interval 6 --async-save"),
    )
    # As after a kill during the save of step 6: a truncated line and an unfinished checkpoint.
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    saved = killed / "checkpoints" / "step-00000006"
    saved.rename(saved.with_suffix(".tmp"))

    run_ranks(2, run_command_lines, arguments(killed, TEN))

    assert_same_to_the_bit(killed, full)
    assert sorted(path.name for path in saved.parent.iterdir()) == [
        "step-00000004",
        "step-00000010",
    ]


LAYOUTS = {  # ranks and arguments of the last two of six steps
    "one rank": (1, ""),
    "three ranks": (3, "--micro-batch-size 2"),
    "four ranks, another micro batch": (4, "--micro-batch-size 1"),
    "no_shard": (2, "--data-parallel-sharding-strategy no_shard"),
    "optim_grads": (2, "--data-parallel-sharding-strategy optim_grads"),
    "two instances of two ranks": (
        4,
        "--num-distributed-optimizer-instances 2 --micro-batch-size 1",
    ),
    "optim_grads_params": (2, "--data-parallel-sharding-strategy optim_grads_params"),
    "another bucket size": (2, "--ddp-bucket-size 1000"),
    "no overlap, other padding": (
        2,
        "--no-overlap-param-gather --ddp-pad-buckets-for-high-nccl-busbw",
    ),
    "all of it": (
        3,
        "--data-parallel-sharding-strategy optim_grads --ddp-bucket-size 700 --micro-batch-size 1",
    ),
}


@pytest.fixture(scope="module")
def half_done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs on two ranks: `half`, stopped after four of six steps, and `full`."""
    folder = tmp_path_factory.mktemp("layouts")
    stopping = arguments(folder / "half", TEN, "--train-iters 6 --exit-interval 4")
    run_ranks(
        2,
        run_command_lines,
        arguments(folder / "full", TEN, "--train-iters 6"),
        stopping,
        strategy="optim",
    )
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_resumes_in_another_layout(tmp_path: Path, half_done: Path, layout: str) -> None:
    num_ranks, how = LAYOUTS[layout]
    start = f"--train-iters 6 --load {half_done / 'half'}"

    run_ranks(num_ranks, run_command_lines, arguments(tmp_path / "run", TEN, start, how))

    resumed, full = steps_of(tmp_path / "run"), steps_of(half_done / "full")[4:]
    assert [step["step"] for step in resumed] == [5, 6]
    for name in ("loss", "grad_norm"):
        assert [step[name] for step in resumed] == pytest.approx(
            [step[name] for step in full], rel=1e-5
        )
    assert [step["consumed_samples"] for step in resumed] == [
        step["consumed_samples"] for step in full
    ]


def test_a_run_from_hugging_face_weights_resumes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {
        "num_hidden_layers": 2,
        "hidden_size": 48,
        "intermediate_size": 80,
        "max_position_embeddings": 128,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500}
    LlamaForCausalLM(LlamaConfig(**shape, **heads)).save_pretrained(tmp_path / "llama")
    write_tokens(
        tmp_path / "tokens", np.random.default_rng(0).integers(0, 500, 7000).astype(np.uint16)
    )
    line = f"""+config=tiny --pretrained-checkpoint {tmp_path / "llama"} --data-path {tmp_path / "tokens"}
        --split 1,0,0 data.shuffle=false --seq-length 64 --micro-batch-size 4 --global-batch-size 8 --train-iters 3
        --lr 1e-2 --lr-decay-style constant --lr-warmup-iters 0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
        --clip-grad 0.5 --eval-interval 0 --save-interval 3 --seed 1 precision.params_dtype=fp32
        --data-parallel-sharding-strategy optim_grads train.run_dir={tmp_path / "out"}"""

    longer = line.replace("--train-iters 3", "--train-iters 6")
    uninterrupted = longer.replace(str(tmp_path / "out"), str(tmp_path / "full"))
    lines = [text.split() for text in (line, longer, uninterrupted)]

    run_ranks(2, run_command_lines, *lines, strategy="optim_grads")

    # The second run starts from the checkpoint: from the Hugging Face weights its steps 4 to 6
    # would be others.
    assert [step["step"] for step in steps_of(tmp_path / "out")] == list(range(1, 7))
    assert_same_to_the_bit(tmp_path / "out", tmp_path / "full")


@pytest.mark.parametrize("by_scheduler", [True, False])
def test_a_signal_ends_the_run_after_its_step(tmp_path: Path, by_scheduler: bool) -> None:
    full, stopped = tmp_path / "full", tmp_path / "stopped"
    how = "--bf16 --data-parallel-sharding-strategy optim --overlap-grad-reduce --overlap-param-gather --num-workers 1"
    endless = f"--train-iters 100000 --micro-batch-size 6 --lr-decay-style constant --save-interval 100000 {how}"
    if by_scheduler:  # torchrun forwards the SIGTERM to its ranks and exits with 1
        logs = tmp_path / "logs"
        torchrun = forkserver().Process(
            target=train_under_torchrun, args=(arguments(stopped, endless), logs)
        )
        torchrun.start()
        await_step(stopped, 4, is_running=torchrun.is_alive)
        torchrun.terminate()
        torchrun.join(HANG_S)
        ended = Finished(
            torchrun.exitcode, "".join(file.read_text() for file in sorted(logs.rglob("std*.log")))
        )
    else:  # Ctrl-C on one rank; the others stop with it through the flag that every step reduces
        ranks = ForkedRanks(arguments(stopped, endless), folder=tmp_path)
        await_step(stopped, 4, is_running=lambda: ranks.is_running)
        os.kill(ranks.processes[1].pid, signal.SIGINT)
        ended = ranks.wait()

    assert ended.exit_code == by_scheduler, ended.output
    last = steps_of(stopped)[-1]["step"]
    assert re.search(
        rf"stopping after step {last}: (received SIGTERM|another rank stops)", ended.output
    )
    assert (stopped / "checkpoints" / f"step-{last:08d}" / "manifest.json").exists()
    continued = endless.replace("100000", str(last + 3), 1)
    # without data workers
    run_ranks(2, run_command_lines, arguments(full, continued), strategy="optim")
    if by_scheduler:
        resumed = ForkedRanks(arguments(stopped, continued), folder=tmp_path).wait()
        assert resumed.exit_code == 0, resumed.output
        assert f"step {last}, {GLOBAL_BATCH * last} samples consumed" in resumed.output
    else:
        run_ranks(2, run_command_lines, arguments(stopped, continued), strategy="optim")
    assert_same_to_the_bit(stopped, full)
    assert [step["consumed_samples"] for step in steps_of(stopped)] == [
        GLOBAL_BATCH * (number + 1) for number in range(last + 3)
    ]


def test_a_run_stops_at_its_time_limit_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, timed = tmp_path / "full", tmp_path / "timed"
    endless = "--train-iters 100000 --lr-decay-style constant --num-workers 0"

    # A clock that goes on by a second with every look: at the start, and once before each step.
    with monkeypatch.context() as patch:
        clock = SimpleNamespace(monotonic=partial(next, count()))
        patch.setattr(phases, "time", clock)
        patch.setattr(trainer, "time", clock)
        assert main(arguments(timed, endless, "--exit-duration-in-mins 0.1")) == 0

    done = len(steps_of(timed))
    assert done == 5
    continued = endless.replace("100000", str(done + 2))
    assert main(arguments(timed, continued)) == 0
    assert main(arguments(full, continued)) == 0
    assert_same_to_the_bit(timed, full)


def await_step(run_dir: Path, step: int, *, is_running: Callable[[], bool]) -> None:
    """Wait until a run has logged a step."""
    deadline = time.monotonic() + HANG_S
    metrics = run_dir / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < step:
        assert is_running()
        assert time.monotonic() < deadline, f"no step {step} within {HANG_S} s"
        time.sleep(0.02)
