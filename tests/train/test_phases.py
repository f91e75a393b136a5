"""Stages of the data that train other parameters: one command line, in several layouts."""

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from nanotrain.checkpoint.read import read_global_tensors
from nanotrain.checkpoint.store import read_manifest
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.load import load
from nanotrain.plan.plan import plan_run
from nanotrain.quantities import step_name
from nanotrain.train import phases
from nanotrain.train.inputs import open_inputs
from nanotrain.train.main import main
from nanotrain.train.phases import EarlyEnd, phase_at, train_in_phases
from nanotrain.train.run import Run, TrainState
from tests.harness import run_ranks
from tests.laws.command_line import arguments, assert_same_to_the_bit, steps_of

INDEXER = "layers.*.attention.indexer.*"
# as the published warm-up of DeepSeek-V3.2: the indexer alone, then everything
WARM_UP = f"--train-only warm_up={INDEXER} --freeze anneal=embedding.*"
STEPS = "--train-iters 6 --save-interval 2 --log-interval 1 --lr 3e-3 --min-lr 3e-3"
DSA = """--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 16 --qk-head-dim 8
    --qk-pos-emb-head-dim 4 --v-head-dim 8 --sparse-attention-type dsa --dsa-indexer-n-heads 2
    --dsa-indexer-head-dim 8 --dsa-indexer-topk 4 --dsa-indexer-loss-coeff 1.0"""


def line(folder: Path, *more: str) -> list[str]:
    """A run of three stages of one corpus."""
    full = arguments(folder, STEPS, DSA, "--num-workers 0", *more)
    start = full.index("--data-path")
    corpus = full[start + 1]
    groups = full.index("--num-query-groups")  # latent attention has none
    stages = [f"warm_up@0: {corpus}", f"all@2: {corpus}", f"anneal@4: {corpus}"]
    rest = [*full[:groups], *full[groups + 2 : start], *full[start + 2 :]]
    return [*rest, "--data-stages", *stages]


def train(ctx: ParallelContext, *lines: list[str]) -> None:
    """Train command lines on this rank, as `main` does."""
    for arguments_of_run in lines:
        config, inputs = open_inputs(load(arguments_of_run))
        plan = plan_run(config, ctx.topology.world_size, rank=ctx.rank)
        train_in_phases(plan, inputs, context=ParallelContext.attach(plan.topology))


def train_again_after_an_error(ctx: ParallelContext, line: list[str]) -> None:
    """A step fails after a signal; the run that is opened again heeds the signal, and the clock."""
    fit, runs, times = phases.fit, list[Run](), list[float | None]()

    def fail_once(run: Run, hooks: Any, *, started: float, **options: Any) -> bool:
        runs.append(run)
        times.append(started)
        if len(runs) == 1:
            run.stop.signal = signal.SIGTERM
            raise ValueError("a bit of bad luck")
        return fit(run, hooks, started=started, **options)

    config, inputs = open_inputs(load(line))
    plan = plan_run(config, 1, rank=0)
    train_once = partial(train_in_phases, plan, inputs, early_end=EarlyEnd())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "fit", fail_once)
        with pytest.raises(ValueError, match="bad luck"):
            train_once(context=ParallelContext.attach(plan.topology))
        train_once(context=ParallelContext.attach(plan.topology))
    assert times[0] == times[1], "its clock goes on"
    assert runs[1].state.step == 0, "it stops before its next step"


def test_what_ends_a_run_early_outlives_an_error(tmp_path: Path) -> None:
    run_ranks(1, train_again_after_an_error, arguments(tmp_path / "run", STEPS, "--num-workers 0"))


def kinds_of(folder: Path, step: int) -> set[str]:
    """The parameters with optimizer state in a checkpoint."""
    names = tensors_of(folder, step)
    return {name.split("/")[2] for name in names if name.startswith("optimizer/exp_avg/")}


def tensors_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint."""
    path = folder / "checkpoints" / step_name(step)
    return dict(read_global_tensors(path, list(read_manifest(path).tensors)))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phases") / "one"
    run_ranks(1, train, line(folder, WARM_UP, "--micro-batch-size 12"))
    return folder


def test_each_stage_trains_its_parameters(one_rank: Path) -> None:
    assert [row["step"] for row in steps_of(one_rank)] == [1, 2, 3, 4, 5, 6]
    warm, full, annealed = (kinds_of(one_rank, step) for step in (2, 4, 6))
    assert all(".indexer." in name for name in warm) and len(warm) == 2 * 5
    assert full > warm and "embedding.word.weight" in full
    assert annealed == full - {"embedding.word.weight"}
    first, second = (tensors_of(one_rank, step) for step in (2, 4))
    assert not first["model/layers.1.mlp.up.weight"].equal(second["model/layers.1.mlp.up.weight"])


def test_one_command_is_three_with_other_patterns_to_the_bit(one_rank: Path) -> None:
    folder = one_rank.parent / "three"
    stops = "--micro-batch-size 12 --exit-interval 2"
    lines = [
        line(folder, stops, f"--train-only {INDEXER}"),
        line(folder, stops),
        line(folder, stops, "--freeze embedding.*"),
    ]
    run_ranks(1, train, *lines)
    assert_same_to_the_bit(folder, one_rank)


def test_a_run_stopped_at_a_border_and_in_a_stage_goes_on_there(one_rank: Path) -> None:
    folder = one_rank.parent / "stopped"
    how = (WARM_UP, "--micro-batch-size 12")
    lines = [line(folder, *how, f"--exit-interval {steps}") for steps in (2, 3)]
    run_ranks(1, train, *lines, line(folder, *how))
    assert_same_to_the_bit(folder, one_rank)


def test_a_border_is_one_line_of_the_log_and_no_resume(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(line(tmp_path / "run", WARM_UP, "--micro-batch-size 12")) == 0
    log = capfd.readouterr().err
    assert log.count("the next stage of the data trains other parameters, from step-") == 2
    assert "resuming" not in log


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"strategy": "optim_grads_params"}, "--micro-batch-size 6"),
        ({"pp": 2}, "--micro-batch-size 4"),
    ],
    ids=str,
)
def test_layouts_train_as_one_rank_across_the_borders(
    one_rank: Path, tmp_path: Path, sizes: dict[str, object], options: str
) -> None:
    folder = tmp_path / "run"
    flags = {
        "strategy": "--data-parallel-sharding-strategy",
        "pp": "--pipeline-model-parallel-size",
    }
    layout = " ".join(f"{flags[name]} {value}" for name, value in sizes.items())
    run_ranks(2, train, line(folder, WARM_UP, layout, options), **sizes)
    found, expected = steps_of(folder), steps_of(one_rank)
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-3)):
        values = [row[name] for row in found]
        assert values == pytest.approx([row[name] for row in expected], rel=tolerance), name


def test_the_phase_of_a_step_follows_from_its_first_sample(tmp_path: Path) -> None:
    config, _ = open_inputs(load(line(tmp_path / "run", WARM_UP)))
    plan = plan_run(config, 1, rank=0)
    phases = [phase_at(plan, TrainState(consumed_samples=n)) for n in (0, 23, 24, 47, 48, 60)]
    assert [(phase.stage, phase.end) for phase in phases] == [
        ("warm_up", 24),
        ("warm_up", 24),
        ("all", 48),
        ("all", 48),
        ("anneal", None),
        ("anneal", None),
    ]
