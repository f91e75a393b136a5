"""A signal between the microbatches of a step or of a validation batch: all ranks stop at once,
nothing is lost.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.load import Loaded, load
from nanotrain.plan.plan import plan_run
from nanotrain.train.build import build_run
from nanotrain.train.evaluate import validate
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.inputs import open_inputs
from nanotrain.train.run import Run
from tests.harness import HANG_S, run_ranks
from tests.train.small_run import Spy, arguments, small_run, train

BATCH = 8
FLAGS = (
    "--global-batch-size",
    str(BATCH),
    "--train-iters",
    "2",
    "--seed",
    "3",
    "--num-layers",
    "2",
)
MOE = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32"),
    *("--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"),
)
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "dp2": ({"strategy": "optim_grads"}, ("--overlap-grad-reduce",)),
    "tp2": ({"tp": 2}, ()),
    "ep2": ({"ep": 2, "strategy": "optim"}, MOE),
    "pp2 dp2": ({"pp": 2, "strategy": "optim_grads_params"}, ("--pipeline-schedule", "zb-h1")),
}


class SignalInStep(Hook):
    """The last rank of the first stage receives a signal in its n-th forward pass.

    The stage stays there until all ranks have agreed: what a rank of the next stage begins before
    it holds would depend on the clock.
    """

    def __init__(self, forward: int) -> None:
        self.forward, self.count = forward, 0

    def before_training(self, run: Run) -> None:
        assert run.pipeline.stop_point is not None
        run.pipeline.stop_point.poll_s = 0.02
        if run.context.group("pp").is_first:
            run.stages[0].register_forward_pre_hook(lambda *_: self.delay(run))

    def delay(self, run: Run) -> None:
        self.count += 1
        is_last = (
            run.context.rank == run.context.group("world").size // run.context.group("pp").size - 1
        )
        if self.count == self.forward and is_last:
            run.stop.signal = signal.SIGTERM
        deadline = time.monotonic() + HANG_S
        while (
            self.count == self.forward
            and run.pipeline.stop_point._decision is None
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)


@contextmanager
def run_of(loaded: Loaded, context: ParallelContext) -> Iterator[Run]:
    config, inputs = open_inputs(loaded)
    plan = plan_run(config, context.topology.world_size, rank=context.rank)
    run = build_run(plan, inputs, context=context)
    try:
        yield run
    finally:
        run.batches.close()


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {
        box.name + str(box.box): tensor.clone()
        for box, tensor in run.optimizer.tensors_to_save().items()
    }


def stop_and_resume(
    ctx: ParallelContext, whole: Loaded, stopped: Loaded, forward: int
) -> list[Any]:
    with run_of(whole, ctx) as run:
        expected = weights(train(run))
    spy = Spy()
    with run_of(stopped, ctx) as run:
        train(run, SignalInStep(forward), CheckpointHook(), spy)
        stopped_after = run.state.step
        assert run.checkpointer.latest().name == f"step-{stopped_after:08d}"
        assert run.state.consumed_samples == BATCH * stopped_after
    with run_of(stopped, ctx) as run:
        resumed = weights(train(run))
    assert resumed.keys() == expected.keys()
    assert all(torch.equal(resumed[name], expected[name]) for name in expected), (
        "resume = never stopped"
    )
    return [stopped_after, spy.calls[-1]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_signal_between_microbatches_stops_all_ranks_and_the_resume_is_exact(
    tmp_path, logged, layout
):
    groups, flags = LAYOUTS[layout]
    num_ranks = 4 if "pp" in groups else 2
    per_step = BATCH // (1 if layout == "tp2" else 2)  # microbatches of a rank
    names = {"tp": "--tensor-model-parallel-size", "pp": "--pipeline-model-parallel-size",
             "ep": "--expert-model-parallel-size", "strategy": "--data-parallel-sharding-strategy"}  # fmt: skip
    given = tuple(text for name, value in groups.items() for text in (names[name], str(value)))
    # Hydra composes in one thread only.
    configs = [
        load(arguments(tmp_path / name, *FLAGS, *given, *flags)) for name in ("whole", "stopped")
    ]
    replies = run_ranks(num_ranks, stop_and_resume, *configs, per_step + 3, threads=True, **groups)
    assert replies == [[1, "closed"]] * num_ranks


def test_a_signal_between_the_microbatches_of_a_validation_batch_ends_it(tmp_path):
    with small_run(tmp_path, *FLAGS, "--eval-interval", "1", "--eval-iters", "2") as run:
        assert validate(run) is not None
        hook, stop_point = SignalInStep(5), run.pipeline.stop_point
        hook.before_training(run)
        stop_point.start(lambda: bool(run.stop))
        for _ in range(2):
            run.stop.signal = None  # the vote before a batch would heed it
            assert validate(run) is None and hook.count == 5, "nothing begins after the stop"
        stop_point.end()
