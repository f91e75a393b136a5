"""Rules of the run: learning-rate schedule, data split, start, profiler and loss scale."""

from nanotrain.config.config import DeviceKind, DType, WeightDecayStyle
from nanotrain.config.rules.rule import Rule, Values
from nanotrain.quantities import count_of


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
