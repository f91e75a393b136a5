"""Command lines of Megatron-style frameworks as users write them: each plans a world, or is one
error with the cure.

A world is planned without devices: groups, buffers and schedule of its first and its last rank.
"""

import pytest

from nanotrain.config.load import load
from nanotrain.config.rules.check import validate_for_world
from nanotrain.errors import ConfigError, NanotrainError
from nanotrain.plan.plan import Plan, plan_run

ZERO1 = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --no-gradient-accumulation-fusion"
STRATEGY = "+config=llama7b --data-parallel-sharding-strategy"
DEEPSEEK = (
    "model=deepseek_v3 --seq-length 4096 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 "
    f"--expert-model-parallel-size 32 --data-parallel-size 8 {ZERO1} --ddp-bucket-size 160000000 "
    "--bf16 --moe-grouped-gemm"
)


def plans(arguments: str, world_size: int) -> list[Plan]:
    """The plans of the first and the last rank."""
    loaded = load(arguments.split())
    validate_for_world(loaded.config, world_size, expected_dp=loaded.data_parallel_size)
    return [plan_run(loaded.config, world_size, rank=rank) for rank in (0, world_size - 1)]


@pytest.mark.parametrize(
    ("world_size", "arguments"),
    [
        (
            8,
            "+config=llama7b --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --data-parallel-size 8 "
            f"--bf16 {ZERO1}",
        ),
        (8, f"+config=llama7b {ZERO1} --ddp-bucket-size 40000000"),
        (
            64,
            "+config=llama70b --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 --data-parallel-size 4 "
            f"{ZERO1} --ddp-bucket-size 80000000 --bf16 --recompute-granularity full",
        ),
        (1024, f"{DEEPSEEK} --recompute-granularity selective --expert-tensor-parallel-size 1"),
        (
            1024,
            f"{DEEPSEEK} --expert-tensor-parallel-size 1 --mtp-num-layers 1 "
            "--pipeline-model-parallel-layout Et*3|(tt|)*29,m|L",
        ),
        (16, "+config=llama7b --data-parallel-size 16"),
        *(
            (8, f"{STRATEGY} {name}")
            for name in ("no_shard", "optim", "optim_grads", "optim_grads_params", *"0123")
        ),
        (
            16,
            f"{STRATEGY} optim_grads_params --num-distributed-optimizer-instances 2 "
            "--outer-dp-sharding-strategy no_shard",
        ),
        (8, f"+config=llama7b {FSDP} --use-distributed-optimizer"),
        (8, f"+config=llama7b {FSDP} --init-model-with-meta-device --fsdp-double-buffer --nccl-ub"),
        (
            8,
            "+config=llama7b --grad-reduce-in-fp32 --reduce-scatter-with-fp32-accumulation --preserve-fp32-weights",
        ),
        (8, "+config=llama7b --grad-reduce-in-bf16"),
        (16, "+config=llama7b --fp8"),
        (16, "+config=llama7b --cpu-optimizer"),
        (16, "+config=llama7b --recompute-granularity full"),
        (
            16,
            f"{STRATEGY} optim_grads_params --num-distributed-optimizer-instances 2 --outer-dp-sharding-strategy optim",
        ),
        (16, "+config=llama7b --dist-ckpt-format fully_reshardable --ckpt-format torch_dist"),
        (32, "+config=llama7b --save DIR --load DIR --save-interval 1000 --async-save"),
        (16, "+config=llama70b --mtp-num-layers 1"),
        (
            8,
            "+config=tiny_moe --vocab-size 512 --global-batch-size 32 --expert-model-parallel-size 2",
        ),
    ],
)
def test_a_command_line_plans_its_world(world_size, arguments):
    for plan in plans(arguments, world_size):
        assert plan.topology.world_size == world_size and plan.resident_bytes.total > 0


@pytest.mark.parametrize(
    ("world_size", "arguments", "message"),
    [
        (1024, DEEPSEEK, "set --expert-tensor-parallel-size 1"),
        (
            8,
            "+config=llama7b --data-parallel-size 4",
            "it only checks the size that follows from 8 ranks",
        ),
        (
            16,
            "+config=llama7b --use-distributed-optimizer --data-parallel-sharding-strategy 0",
            "contradicts",
        ),
    ],
)
def test_a_command_line_is_one_error_with_its_cure(world_size, arguments, message):
    with pytest.raises(NanotrainError) as caught:
        plans(arguments, world_size)
    assert message in str(caught.value) and "mistakes" not in str(caught.value)


# Features that are being built: a row leaves this table for the one above when its flag becomes a
# field.
@pytest.mark.parametrize(
    ("world_size", "arguments", "message"),
    [
        (16, "--mtp-detach-heads", "--mtp-detach-heads ("),
    ],
)
def test_a_missing_feature_is_named_with_a_cure(world_size, arguments, message):
    with pytest.raises(ConfigError, match="asks for what does not exist here") as caught:
        plans(f"+config=llama70b {arguments}", world_size)
    assert message in str(caught.value)


def test_the_groups_of_experts_are_those_of_the_table():
    first, last = plans(
        "+config=tiny_moe --vocab-size 512 --global-batch-size 32 --expert-model-parallel-size 2", 8
    )
    assert first.groups["ep"].ranks == (0, 1) and first.groups["expert_dp"].ranks == (0, 2, 4, 6)
    assert last.groups["ep"].ranks == (6, 7) and last.groups["expert_dp"].ranks == (1, 3, 5, 7)
    assert first.groups["dp"].ranks == tuple(range(8))
