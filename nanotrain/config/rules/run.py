"""Rules of the run: learning-rate schedule, data split, start, profiler and loss scale.

FP8_RULES             fp8: its data types; FP8_LAYOUT_RULES: its layers and the sizes of its matrix products
DATA_PARALLEL_RULES   dtypes of gradients and their reduction, optimizer instances, gathered parameters
"""

from nanotrain.config.config import (
    DeviceKind,
    DType,
    Fp8Format,
    MainGradsDType,
    OuterShardingStrategy,
    ShardingStrategy,
    WeightDecayStyle,
)
from nanotrain.config.option import flag_of
from nanotrain.config.rules.rule import Rule, Values
from nanotrain.quantities import count_of, round_up


def is_split(text: str) -> bool:
    """Whether a text is one to three finite proportions, of which the first is not zero.

    >>> is_split("969,30,1"), is_split("0,1"), is_split("a")
    (True, False, False)
    """
    try:
        parts = [float(part) for part in text.split(",")]
    except ValueError:
        return False
    return len(parts) <= 3 and parts[0] > 0 and all(0 <= part < float("inf") for part in parts)


def decay_iters(v: Values) -> int:
    """Steps of the learning-rate schedule."""
    if v.lr_decay_samples is not None:
        return int(v.lr_decay_samples // (v.global_batch_size or v.micro_batch_size))
    return int(v.lr_decay_iters or v.train_iters)


def schedule_unit(v: Values) -> str:
    """Samples where one of warmup and decay is in samples, else steps."""
    return "steps" if v.lr_warmup_samples is None and v.lr_decay_samples is None else "samples"


def warmup_and_decay(v: Values) -> tuple[float, float]:
    """Lengths of warmup and schedule in one unit; without a set length, or a common unit, the schedule is endless."""
    decay, warmup = v.lr_decay_samples, v.lr_warmup_samples
    if schedule_unit(v) == "steps":
        decay, warmup = v.lr_decay_iters, v.lr_warmup_iters
    elif v.global_batch_size is not None:  # else its size follows from the number of ranks
        decay = decay or v.lr_decay_iters and v.lr_decay_iters * v.global_batch_size
        warmup = v.lr_warmup_iters * v.global_batch_size if warmup is None else warmup
    return warmup or 0, decay or float("inf")


# fmt: off
RUN_RULES = (
    Rule(lambda v: v.min_lr > v.lr, "min_lr {min_lr:g} is above lr {lr:g}", "lr is the peak", "set --min-lr or --lr"),
    Rule(lambda v: v.optimizer_offload_fraction > 1,
        "optimizer_offload_fraction {optimizer_offload_fraction:g} is above 1", "it is a fraction of the state",
        "set --optimizer-offload-fraction to at most 1"),
    Rule(lambda v: v.optimizer_cpu_offload and v.device is DeviceKind.cpu, "optimizer_cpu_offload has no effect",
        "optimizer state of a CPU is in host memory already", "leave --optimizer-cpu-offload out"),
    Rule(lambda v: v.decoupled_lr is not None and (v.decoupled_min_lr or 0) > v.decoupled_lr,
        "decoupled_min_lr {decoupled_min_lr:g} is above decoupled_lr {decoupled_lr:g}", "decoupled_lr is the peak",
        "set --decoupled-min-lr or --decoupled-lr"),
    Rule(lambda v: v.decoupled_lr is not None and v.decoupled_min_lr is None and v.min_lr > v.decoupled_lr,
        "min_lr {min_lr:g} is above decoupled_lr {decoupled_lr:g}", "decoupled_min_lr is unset, so min_lr is used",
        "set --decoupled-min-lr"),
    Rule(lambda v: v.decoupled_lr is not None and v.lr_warmup_iters and v.lr_warmup_init > v.decoupled_lr,
        "lr_warmup_init {lr_warmup_init:g} is above decoupled_lr {decoupled_lr:g}", "decoupled_lr is the peak",
        "set --lr-warmup-init or --decoupled-lr"),
    Rule(lambda v: v.lr_warmup_init > v.lr, "lr_warmup_init {lr_warmup_init:g} is above lr {lr:g}", "lr is the peak",
        "set --lr-warmup-init or --lr"),
    Rule(lambda v: warmup_and_decay(v)[0] >= warmup_and_decay(v)[1],
        lambda v: "a warmup of {:g} {unit} leaves nothing of a schedule of {:g} {unit}".format(
        *warmup_and_decay(v), unit=schedule_unit(v)),
        "the learning rate decays from the end of the warmup to the end of the schedule",
        "lower the warmup (--lr-warmup-iters, --lr-warmup-samples) or raise the schedule (--lr-decay-iters, "
        "--lr-decay-samples)"),
    Rule(lambda v: v.lr_decay_style == "WSD" and v.lr_wsd_decay_iters is v.lr_wsd_decay_samples is None,
        "lr_decay_style WSD has no length for its final decay", "lr_wsd_decay_iters is unset",
        lambda v: f"set --lr-wsd-decay-iters, for example {max(1, decay_iters(v) // 10)}"),
    Rule(lambda v: (v.lr_wsd_decay_samples or 0) > (v.lr_decay_samples or float("inf")),
        lambda v: f"lr_wsd_decay_samples {v.lr_wsd_decay_samples} is longer than the schedule of "
        f"{count_of(v.lr_decay_samples, 'sample')}",
        "the final decay is its last part", "lower --lr-wsd-decay-samples"),
    Rule(lambda v: v.lr_decay_style == "WSD" and (v.lr_wsd_decay_iters or 0) > decay_iters(v),
        lambda v: f"lr_wsd_decay_iters {v.lr_wsd_decay_iters} is longer than the whole schedule of "
        f"{count_of(decay_iters(v), 'step')}",
        "the final decay is its last part", lambda v: f"set --lr-wsd-decay-iters {max(1, decay_iters(v) // 10)}"),
    Rule(lambda v: v.weight_decay_incr_style is not WeightDecayStyle.constant
        and None in (v.start_weight_decay, v.end_weight_decay),
        "weight_decay_incr_style {weight_decay_incr_style.value} has no start or no end",
        "start_weight_decay is {start_weight_decay}, end_weight_decay is {end_weight_decay}",
        "set --start-weight-decay and --end-weight-decay"),
    Rule(lambda v: None not in (v.start_weight_decay, v.end_weight_decay) and v.start_weight_decay > v.end_weight_decay,
        "start_weight_decay {start_weight_decay:g} is above end_weight_decay {end_weight_decay:g}",
        "weight decay grows over the run", "raise --end-weight-decay or lower --start-weight-decay"),
    Rule(lambda v: not is_split(v.split), "split is {split!r}",
        "it takes proportions of training, validation and test, and training needs some", "set --split 969,30,1"),
    Rule(lambda v: v.data_path and v.train_data_path, "data_path and train_data_path are both set",
        "a run divides one blend by --split, or has one blend per split", "leave out --data-path or --train-data-path"),
    Rule(lambda v: v.data_stages and (v.data_path or v.train_data_path),
        lambda v: f"data_stages and {'data_path' if v.data_path else 'train_data_path'} are both set",
        "each stage names its own blend", "leave out --data-stages or the other"),
    Rule(lambda v: (v.vocab_file is None) != (v.merge_file is None),
        "vocab_file is {vocab_file} and merge_file is {merge_file}", "GPT-2's tokenizer has both files",
        "set --vocab-file and --merge-file, or --tokenizer-model"),
    Rule(lambda v: v.vocab_file is not None and v.tokenizer_model is not None,
        "vocab_file {vocab_file} and tokenizer_model {tokenizer_model}", "a run has one tokenizer",
        "leave out --vocab-file and --merge-file, or --tokenizer-model"),
    Rule(lambda v: v.load is not None and v.pretrained_checkpoint is not None,
        "load {load} and pretrained_checkpoint {pretrained_checkpoint}",
        "a run starts either from a checkpoint or from Hugging Face weights",
        "leave out --load or --pretrained-checkpoint"),
    Rule(lambda v: v.profile and not v.profile_step_start <= v.profile_step_end <= v.train_iters,
        "steps {profile_step_start} to {profile_step_end} of {train_iters} cannot be profiled",
        "profile_step_start <= profile_step_end <= train_iters must hold",
        "set --profile-step-start and --profile-step-end"),
    Rule(lambda v: v.rollback_on_spike is not None and not (v.save and v.save_interval),
        "rollback_on_spike {rollback_on_spike:g} has no checkpoint to go back to", "save is off, or save_interval is 0",
        "set --save-interval"),
    Rule(lambda v: v.debug_nan and v.torch_compile, "debug_nan and torch_compile are set",
        "modules inside a compiled block are not seen", "leave out --torch-compile for the search"),
    Rule(lambda v: v.hang_timeout_s is not None and v.hang_timeout_s >= 60 * v.distributed_timeout_minutes,
        "hang_timeout_s {hang_timeout_s:g} is not below distributed_timeout_minutes {distributed_timeout_minutes:g}",
        "a collective then fails before the watchdog reports",
        "lower --hang-timeout-s or raise --distributed-timeout-minutes"),
    Rule(lambda v: (v.distributed_timeout_seconds_after_init or 0) > 60 * v.distributed_timeout_minutes,
        "distributed_timeout_seconds_after_init {distributed_timeout_seconds_after_init:g} is above "
        "distributed_timeout_minutes {distributed_timeout_minutes:g}",
        "a start takes longer than a step: the timeout is lowered after the first step",
        "lower --distributed-timeout-seconds-after-init or raise --distributed-timeout-minutes"),
    Rule(lambda v: v.hang_timeout_s is not None and v.distributed_timeout_seconds_after_init is not None
        and v.hang_timeout_s >= v.distributed_timeout_seconds_after_init,
        "hang_timeout_s {hang_timeout_s:g} is not below distributed_timeout_seconds_after_init "
        "{distributed_timeout_seconds_after_init:g}",
        "a collective then fails before the watchdog reports",
        "lower --hang-timeout-s or raise --distributed-timeout-seconds-after-init"),
    Rule(lambda v: v.params_dtype is DType.fp16 and not v.loss_scale and v.min_loss_scale > v.initial_loss_scale,
        "min_loss_scale {min_loss_scale:g} is above initial_loss_scale {initial_loss_scale:g}",
        "the loss scale never falls below the minimum", "lower --min-loss-scale"),
)
# fmt: on


ALIGNMENT = 16  # torch's fp8 products take matrices whose sizes are multiples of this
SCALED_ALONG_ROWS = ("rowwise", "mxfp8")  # as in precision/fp8.py: a transposed weight has other scales
E4M3_ONLY = ("blockwise", "mxfp8")  # as in precision/fp8.py: torch has kernels with e4m3 operands only


def odd_sizes(v: Values) -> list[tuple[str, int]]:
    """The sizes of a rank's fp8 matrices that are no multiple of 16, with their names."""
    mla, tp = v.config.model.mla, v.tp
    sizes = [("hidden_size", v.hidden_size)]
    if mla is not None:
        heads = v.num_attention_heads // tp
        sizes += [
            ("q_lora_rank", mla.q_lora_rank or 0),
            ("kv_lora_rank", mla.kv_lora_rank),
            ("kv_lora_rank + qk_pos_emb_head_dim", mla.kv_lora_rank + mla.qk_pos_emb_head_dim),
            ("queries per rank: heads / tp x (qk_head_dim + qk_pos_emb_head_dim)", heads * v.head_dim),
            (
                "keys and values per rank: heads / tp x (qk_head_dim + v_head_dim)",
                heads * (mla.qk_head_dim + mla.v_head_dim),
            ),
            ("values per rank: heads / tp x v_head_dim", heads * mla.v_head_dim),
        ]
    else:
        sizes += [
            ("queries per rank: heads / tp x kv_channels", v.num_attention_heads // tp * v.head_dim),
            ("keys per rank: query groups / tp x kv_channels", max(1, v.query_groups // tp) * v.head_dim),
        ]
    if not all(v.moe_layers):
        sizes.append(("ffn_hidden_size / tp", v.ffn_size // tp))
    if v.has_experts:
        sizes.append(("moe_ffn_hidden_size / etp", v.moe_ffn_size // v.etp))
        sizes.append(("moe_shared_expert_intermediate_size / tp", (v.moe_shared_expert_intermediate_size or 0) // tp))
    return [(name, size) for name, size in sizes if size % ALIGNMENT]


def odd_text(v: Values) -> str:
    """The odd sizes, each with its number."""
    return "fp8 matrices have odd sizes: " + ", ".join(f"{name} is {size}" for name, size in odd_sizes(v))


def odd_fix(v: Values) -> str:
    """The nearest multiple of the first of them."""
    name, size = odd_sizes(v)[0]
    return f"make each a multiple of {ALIGNMENT} ({name}: {round_up(size, ALIGNMENT)}), or leave out --fp8-format"


# fmt: off
FP8_RULES = (
    Rule(lambda v: v.params_dtype is DType.fp16, "fp8_format with params_dtype fp16",
        "the results of fp8 products are bf16 or fp32; a dynamic loss scale would change the scales of every step",
        "set --bf16 or leave out --fp8-format"),
    Rule(lambda v: v.fp8_recipe in E4M3_ONLY and v.fp8_format is Fp8Format.hybrid,
        "fp8_recipe {fp8_recipe} with fp8_format hybrid", "torch multiplies such blocks in e4m3 only",
        "set --fp8-format e4m3 or another --fp8-recipe"),
    Rule(lambda v: v.fp8_param_gather and v.fp8_recipe in SCALED_ALONG_ROWS,
        "fp8_param_gather with fp8_recipe {fp8_recipe}",
        "fprop and dgrad scale a weight along other dims, so that two fp8 copies, as many bytes as bf16, would be sent",
        "set --fp8-recipe tensorwise, delayed or blockwise, or leave out --fp8-param-gather"),
)

FP8_LAYOUT_RULES = (
    Rule(lambda v: v.first_last_layers_bf16
        and v.num_layers_at_start_in_bf16 + v.num_layers_at_end_in_bf16 >= v.num_layers,
        lambda v: f"{count_of(v.num_layers_at_start_in_bf16, 'layer')} at the start and "
        f"{v.num_layers_at_end_in_bf16} at the end of {v.num_layers} without fp8",
        "no layer is left for fp8",
        f"lower {flag_of('num_layers_at_start_in_bf16')} and {flag_of('num_layers_at_end_in_bf16')}, "
        "or leave out --fp8-format"),
    Rule(odd_sizes, odd_text, f"torch's fp8 products take matrices whose sizes are multiples of {ALIGNMENT}", odd_fix),
)
# fmt: on


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
