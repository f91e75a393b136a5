"""Rules of the run: learning-rate schedule, data split, profiler and timeouts; and the sizes of fp8 matrices."""

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
    Rule(lambda v: not is_split(v.split), "split is {split!r}",
        "it takes proportions of training, validation and test, and training needs some", "set --split 969,30,1"),
    Rule(lambda v: v.profile and not v.profile_step_start <= v.profile_step_end <= v.train_iters,
        "steps {profile_step_start} to {profile_step_end} of {train_iters} cannot be profiled",
        "profile_step_start <= profile_step_end <= train_iters must hold",
        "set --profile-step-start and --profile-step-end"),
    Rule(lambda v: v.hang_timeout_s is not None and v.hang_timeout_s >= 60 * v.distributed_timeout_minutes,
        "hang_timeout_s {hang_timeout_s:g} is not below distributed_timeout_minutes {distributed_timeout_minutes:g}",
        "a collective then fails before the watchdog reports",
        "lower --hang-timeout-s or raise --distributed-timeout-minutes"),
    Rule(lambda v: (v.distributed_timeout_seconds_after_init or 0) > 60 * v.distributed_timeout_minutes,
        "distributed_timeout_seconds_after_init {distributed_timeout_seconds_after_init:g} is above "
        "distributed_timeout_minutes {distributed_timeout_minutes:g}",
        "a start takes longer than a step: the timeout is lowered after the first step",
        "lower --distributed-timeout-seconds-after-init or raise --distributed-timeout-minutes"),
)
# fmt: on


ALIGNMENT = 16  # torch's fp8 products take matrices whose sizes are multiples of this


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
