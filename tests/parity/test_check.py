"""`nanotrain parity` finds layouts equal to one rank, and names what is wrong where something was
made wrong.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist

from nanotrain.cli.main import main
from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.config.config import Config
from nanotrain.config.load import load
from nanotrain.parallel.dp.param_buffer import gathered
from nanotrain.parity import check as parity_module
from nanotrain.parity.check import RandomDataset, Record, compare, record_steps
from nanotrain.parity.report import ParityReport
from nanotrain.parity.shrink import on_one_rank, shrink
from nanotrain.spec.boxes import Box, TensorBox
from nanotrain.train import step as step_module
from tests.config.asking import config_of
from tests.harness import run_ranks

TP_SP = ("+config=tiny", "--tensor-model-parallel-size", "2", "--sequence-parallel")


def small_config(*words: str, world: int) -> Config:
    return shrink(load(words).config, world, num_steps=2)


def report_of(
    config: Config, world: int, *, work: Callable[..., Record] = record_steps, **layout: object
) -> ParityReport:
    is_plain = work is record_steps  # others patch modules, for all ranks of their process
    records = run_ranks(world, work, config, **{"shares": is_plain, "strategy": "optim"} | layout)
    return compare(reference_of(on_one_rank(config)), records, config=config, tolerance=1e-5)


@cache
def reference_of(config: Config) -> Record:
    (reference,) = run_ranks(1, record_steps, config, shares=True)
    return reference


def without_the_sum_over_tp(ctx: ParallelContext, config: Config) -> Record:
    """A framework that forgets that norms under sequence parallel saw a part of the tokens only."""
    step_module.finalize_grads = lambda layers, context: None
    return record_steps(ctx, config)


def with_another_weight_on_rank_1(ctx: ParallelContext, config: Config) -> Record:
    """A rank whose copy of one weight drifts by one rounding after the last step."""
    train_step = step_module.train_step

    def drift(run, batch):
        result = train_step(run, batch)
        if dist.get_rank() == 1 and run.state.step == config.train.train_iters:
            with gathered(run.data_parallel):
                for stage in run.stages.values():
                    weight = stage.get_parameter("layers.1.mlp_norm.weight").data
                    weight[3] = torch.nextafter(weight[3], torch.tensor(9.0))
        return result

    parity_module.train_step = drift
    return record_steps(ctx, config)


def with_a_gradient_off_by(factor: float, ctx: ParallelContext, config: Config) -> Record:
    """One parameter's gradient is scaled on every rank, after everything was reduced."""

    def scale(layers, context):
        for layer in layers:
            for bucket in layer.buckets:
                for part in bucket.layout.update_ranges(layer.groups.shard.index):
                    if part.name == "layers.0.attention.key.weight":
                        bucket.grads.shard[part.elements] *= factor

    step_module.finalize_grads = scale
    return record_steps(ctx, config)


def a_little_off(ctx: ParallelContext, config: Config) -> Record:
    return with_a_gradient_off_by(1.001, ctx, config)


def without_weight_decay(ctx: ParallelContext, config: Config) -> Record:
    """A framework that forgets weight decay: losses and gradients of a few steps hardly show it."""
    return record_steps(ctx, replace(config, optim=replace(config.optim, weight_decay=0.0)))


def with_another_router_bias_on_rank_1(ctx: ParallelContext, config: Config) -> Record:
    """A rank whose replica of a router bias drifts."""
    train_step = step_module.train_step

    def drift(run, batch):
        result = train_step(run, batch)
        if dist.get_rank() == 1:
            run.stages[0].get_buffer("layers.1.mlp.router.expert_bias")[2] += 0.001
        return result

    parity_module.train_step = drift
    return record_steps(ctx, config)


@pytest.fixture(scope="module")
def tensor_parallel() -> ParityReport:
    return report_of(small_config(*TP_SP, world=4), 4, tp=2)


def test_a_right_layout_is_equal(tensor_parallel: ParityReport) -> None:
    assert tensor_parallel.holds, tensor_parallel.text()
    assert tensor_parallel.verdict == "equal: 4 ranks train as one does, within 1e-05"
    shards = {row.name: row.sharding for row in tensor_parallel.parameters}
    assert (
        shards["layers.0.mlp.down.weight"] == "dim 1 by tp=2, shards 2"
        and shards["final_norm.weight"] == "shards 2"
    )
    worst = [row.relative for row in tensor_parallel.parameters]
    assert worst == sorted(worst, reverse=True) and len(worst) == len(shards) == 20


def test_a_sum_that_was_left_out_is_named_at_the_top() -> None:
    report = report_of(small_config(*TP_SP, world=2), 2, work=without_the_sum_over_tp, tp=2)
    wrong = [row.name for row in report.wrong_gradients]
    norms = sorted(row.name for row in report.parameters if "norm" in row.name)
    assert sorted(wrong) == norms == sorted(row.name for row in report.parameters[: len(norms)])
    assert all(row.relative > 0.01 for row in report.parameters[: len(norms)])
    assert not report.holds and report.verdict.startswith("NOT EQUAL: 2 ranks")
    first = next(line for line in report.text().splitlines() if line.endswith("<-"))
    assert first.startswith(report.parameters[0].name)


def test_one_gradient_off_by_a_thousandth_is_found_alone() -> None:
    config = small_config("+config=tiny", world=2)
    report = report_of(config, 2, work=a_little_off)
    wrong = [row.name for row in report.wrong_gradients]
    assert wrong == ["layers.0.attention.key.weight"]
    assert report.parameters[0].relative == pytest.approx(1e-3, rel=0.01)


def test_a_replica_that_drifts_by_one_rounding_is_found() -> None:
    report = report_of(small_config(*TP_SP, world=2), 2, work=with_another_weight_on_rank_1, tp=2)
    assert report.unequal_replicas == ("layers.1.mlp_norm.weight",) and len(report.complaints) == 1


def test_weights_without_weight_decay_are_found_though_losses_agree() -> None:
    report = report_of(small_config("+config=tiny", world=2), 2, work=without_weight_decay)
    decayed = {row.name for row in report.weights if len(row.shape) > 1}
    assert {row.name for row in report.wrong_state} == decayed
    assert "weights and buffers differ" in report.verdict


def test_a_router_bias_that_drifts_on_one_rank_is_found() -> None:
    arguments = (
        "+config=tiny_moe",
        "--moe-router-enable-expert-bias",
        "--moe-router-score-function",
        "sigmoid",
    )
    losses = "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.5"
    config = small_config(
        *arguments, *losses.split(), "--moe-divide-global-aux-loss-by-dp", world=2
    )
    healthy = report_of(config, 2)
    assert healthy.holds and "layers.1.mlp.router.expert_bias" in {
        row.name for row in healthy.buffers
    }
    report = report_of(config, 2, work=with_another_router_bias_on_rank_1)
    assert report.unequal_replicas == ("layers.1.mlp.router.expert_bias",)
    assert report.wrong_state[0].name == "layers.1.mlp.router.expert_bias"


def test_samples_read_twice_or_by_half_a_replica_are_found() -> None:
    config = small_config("+config=tiny", world=2)  # 4 samples on each of 2 ranks, 2 steps
    assert config.train.global_batch_size == 8
    right = {0: [[0, 1, 4, 5], [8, 9, 12, 13]], 1: [[2, 3, 6, 7], [10, 11, 14, 15]]}
    twice = {0: right[0], 1: [right[1][0], [8, 11, 14, 15]]}
    check = partial(
        compare,
        Record(0, losses=[1.0], grad_norms=[1.0], grads=grads()),
        config=config,
        tolerance=1e-5,
    )
    for reads_by_dp, is_right in ((right, True), (twice, False)):
        records = [
            Record(dp, losses=[1.0], grad_norms=[1.0], grads=grads(), reads=reads)
            for dp, reads in reads_by_dp.items()
        ]
        assert check(records).samples_read_once is is_right, reads_by_dp
        if is_right:
            other_samples, none = (
                replace(records[0], reads=reads) for reads in (right[1], [[], []])
            )
            # two ranks of a replica read different ones
            assert not check([*records, other_samples]).samples_read_once
            # a stage between the first and the last
            assert check([*records, none]).samples_read_once
            assert not check([none, records[1]]).samples_read_once


def test_stages_between_the_first_and_the_last_are_compared_too() -> None:
    config = small_config(
        "+config=tiny", "--pipeline-model-parallel-size", "3", "--num-layers", "3", world=3
    )
    report = report_of(config, 3, pp=3, strategy="no_shard")
    assert report.holds, report.verdict


# of the model, the batches and recomputation; each is in the small run of two ranks
FEATURES = (
    *("+config=tiny", "--rampup-batch-size", "8", "8", "100", "--global-batch-size", "64"),
    *(
        "--step-seq-length-schedule",
        "0:32",
        "1M:128",
        "--attention-dropout",
        "0.1",
        "--hidden-dropout",
        "0.2",
    ),
    *("--window-size", "16", "--softmax-type", "learnable", "--position-embedding-type", "yarn"),
    *(
        "--rotary-scaling-factor",
        "4",
        "--original-max-position-embeddings",
        "16",
        "--rotary-percent",
        "0.5",
    ),
    *(
        "--mtp-num-layers",
        "1",
        "--apply-layernorm-1p",
        "--squared-relu",
        "--final-logit-softcapping",
        "30",
    ),
    *("--recompute-granularity", "full", "--decoupled-lr", "2e-3", "--lr", "1e-3", "--qk-clip"),
)


def test_schedules_and_features_of_the_model_are_compared() -> None:
    config = small_config(
        *FEATURES, "--tensor-model-parallel-size", "2", "--sequence-parallel", world=2
    )
    model = config.model
    assert model.hidden_dropout == 0.2 and model.window_size == 8 and model.mtp.num_layers == 1
    report = report_of(config, 2, tp=2)
    assert report.holds, report.verdict
    assert "batch size and sequence length smaller in the first step" in report.text()
    assert [sorted(reads) for reads in reads_of_one_rank(config)] == [[0, 1], [2, 3, 4, 5]]


def reads_of_one_rank(config: Config) -> list[list[int]]:
    return reference_of(on_one_rank(config)).reads


def grads() -> dict[TensorBox, torch.Tensor]:
    return {TensorBox.full("a", (2,)): torch.tensor([1.0, 2.0])}


def test_an_element_that_no_rank_holds_and_one_that_is_nan_are_infinitely_wrong() -> None:
    config = small_config("+config=tiny", world=1)
    reference = Record(0, losses=[1.0], grad_norms=[1.0], grads=grads())
    half = {TensorBox("a", (2,), Box((0,), (1,))): torch.tensor([1.0])}
    for held in (half, {TensorBox.full("a", (2,)): torch.tensor([1.0, torch.nan])}):
        record = Record(0, losses=[float("nan")], grad_norms=[1.0], grads=held, reads=[[]])
        report = compare(reference, [record], config=config, tolerance=1e-5)
        assert report.parameters[0].absolute == float("inf") and not report.holds, held
        written = json.loads(report.to_json())
        assert written["parameters"][0]["relative"] is None and written["steps"][0]["loss"] is None
        assert written["equal"] is False


def test_the_rank_that_differs_most_is_reported() -> None:
    config = small_config("+config=tiny", world=1)
    losses, norms = [1.0, 1.5], [2.0, 1.0]
    reference = Record(0, losses=[1.0], grad_norms=[2.0], grads=grads())
    records = [
        Record(0, [loss], [norm], grads(), reads=[[]])
        for loss, norm in zip(losses, norms, strict=True)
    ]
    (step,) = compare(reference, records, config=config, tolerance=1e-5).steps
    assert (step.loss, step.grad_norm) == (1.5, 1.0)


def test_samples_have_documents_where_the_configuration_asks_for_them() -> None:
    config = small_config("+config=tiny", "--reset-position-ids", "--reset-attention-mask", world=1)
    samples = RandomDataset(config)
    sample = samples[5]
    assert (
        samples.reads == [5] and sample.segment_ids is not None and sample.position_ids is not None
    )
    changes = sample.segment_ids[1:] != sample.segment_ids[:-1]
    assert (sample.position_ids[1:][changes] == 0).all() and sample.position_ids[0] == 0
    assert (sample.position_ids[1:][~changes] == sample.position_ids[:-1][~changes] + 1).all()
    assert 0 < sample.loss_mask.sum() < len(sample.loss_mask)


def test_the_command_checks_experts_and_says_so_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "+config=tiny_moe",
        "--expert-model-parallel-size",
        "2",
        "--expert-tensor-parallel-size",
        "1",
    ]
    code = main(["parity", "--world-size", "2", "--steps", "2", "--json", *words])
    written = json.loads(capsys.readouterr().out)
    assert (
        code == 0
        and written["equal"]
        and written["complaints"] == []
        and len(written["steps"]) == 2
    )
    assert written["samples_read_once"] and not written["unequal_replicas"]
    assert written["config"]["parallel"]["expert_model_parallel_size"] == 2


def test_a_tolerance_that_nothing_meets_ends_with_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["parity", "--world-size", "2", "--steps", "1", "--tolerance", "1e-12", *TP_SP]
    assert main(words) == 2
    *report, verdict, compared, proved = capsys.readouterr().out.splitlines()
    assert report and "NOT EQUAL: 2 ranks" in verdict
    assert compared.startswith("compared: losses, norms, ")
    assert proved.startswith("proved: the gradients of ")


def test_ranks_that_do_not_fit_are_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["parity", "--world-size", "3", *TP_SP]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: 3 ranks cannot form tp=2")


def test_samples_differ_by_their_number_and_by_the_seed() -> None:
    config = config_of(vocab_size=300, seq_length=24, seed=3)
    samples = [RandomDataset(config)[number].tokens for number in range(4)]
    assert len({tuple(tokens.tolist()) for tokens in samples}) == 4
    again = RandomDataset(config)[2].tokens
    assert (again == samples[2]).all()
    other = RandomDataset(config_of(vocab_size=300, seq_length=24, seed=4))[2].tokens
    assert (other != samples[2]).any()
