"""Rules of a run on dtypes of gradients, data-parallel sharding and fp8."""

from nanotrain.config.rules.settings import Errors, Settings
from nanotrain.errors import ConfigError


def check_loss_scale(c: Settings) -> Errors:
    """Check dynamic loss scales of fp16."""
    precision = c.precision
    is_dynamic = precision.params_dtype == "fp16" and precision.loss_scale == 0
    lowest = precision.min_loss_scale
    first = precision.initial_loss_scale
    if is_dynamic and lowest > first:
        yield ConfigError(
            f"min_loss_scale {lowest:g} is above initial_loss_scale {first:g}",
            why="the loss scale never falls below the minimum",
            fix="lower --min-loss-scale",
        )


def check_bf16_gradients(c: Settings) -> Errors:
    """Check gradients that are reduced in bf16."""
    if not c.precision.grad_reduce_in_bf16:
        return
    if c.precision.accumulate_allreduce_grads_in_fp32:
        yield ConfigError(
            "gradients are to be reduced in fp32 and in bf16",
            why="accumulate_allreduce_grads_in_fp32 and grad_reduce_in_bf16 contradict each other",
            fix="leave out --grad-reduce-in-bf16, or --accumulate-allreduce-grads-in-fp32 and "
            "--grad-reduce-in-fp32",
        )
    if c.precision.params_dtype == "fp16":
        yield ConfigError(
            "grad_reduce_in_bf16 with params_dtype fp16",
            why="gradients of low precision have the dtype of the parameters",
            fix="set --no-accumulate-allreduce-grads-in-fp32 for fp16 gradients",
        )
    if c.precision.params_dtype == "fp32":
        yield ConfigError(
            "grad_reduce_in_bf16 with params_dtype fp32",
            why="gradients of low precision have the dtype of the parameters",
            fix="set --bf16 or leave --grad-reduce-in-bf16 out",
        )


def check_gradient_dtypes(c: Settings) -> Errors:
    """Check dtypes of accumulated gradients, and of gradients that the optimizer reads."""
    dtype = c.precision.params_dtype
    in_fp32 = c.precision.accumulate_allreduce_grads_in_fp32
    why = "the optimizer reads bf16 gradients only where they are accumulated and reduced in bf16"
    fix = "set --bf16 --grad-reduce-in-bf16, or --main-grads-dtype fp32"
    if in_fp32 is False and dtype == "fp32":
        yield ConfigError(
            "accumulate_allreduce_grads_in_fp32 = False has no effect",
            why="params_dtype is fp32, and so are the gradients",
            fix="set --bf16 or --fp16, or leave --no-accumulate-allreduce-grads-in-fp32 out",
        )
    if c.precision.main_grads_dtype != "bf16":
        return
    what = f"main_grads_dtype bf16 with params_dtype {dtype}"
    if in_fp32:
        yield ConfigError(f"{what} and gradients accumulated in fp32", why=why, fix=fix)
    elif dtype != "bf16":
        yield ConfigError(what, why=why, fix=fix)


def check_fp32_reduce_scatter(c: Settings) -> Errors:
    """Check reduce-scatter with sums in fp32."""
    parallel = c.parallel
    if not parallel.reduce_scatter_with_fp32_accumulation or c.precision.params_dtype == "fp32":
        return
    if c.config.precision.accumulates_grads_in_fp32:
        return
    what = "reduce_scatter_with_fp32_accumulation has no effect"
    fix = (
        "set --data-parallel-sharding-strategy optim without --force-all-reduce, or "
        "--grad-reduce-in-fp32"
    )
    if parallel.force_all_reduce:
        yield ConfigError(what, why="force_all_reduce all-reduces gradients", fix=fix)
    elif parallel.data_parallel_sharding_strategy == "no_shard":
        yield ConfigError(
            what,
            why="data_parallel_sharding_strategy no_shard all-reduces gradients",
            fix=fix,
        )


def check_sharded_gradients(c: Settings) -> Errors:
    """Check gradients that every rank keeps in full."""
    strategy = c.parallel.data_parallel_sharding_strategy
    if c.parallel.force_all_reduce and strategy in ("optim_grads", "optim_grads_params"):
        yield ConfigError(
            f"force_all_reduce with data_parallel_sharding_strategy {strategy}",
            why="it keeps whole gradients on every rank, and the strategy shards them",
            fix="set --data-parallel-sharding-strategy optim or leave --force-all-reduce out",
        )


def check_outer_sharding(c: Settings) -> Errors:
    """Check optimizer state that is sharded across instances."""
    if c.parallel.outer_dp_sharding_strategy != "optim":
        return
    if c.parallel.data_parallel_sharding_strategy == "no_shard":
        yield ConfigError(
            "outer_dp_sharding_strategy optim with data_parallel_sharding_strategy no_shard",
            why="instances shard further what is sharded inside an instance",
            fix="set --data-parallel-sharding-strategy optim, optim_grads or optim_grads_params",
        )
    elif c.parallel.num_distributed_optimizer_instances == 1:
        yield ConfigError(
            "outer_dp_sharding_strategy optim has no effect",
            why="num_distributed_optimizer_instances is 1, so there is nothing to shard across",
            fix="set --num-distributed-optimizer-instances 2 or leave "
            "--outer-dp-sharding-strategy out",
        )


def check_double_buffer(c: Settings) -> Errors:
    """Check FSDP units that are gathered into fixed memory."""
    parallel = c.parallel
    shards_params = parallel.data_parallel_sharding_strategy == "optim_grads_params"
    if parallel.fsdp_double_buffer and not parallel.reshard_after_forward and shards_params:
        yield ConfigError(
            "fsdp_double_buffer without reshard_after_forward",
            why="units take turns in fixed memory, and all of them are to stay gathered",
            fix="leave out --fsdp-double-buffer or --no-reshard-after-forward",
        )


def check_fp8(c: Settings) -> Errors:
    """Check formats and recipes of fp8 products."""
    recipe = c.fp8.recipe
    if c.has_fp8 and c.precision.params_dtype == "fp16":
        yield ConfigError(
            "fp8_format with params_dtype fp16",
            why="the results of fp8 products are bf16 or fp32; a dynamic loss scale would change "
            "the scales of every step",
            fix="set --bf16 or leave out --fp8-format",
        )
    if c.has_fp8 and (c.fp8.format == "e2m1") != (recipe == "nvfp4"):
        yield ConfigError(
            f"fp8_recipe {recipe} with fp8_format {c.fp8.format}",
            why="nvfp4 is the recipe of 4-bit values, and their only one",
            fix="set --fp4-format e2m1, or --fp8-format e4m3 with another --fp8-recipe",
        )
    if c.fp8.format == "hybrid" and recipe in ("blockwise", "mxfp8"):
        yield ConfigError(
            f"fp8_recipe {recipe} with fp8_format hybrid",
            why="torch multiplies such blocks in e4m3 only",
            fix="set --fp8-format e4m3 or another --fp8-recipe",
        )
    if c.fp8.param_gather and recipe == "nvfp4":
        yield ConfigError(
            "fp8_param_gather with fp8_recipe nvfp4",
            why="weights of 4-bit products are gathered in params_dtype",
            fix="leave out --fp8-param-gather",
        )
    if c.fp8.param_gather and recipe in ("rowwise", "mxfp8"):
        yield ConfigError(
            f"fp8_param_gather with fp8_recipe {recipe}",
            why="fprop and dgrad scale a weight along other dims, so that two fp8 copies, as many "
            "bytes as bf16, would be sent",
            fix="set --fp8-recipe tensorwise, delayed or blockwise, or leave out "
            "--fp8-param-gather",
        )
