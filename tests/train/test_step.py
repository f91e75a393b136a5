"""The train step: what it returns, and the sums over further axes."""

import math
import re

import torch

from nanotrain.comm.parallel_context import ParallelContext
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.step import finalize_grads, global_loss, train_step
from tests.harness import SHORT_NAMES, ranks, run_ranks
from tests.laws.worlds import Case, build_here
from tests.train.small_run import small_run
from tests.walks import PACKAGE, files_entered


def step_here(ctx: ParallelContext, case: Case):
    run = build_here(ctx, case)
    before = {
        name: p.detach().clone()
        for stage in run.stages.values()
        for name, p in stage.named_parameters()
    }
    batch = run.batch_iterator.next()
    result = train_step(run, batch)
    for dp in run.data_parallel:
        with dp.gathered():
            named = {
                name: p for stage in run.stages.values() for name, p in stage.named_parameters()
            }
            changed = all(not torch.equal(named[name], before[name]) for name in dp.params)
    return (result.loss, result.grad_norm, result.skipped), run.state.to_dict(), changed


def test_all_ranks_return_one_result_and_count_the_same_samples():
    sizes = {"tp": 2, "pp": 2, "strategy": "optim"}
    parallel = {SHORT_NAMES[name]: value for name, value in sizes.items()}
    case = Case(steps=1).but(train={"micro_batch_size": 2}, parallel=parallel)
    outcomes = run_ranks(4, step_here, case, **sizes)
    result, state, _ = outcomes[0]
    loss, grad_norm, skipped = result
    assert all((other, counters) == (result, state) for other, counters, _ in outcomes)
    assert all(changed for _, _, changed in outcomes), "every parameter is trained"
    assert (
        state["step"] == 1
        and state["consumed_samples"] == 12
        and 0 < state["consumed_tokens"] < 12 * 24
    )
    assert math.isfinite(loss) and grad_norm > 0 and not skipped


def test_the_page_of_one_step_lists_files_that_a_save_enters(tmp_path):
    page = (PACKAGE.parent / "docs/one_step.md").read_text()
    count, text = re.search(
        r"\*\*Saving a checkpoint\*\* enters about (\d+)\.(.*)", page, re.S
    ).groups()
    listed: set[str] = set()
    for line in text.split("\n\n")[1].splitlines():
        folder = next((word for word in line.split() if word.endswith("/")), "")
        names = line.replace(folder, "").replace(",", " ").split()
        listed |= {folder + name for name in names}
    with small_run(tmp_path, "+config=tiny") as run:
        train_step(run, run.batch_iterator.next())
        files = files_entered(lambda: CheckpointHook().after_training(run))
    assert listed - files == {"checkpoint/background.py", "checkpoint/stored.py"}
    assert abs(len(files) - int(count)) <= 5, sorted(files)


def test_the_page_of_one_step_lists_the_files_that_a_step_enters(tmp_path):
    flags = ("+config=tiny", "--overlap-grad-reduce", "--overlap-param-gather")
    with small_run(tmp_path, *flags) as run:
        train_step(run, run.batch_iterator.next())
        batch = run.batch_iterator.next()
        files = files_entered(lambda: train_step(run, batch))
    text = (
        (PACKAGE.parent / "docs/one_step.md")
        .read_text()
        .partition("enters ")[2]
        .partition("**Saving")[0]
    )
    groups = [
        group.strip().rpartition(": ") for group in re.split("[;\n]", text.partition("\n")[2])
    ]
    names = {folder + name for folder, _, listed in groups for name in listed.split(", ") if name}
    assert names == files and len(files) == int(text.split()[0]) <= 35


def test_auxiliary_losses_are_means_over_the_sequences_of_the_global_batch(tmp_path):
    flags = (
        "--num-experts",
        "4",
        "--moe-aux-loss-coeff",
        "0.1",
        "--micro-batch-size",
        "2",
        "--global-batch-size",
        "6",
    )
    with small_run(tmp_path, *flags) as run:
        seen = []
        router = run.stages[0].get_submodule("layers.0.mlp.router")
        router.register_forward_pre_hook(lambda _, args: seen.append(args[1].aux_loss_scale))
        train_step(run, run.batch_iterator.next())
    assert seen == [1 / 6] * 3


def test_a_gradient_that_is_not_finite_skips_the_update(tmp_path):
    with small_run(tmp_path) as run:
        batch = run.batch_iterator.next()
        run.stages[0].get_parameter("final_norm.weight").data[0] = float("nan")
        before = [tensor.clone() for tensor in run.optimizer.state_tensors().values()]
        result = train_step(run, batch)
        after = run.optimizer.state_tensors().values()
        assert result.skipped and run.state.step == 1
        # its samples count for the schedule: the next learning rate is that of a run without
        # skipped steps
        assert run.state.consumed_samples == result.settings.num_samples > 0
        assert all(torch.equal(a, b, ) or a.isnan().any() for a, b in zip(before, after, strict=True))  # fmt: skip


def test_a_step_decays_weights_by_the_value_of_its_place_in_the_run(tmp_path):
    weights = []
    grown = (
        "--weight-decay-incr-style",
        "linear",
        "--start-weight-decay",
        "0.25",
        "--end-weight-decay",
        "0.75",
    )
    for number, decay in enumerate((grown, ("--weight-decay", "0.5"), ("--weight-decay", "0.25"))):
        with small_run(
            tmp_path / str(number), "--lr", "1e-2", "--lr-decay-style", "constant", *decay
        ) as run:
            run.batches.consumed_samples = run.lr_schedule.train_samples // 2
            train_step(run, run.batch_iterator.next())
            weights.append(max(run.stages[0].parameters(), key=torch.numel).detach().clone())
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@ranks(2, tp=2)
def test_the_loss_of_a_tp_group_counts_once(ctx):
    assert global_loss(torch.tensor(3.0), ctx) == 3.0


@ranks(2)
def test_the_losses_of_data_parallel_ranks_are_summed(ctx):
    assert global_loss(torch.tensor(1.0 + ctx.rank), ctx) == 3.0


@ranks(2, tp=2, strategy="optim")
def test_gradients_with_a_further_axis_are_summed_over_it_and_no_others(ctx):
    parallel = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "data_parallel_sharding_strategy": "optim",
    }
    run = build_here(ctx, Case().but(parallel=parallel))
    (dp,) = run.data_parallel
    for bucket in dp.buckets:
        bucket.grads.shard.fill_(1.0)
    finalize_grads(run.data_parallel, ctx)
    for bucket in dp.buckets:
        for part in bucket.layout.update_ranges(dp.groups.shard.index):
            expected = 2.0 if "tp" in part.param.spec.grad_sum_axes else 1.0
            assert (bucket.grads.shard[part.elements] == expected).all(), part.name
