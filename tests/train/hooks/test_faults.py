"""The first tensor that is not finite is named, and a planted bit flip in one of the replicas of a
parameter.
"""

import pytest
import torch

from nanotrain.comm.collectives import all_gather_object
from nanotrain.errors import CorruptState, TrainingFault
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.hooks.faults import DebugNanHook, Finding, ReplicasHook, checksum, replicated
from nanotrain.train.hooks.hook import Hook
from tests.harness import ranks
from tests.train.small_run import Spy, small_run, train


class Poison(Hook):
    """Makes one module return a NaN in a step."""

    def __init__(self, name: str, *, step: int, in_backward: bool = False) -> None:
        self.name, self.step, self.in_backward = name, step, in_backward

    def before_training(self, run) -> None:
        def poison(module, inputs, output):
            if run.state.step + 1 != self.step or run.context.heartbeat.read().action[-1] != "1":
                return output
            if self.in_backward:
                output.register_hook(lambda grad: grad * torch.nan)
                return output
            return output * torch.nan

        (stage,) = run.stages.values()
        dict(stage.named_modules())[self.name].register_forward_hook(poison)


FLAGS = ("--train-iters", "9", "--num-layers", "2", "--max-consecutive-skips", "3")


@pytest.mark.parametrize(
    ("in_backward", "what"),
    [(False, "the output of layers.1.mlp"), (True, "the gradient of the output of layers.1.")],
)
def test_the_module_and_microbatch_are_named(tmp_path, in_backward, what):
    spy = Spy()
    with (
        small_run(tmp_path, *FLAGS, "--global-batch-size", "2") as run,
        pytest.raises(TrainingFault) as error,
    ):
        train(run, Poison("layers.1.mlp", step=3, in_backward=in_backward), DebugNanHook(), spy)
    assert f"the first tensor of step 3 that is not finite is {what}" in str(error.value)
    assert "on rank 0, microbatch 1, action" in error.value.why
    assert spy.reports[-1].step == 3 and spy.reports[-1].output.skipped


def test_parameters_that_are_released_after_each_unit_are_checked_while_they_are_there(tmp_path):
    sharded = ("--data-parallel-sharding-strategy", "optim_grads_params")
    hook, poisoned = DebugNanHook(), []

    class PoisonWeight(Hook):
        def before_training(self, run) -> None:
            (stage,) = run.stages.values()
            stage.final_norm.register_forward_pre_hook(lambda module, _: self.poison(module, run))

        def poison(self, module, run) -> None:
            if run.state.step == 1:
                poisoned.append(module.weight.detach().fill_(torch.nan))

    with small_run(tmp_path, *FLAGS, *sharded) as run, pytest.raises(TrainingFault) as error:
        train(run, PoisonWeight(), hook)
    assert (
        poisoned
        and "the first tensor of step 2 that is not finite is parameter final_norm.weight"
        in str(error.value)
    )
    assert not run.stages[0].final_norm.weight.untyped_storage().nbytes(), (
        "else it is never released"
    )


def test_weights_that_are_gathered_in_fp8_are_no_finding(tmp_path):
    fp8 = (
        "--bf16",
        "--fp8-format",
        "e4m3",
        "--fp8-recipe",
        "tensorwise",
        "--fp8-param-gather",
        "--data-parallel-sharding-strategy",
        "optim",
    )
    hook, findings = DebugNanHook(), []

    class Look(Hook):
        def after_step(self, run, report) -> None:
            findings.append(hook._finding)

    with small_run(
        tmp_path, *FLAGS[2:], *fp8, "--train-iters", "2", "--global-batch-size", "2"
    ) as run:
        assert any(layer.fp8_weights is not None for layer in run.data_parallel)
        train(run, Look(), hook)
    assert findings == [None, None]


@ranks(2)
def test_one_ranks_finding_is_the_error_of_all(ctx, tmp_path):
    hooks = [Poison("layers.0.attention", step=2)] if ctx.rank == 1 else []
    with small_run(tmp_path, *FLAGS, "--global-batch-size", "4", context=ctx) as run:
        with pytest.raises(
            TrainingFault, match=r"output of layers.0.attention.*: on rank 1 \(dp1\), microbatch 1"
        ):
            train(run, *hooks, DebugNanHook())
        assert run.state.step == 2


def test_findings_are_ordered_by_cause():
    findings = [Finding("", 0, "", action) for action in ("B0.0", "B1.0", "F1.0", "F0.0", "F0.1")]
    assert [each.action for each in sorted(findings, key=lambda each: each.order)] == [
        "F0.0",
        "F1.0",
        "B1.0",
        "B0.0",
        "F0.1",
    ]


EVERY_TWO = ("--check-weight-hash-across-dp-replicas-interval", "2")


class FlipBit(Hook):
    """Flips the lowest bit of one element after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, run, report) -> None:
        if report.step == self.step:
            for dp in run.data_parallel:
                dp.wait_for_params()
            (stage,) = run.stages.values()
            weight = dict(stage.named_parameters())["final_norm.weight"].data
            weight.view(torch.uint8)[5 * weight.element_size()] ^= 1


def test_any_single_bit_flip_changes_the_checksum():
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        tensor = torch.randn(7, 3).to(dtype)
        before = checksum(tensor)
        for element in range(21):
            for bit in range(15):
                tensor.flatten().view(bits)[element] ^= 1 << bit
                assert checksum(tensor) != before
                tensor.flatten().view(bits)[element] ^= 1 << bit
        assert checksum(tensor) == before


def test_swapped_elements_change_the_checksum():
    tensor = torch.arange(6.0)
    assert checksum(tensor) != checksum(tensor[[0, 3, 2, 1, 4, 5]])


@ranks(3)
def test_a_planted_bit_flip_is_named_with_parameter_and_rank(ctx, tmp_path):
    hooks = [FlipBit(3)] if ctx.rank == 1 else []
    with small_run(
        tmp_path, "--train-iters", "9", "--save-interval", "4", *EVERY_TWO, context=ctx
    ) as run:
        with pytest.raises(CorruptState) as error:
            train(run, *hooks, ReplicasHook(), CheckpointHook())
        assert run.checkpointer.latest() is None
    where = "parameter final_norm.weight differ before the update of step 4: rank 1 and ranks 0, 2 hold different"
    assert where in str(error.value)
    assert len(set(all_gather_object(str(error.value), ctx.control))) == 1


@ranks(2, tp=2, strategy="optim_grads")
def test_a_bit_flip_in_a_parameter_that_tp_replicates_is_named(ctx, tmp_path):
    hooks = [FlipBit(3)] if ctx.rank == 1 else []
    arguments = (
        "--tensor-model-parallel-size",
        "2",
        "--data-parallel-sharding-strategy",
        "optim_grads",
    )
    with small_run(tmp_path, "--train-iters", "9", *EVERY_TWO, *arguments, context=ctx) as run:
        with pytest.raises(
            CorruptState, match=r"final_norm.weight .*update of step 4: rank 0 and rank 1 hold"
        ):
            train(run, *hooks, ReplicasHook())
        compared = list(replicated(run.data_parallel, run.context.groups))
    assert [axis for axis, _ in compared if ctx.group(axis).size > 1] == ["tp"]
    assert "final_norm.weight" in compared[1][1] and not [
        name for name in compared[1][1] if "mlp.up" in name
    ]


@ranks(3, strategy="optim")
def test_a_flip_in_a_copy_that_the_next_all_gather_would_replace_is_named(ctx, tmp_path):
    # one of them owns the element, the others gathered it
    for flipped, more in ((0, ()), (1, ("--bf16",)), (2, ())):
        hooks = [FlipBit(3)] if ctx.rank == flipped else []
        arguments = (
            "--train-iters",
            "6",
            "--data-parallel-sharding-strategy",
            "optim",
            *EVERY_TWO,
            *more,
        )
        others = ", ".join(str(rank) for rank in range(3) if rank != flipped)
        names = rf"final_norm.weight .*differ before the update of step 4: rank {flipped} and ranks {others} hold"
        with small_run(tmp_path / str(flipped), *arguments, context=ctx) as run:
            buckets = [bucket.layout for bucket in run.data_parallel[0].buckets]
            assert len(buckets) > 1 and any(each.stop > each.params[-1].stop for each in buckets)
            with pytest.raises(CorruptState, match=names):
                train(run, *hooks, ReplicasHook(), CheckpointHook())
            assert run.checkpointer.latest() is None and run.state.step == 3


@ranks(3)
def test_a_flip_in_the_low_precision_copy_of_one_replica_is_named(ctx, tmp_path):
    hooks = [FlipBit(3)] if ctx.rank == 2 else []
    names = r"final_norm.weight .*update of step 4: rank 2 and ranks 0, 1 hold"
    run_of = small_run(tmp_path, "--train-iters", "6", "--bf16", *EVERY_TWO, context=ctx)
    with run_of as run, pytest.raises(CorruptState, match=names):
        train(run, *hooks, ReplicasHook())


@ranks(2, strategy="optim_grads_params")
def test_replicas_of_a_sound_run_are_equal_also_where_parameters_are_gathered(ctx, tmp_path):
    arguments = (
        "--data-parallel-sharding-strategy",
        "optim_grads_params",
        "--ddp-bucket-size",
        "2000",
    )
    with small_run(tmp_path, "--train-iters", "4", *EVERY_TWO, *arguments, context=ctx) as run:
        train(run, ReplicasHook())
        assert run.state.step == 4


class FlipFp8(Hook):
    """Flips the lowest bit of one fp8 value that another rank updates."""

    def after_step(self, run, report) -> None:
        if report.step == 4:  # the next all-gather would mend it
            (dp,) = [dp for dp in run.data_parallel if dp.fp8_weights is not None]
            dp.wait_for_params()
            dp.param_buffer.view(torch.uint8)[5] ^= 1


@ranks(2, strategy="optim")
def test_a_bit_flip_in_a_gathered_fp8_weight_is_named(ctx, tmp_path):
    sizes = (
        "--hidden-size",
        "32",
        "--ffn-hidden-size",
        "32",
        "--num-attention-heads",
        "2",
        "--kv-channels",
        "16",
    )
    fp8 = ("--fp8-format", "e4m3", "--fp8-recipe", "tensorwise", "--fp8-param-gather")
    arguments = ("--data-parallel-sharding-strategy", "optim", *sizes, *fp8)
    names = r"parameter layers.0.mlp.down.weight .*step 4: rank 0 and rank 1 hold"
    run_of = small_run(tmp_path, "--train-iters", "6", *EVERY_TWO, *arguments, context=ctx)
    with run_of as run, pytest.raises(CorruptState, match=names):
        train(run, *([FlipFp8()] if ctx.rank == 1 else []), ReplicasHook())
