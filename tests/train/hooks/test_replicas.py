"""Replicas are compared bit for bit: a planted bit flip is found, with its parameter and rank, and is not saved."""

import pytest
import torch

from nanotrain.comm.collectives import all_gather_object
from nanotrain.errors import CorruptState
from nanotrain.train.hooks.checkpoint import CheckpointHook
from nanotrain.train.hooks.hook import Hook
from nanotrain.train.hooks.replicas import ReplicasHook, checksum, replicated
from tests.harness import ranks
from tests.train.small_run import small_run, train

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


@ranks(3)
def test_a_planted_bit_flip_is_named_with_parameter_and_rank(ctx, tmp_path):
    hooks = [FlipBit(3)] if ctx.rank == 1 else []
    with small_run(tmp_path, "--train-iters", "9", "--save-interval", "4", *EVERY_TWO, context=ctx) as run:
        with pytest.raises(CorruptState) as error:
            train(run, *hooks, ReplicasHook(), CheckpointHook())
        assert run.checkpointer.latest() is None
    where = "parameter final_norm.weight differ before the update of step 4: rank 1 and ranks 0, 2 hold different"
    assert where in str(error.value)
    assert len(set(all_gather_object(str(error.value), ctx.control))) == 1


@ranks(2, tp=2, strategy="optim_grads")
def test_a_bit_flip_in_a_parameter_that_tp_replicates_is_named(ctx, tmp_path):
    hooks = [FlipBit(3)] if ctx.rank == 1 else []
    arguments = ("--tensor-model-parallel-size", "2", "--data-parallel-sharding-strategy", "optim_grads")
    with small_run(tmp_path, "--train-iters", "9", *EVERY_TWO, *arguments, context=ctx) as run:
        with pytest.raises(CorruptState, match=r"final_norm.weight .*update of step 4: rank 0 and rank 1 hold"):
            train(run, *hooks, ReplicasHook())
        compared = list(replicated(run.data_parallel, run.context.groups))
    assert [axis for axis, _ in compared if ctx.group(axis).size > 1] == ["tp"]
    assert "final_norm.weight" in compared[1][1] and not [name for name in compared[1][1] if "mlp.up" in name]


@ranks(3, strategy="optim")
def test_a_flip_in_a_copy_that_the_next_all_gather_would_replace_is_named(ctx, tmp_path):
    for flipped, more in ((0, ()), (1, ("--bf16",)), (2, ())):  # one of them owns the element, the others gathered it
        hooks = [FlipBit(3)] if ctx.rank == flipped else []
        arguments = ("--train-iters", "6", "--data-parallel-sharding-strategy", "optim", *EVERY_TWO, *more)
        others = ", ".join(str(rank) for rank in range(3) if rank != flipped)
        names = rf"final_norm.weight .*differ before the update of step 4: rank {flipped} and ranks {others} hold"
        with small_run(tmp_path / str(flipped), *arguments, context=ctx) as run:
            buckets = [bucket.layout for bucket in run.data_parallel[0].buckets]
            assert len(buckets) > 1 and any(each.numel > each.unpadded_numel for each in buckets)
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
    arguments = ("--data-parallel-sharding-strategy", "optim_grads_params", "--ddp-bucket-size", "2000")
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
    sizes = ("--hidden-size", "32", "--ffn-hidden-size", "32", "--num-attention-heads", "2", "--kv-channels", "16")
    fp8 = ("--fp8-format", "e4m3", "--fp8-recipe", "tensorwise", "--fp8-param-gather")
    arguments = ("--data-parallel-sharding-strategy", "optim", *sizes, *fp8)
    names = r"parameter layers.0.mlp.down.weight .*step 4: rank 0 and rank 1 hold"
    run_of = small_run(tmp_path, "--train-iters", "6", *EVERY_TWO, *arguments, context=ctx)
    with run_of as run, pytest.raises(CorruptState, match=names):
        train(run, *([FlipFp8()] if ctx.rank == 1 else []), ReplicasHook())
