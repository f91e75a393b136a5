"""Rules of data parallelism: dtypes of gradients and their reduction, optimizer instances, gathered parameters."""

from nanotrain.config.config import DType, MainGradsDType, OuterShardingStrategy, ShardingStrategy
from nanotrain.config.rules.rule import Rule, Values

SHARDED_GRADS = (ShardingStrategy.optim_grads, ShardingStrategy.optim_grads_params)


def reduces_in_fp32(v: Values) -> bool:
    """Whether gradients are reduced in fp32."""
    return v.params_dtype is DType.fp32 or v.config.precision.accumulates_grads_in_fp32


# fmt: off
DATA_PARALLEL_RULES = (
    Rule(lambda v: v.accumulate_allreduce_grads_in_fp32 and v.grad_reduce_in_bf16,
        "gradients are to be reduced in fp32 and in bf16",
        "accumulate_allreduce_grads_in_fp32 and grad_reduce_in_bf16 contradict each other",
        "leave out --grad-reduce-in-bf16, or --accumulate-allreduce-grads-in-fp32 and --grad-reduce-in-fp32"),
    Rule(lambda v: v.grad_reduce_in_bf16 and v.params_dtype is not DType.bf16,
        lambda v: f"grad_reduce_in_bf16 with params_dtype {v.params_dtype.value}",
        "gradients of low precision have the dtype of the parameters",
        lambda v: "set --no-accumulate-allreduce-grads-in-fp32 for fp16 gradients" if v.params_dtype is DType.fp16
        else "set --bf16 or leave --grad-reduce-in-bf16 out"),
    Rule(lambda v: v.accumulate_allreduce_grads_in_fp32 is False and v.params_dtype is DType.fp32,
        "accumulate_allreduce_grads_in_fp32 = False has no effect", "params_dtype is fp32, and so are the gradients",
        "set --bf16 or --fp16, or leave --no-accumulate-allreduce-grads-in-fp32 out"),
    Rule(lambda v: v.main_grads_dtype is MainGradsDType.bf16
        and (v.params_dtype is not DType.bf16 or v.accumulate_allreduce_grads_in_fp32),
        lambda v: f"main_grads_dtype bf16 with params_dtype {v.params_dtype.value}"
        + (" and gradients accumulated in fp32" if v.accumulate_allreduce_grads_in_fp32 else ""),
        "the optimizer reads bf16 gradients only where they are accumulated and reduced in bf16",
        "set --bf16 --grad-reduce-in-bf16, or --main-grads-dtype fp32"),
    Rule(lambda v: v.reduce_scatter_with_fp32_accumulation and not reduces_in_fp32(v)
        and (v.data_parallel_sharding_strategy is ShardingStrategy.no_shard or v.force_all_reduce),
        "reduce_scatter_with_fp32_accumulation has no effect",
        lambda v: ("force_all_reduce" if v.force_all_reduce else "data_parallel_sharding_strategy no_shard")
        + " all-reduces gradients",
        "set --data-parallel-sharding-strategy optim without --force-all-reduce, or --grad-reduce-in-fp32"),
    Rule(lambda v: v.force_all_reduce and v.data_parallel_sharding_strategy in SHARDED_GRADS,
        lambda v: f"force_all_reduce with data_parallel_sharding_strategy {v.data_parallel_sharding_strategy.value}",
        "it keeps whole gradients on every rank, and the strategy shards them",
        "set --data-parallel-sharding-strategy optim or leave --force-all-reduce out"),
    Rule(lambda v: v.outer_dp_sharding_strategy is OuterShardingStrategy.optim
        and v.data_parallel_sharding_strategy is ShardingStrategy.no_shard,
        "outer_dp_sharding_strategy optim with data_parallel_sharding_strategy no_shard",
        "instances shard further what is sharded inside an instance",
        "set --data-parallel-sharding-strategy optim, optim_grads or optim_grads_params"),
    Rule(lambda v: v.outer_dp_sharding_strategy is OuterShardingStrategy.optim
        and v.data_parallel_sharding_strategy is not ShardingStrategy.no_shard
        and v.num_distributed_optimizer_instances == 1,
        "outer_dp_sharding_strategy optim has no effect",
        "num_distributed_optimizer_instances is 1, so there is nothing to shard across",
        "set --num-distributed-optimizer-instances 2 or leave --outer-dp-sharding-strategy out"),
    Rule(lambda v: v.fsdp_double_buffer and not v.reshard_after_forward
        and v.data_parallel_sharding_strategy is ShardingStrategy.optim_grads_params,
        "fsdp_double_buffer without reshard_after_forward",
        "units take turns in fixed memory, and all of them are to stay gathered",
        "leave out --fsdp-double-buffer or --no-reshard-after-forward"),
)
# fmt: on
