"""Settings without effect: which fields another field switches off, as a table, and what happens to them.

Such a setting is an error, with two exceptions. Where the command line changes the cause, a setting of a YAML file
returns to its default (`+config=tiny --data-parallel-sharding-strategy no_shard`, where tiny overlaps the parameter
gather). What published scripts of Megatron-LM set without effect (`is_harmless`) returns to its default in any case.
`nanotrain config --explain` names the reason.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from nanotrain.config.config import (
    Config,
    DType,
    LoadBalancing,
    PositionEmbedding,
    RecomputeGranularity,
    RouterScore,
    ShardingStrategy,
    WeightDecayStyle,
)
from nanotrain.config.model import GATED
from nanotrain.config.option import Entry
from nanotrain.config.rules.rule import Values
from nanotrain.config.schema import (
    ENTRIES,
    KEYS,
    argument_of,
    entries_of,
    typed,
    value_of,
    walk_sections,
    with_values,
    without_absent,
)
from nanotrain.errors import ConfigError, ErrorCollector


@dataclass(frozen=True)
class Unused:
    """Fields without effect under a condition."""

    fields: str  # their unique names, separated by spaces
    causes: str  # the fields that the condition reads
    holds: Callable[[Values], object]  # the condition
    why: str  # the reason
    fix: str = ""  # how the fields get an effect; empty: change the causes
    is_harmless: bool = False  # published scripts of Megatron-LM set the fields all the same: reset, not refused


# fields of absent sections that published scripts of Megatron-LM set
HARMLESS = {"rotary_scaling_factor", "yarn_correction_range_round_to_int", "mscale", "mscale_all_dim"}


def is_off(v: Values, *, name: str, value: str) -> bool:
    """Whether the switch of a section is off."""
    return bool(v[name] != value if value else not v[name])


def of_absent_sections() -> Iterator[Unused]:
    """A row per section that a model may not have: its fields belong to the switch."""
    for section, field, _ in walk_sections():
        name, value = field.metadata["switch"], field.metadata["value"]
        if not name:
            continue
        switch = KEYS.get(f"{section}.{name}") or KEYS[f"{section.rpartition('.')[0]}.{name}"]
        names = [entry.name for entry in entries_of(section) if entry is not switch]
        owner = f"{switch.name} {value}" if value else switch.name
        for is_harmless in (False, True):
            yield Unused(
                " ".join(name for name in names if (name in HARMLESS) is is_harmless),
                switch.name,
                partial(is_off, name=switch.name, value=value),
                f"it belongs to {owner}{', which is unset' if switch.is_optional else ''}",
                f"set {switch.flag}{f' {value}' if value else ''}",
                is_harmless,
            )


def update_rules(v: Values) -> set[str]:
    """The update rules in use."""
    return {v.optimizer, v.muon_scalar_optimizer} if v.optimizer == "muon" else {v.optimizer}


# fmt: off
UNUSED = (
    Unused("rotary_base rotary_percent", "position_embedding_type", lambda v: not v.has_rope,
        "it belongs to position_embedding_type rope or yarn"),
    Unused("no_rope_freq", "position_embedding_type", lambda v: not v.has_rope,
        "no layer has rotary positions", "set --position-embedding-type rope or yarn"),
    Unused("no_rope_freq", "multi_latent_attention", lambda v: v.multi_latent_attention,
        "every layer of multi_latent_attention rotates its qk_pos_emb_head_dim channels"),
    Unused("use_rope_scaling", "position_embedding_type",
        lambda v: v.position_embedding_type is not PositionEmbedding.rope,
        "it belongs to position_embedding_type rope"),
    Unused("use_rope_scaling", "multi_latent_attention", lambda v: v.multi_latent_attention,
        "multi_latent_attention scales its rotary channels by YaRN only", is_harmless=True),
    Unused("rotary_percent", "multi_latent_attention", lambda v: v.multi_latent_attention,
        "qk_pos_emb_head_dim gives the rotary channels"),
    Unused("glu_linear_offset activation_func_clamp_value", "activation", lambda v: v.activation not in GATED,
        "the activation has no gate", "set --activation swiglu, quick_geglu or geglu_tanh"),
    Unused("mtp_loss_scaling_factor", "mtp_num_layers", lambda v: not v.mtp_num_layers,
        "there is no multi-token prediction: mtp_num_layers is unset", is_harmless=True),
    Unused("rope_scaling_factor rope_low_freq_factor rope_high_freq_factor rope_original_max_positions",
        "use_rope_scaling", lambda v: not v.use_rope_scaling, "it belongs to use_rope_scaling"),
    Unused("rotary_seq_len_interpolation_factor", "position_embedding_type",
        lambda v: v.position_embedding_type is not PositionEmbedding.rope,
        "it belongs to position_embedding_type rope"),
    Unused("rotary_base_local", "position_embedding_type", lambda v: not v.has_rope,
        "it belongs to position_embedding_type rope or yarn"),
    Unused("window_attn_skip_freq rotary_base_local", "window_size", lambda v: v.window_size is None,
        "no layer has a window"),
    Unused("qk_layernorm_across_heads", "qk_layernorm", lambda v: not v.qk_layernorm, "it belongs to qk_layernorm"),
    Unused("attn_logit_softcapping softmax_type", "multi_latent_attention", lambda v: v.multi_latent_attention,
        "multi_latent_attention has a plain softmax"),
    Unused("qk_layernorm_across_heads softmax_scale", "multi_latent_attention", lambda v: v.multi_latent_attention,
        "with multi_latent_attention the width of the heads and mscale_all_dim give the scale of the scores"),
    Unused("reset_position_ids", "position_embedding_type",
        lambda v: v.position_embedding_type is PositionEmbedding.none,
        "position_embedding_type none has no positions"),
    Unused("add_qkv_bias", "add_bias_linear", lambda v: v.add_bias_linear,
        "add_bias_linear already adds these biases"),
    Unused("num_query_groups", "multi_latent_attention", lambda v: v.multi_latent_attention,
        "with multi_latent_attention qk_head_dim and v_head_dim give the width of the heads"),
    Unused("add_qkv_bias", "multi_latent_attention", lambda v: v.multi_latent_attention,
        "the projections of multi_latent_attention have no biases", is_harmless=True),
    Unused("kv_channels", "multi_latent_attention", lambda v: v.multi_latent_attention,
        "with multi_latent_attention qk_head_dim and v_head_dim give the width of the heads", is_harmless=True),
    Unused("qk_layernorm", "multi_latent_attention", lambda v: v.multi_latent_attention,
        "multi_latent_attention always normalizes the compressed queries, keys and values", is_harmless=True),
    Unused("use_checkpoint_args", "pretrained_checkpoint", lambda v: v.pretrained_checkpoint is not None,
        "config.json of pretrained_checkpoint sets the model section", is_harmless=True),
    # with ep > 1 there are experts: of the checkpoint that a command reads, or their absence is an error
    Unused("expert_tensor_parallel_size", "num_experts", lambda v: v.num_experts is None and v.ep == 1,
        "the model has no experts: num_experts is unset", is_harmless=True),
    Unused("ffn_hidden_size", "moe_ffn_hidden_size moe_layer_freq num_experts",
        lambda v: v.moe_ffn_hidden_size is not None and all(v.moe_layers),
        "every layer has experts, of width moe_ffn_hidden_size", is_harmless=True),
    Unused("moe_aux_loss_coeff", "moe_router_load_balancing_type",
        lambda v: v.moe_router_load_balancing_type == [LoadBalancing.none],
        "moe_router_load_balancing_type none has no loss"),
    Unused("moe_shared_expert_gate", "moe_shared_expert_intermediate_size",
        lambda v: v.moe_shared_expert_intermediate_size is None, "there is no shared expert",
        "set --moe-shared-expert-intermediate-size"),
    Unused("moe_router_bias_update_rate", "moe_router_enable_expert_bias",
        lambda v: not v.moe_router_enable_expert_bias, "it belongs to moe_router_enable_expert_bias"),
    Unused("moe_router_pre_softmax", "moe_router_score_function",
        lambda v: v.moe_router_score_function is RouterScore.sigmoid,
        "moe_router_score_function sigmoid computes no softmax", is_harmless=True),
    Unused("overlap_param_gather", "data_parallel_sharding_strategy",
        lambda v: v.data_parallel_sharding_strategy is ShardingStrategy.no_shard,
        "data_parallel_sharding_strategy no_shard gathers no parameters"),
    Unused("reshard_after_forward fsdp_double_buffer", "data_parallel_sharding_strategy",
        lambda v: v.data_parallel_sharding_strategy is not ShardingStrategy.optim_grads_params,
        "only data_parallel_sharding_strategy optim_grads_params gathers units"),
    Unused("fsdp_prefetch_depth", "data_parallel_sharding_strategy overlap_param_gather",
        lambda v: v.data_parallel_sharding_strategy is not ShardingStrategy.optim_grads_params
        or not v.overlap_param_gather,
        "only data_parallel_sharding_strategy optim_grads_params with overlap_param_gather gathers units ahead"),
    Unused("sequence_parallel", "tensor_model_parallel_size", lambda v: v.tensor_model_parallel_size == 1,
        "with tensor_model_parallel_size 1 no rank shares activations", "set --tensor-model-parallel-size above 1",
        is_harmless=True),
    Unused("cp_comm_type", "context_parallel_size", lambda v: v.context_parallel_size == 1,
        "with context_parallel_size 1 no sequence is split", "set --context-parallel-size above 1"),
    Unused("decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers", "pipeline_model_parallel_layout",
        lambda v: v.pipeline_model_parallel_layout is not None,
        "pipeline_model_parallel_layout gives the layers of every stage"),
    Unused("use_tp_pp_dp_mapping", "pipeline_model_parallel_size", lambda v: v.pipeline_model_parallel_size == 1,
        "with pipeline_model_parallel_size 1 there is one stage", is_harmless=True),
    Unused(
        "pipeline_schedule num_virtual_stages_per_pipeline_rank "
        "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split",
        "pipeline_model_parallel_size", lambda v: v.pipeline_model_parallel_size == 1,
        "with pipeline_model_parallel_size 1 there is one stage", "set --pipeline-model-parallel-size above 1"),
    Unused("recompute_method recompute_num_layers", "recompute_granularity",
        lambda v: v.recompute_granularity is not RecomputeGranularity.full,
        "it belongs to recompute_granularity full"),
    Unused("cpu_offloading_num_layers", "cpu_offloading", lambda v: not v.cpu_offloading, "cpu_offloading is off"),
    Unused("recompute_modules", "recompute_granularity",
        lambda v: v.recompute_granularity is not RecomputeGranularity.selective,
        "it belongs to recompute_granularity selective"),
    Unused("lr_wsd_decay_iters lr_wsd_decay_samples lr_wsd_decay_style", "lr_decay_style",
        lambda v: v.lr_decay_style != "WSD", "it belongs to lr_decay_style WSD"),
    Unused("lr_wsd_decay_iters", "lr_wsd_decay_samples", lambda v: v.lr_wsd_decay_samples is not None,
        "lr_wsd_decay_samples already sets the length of the final decay"),
    Unused("min_lr decoupled_min_lr", "lr_decay_style", lambda v: v.lr_decay_style == "constant",
        "lr_decay_style constant never decays"),
    Unused("lr_decay_iters lr_decay_samples", "lr_decay_style",
        lambda v: v.lr_decay_style == "constant" and v.lr_warmup_fraction is None,
        "lr_decay_style constant never decays"),
    Unused("lr_decay_iters", "lr_decay_samples", lambda v: v.lr_decay_samples is not None,
        "lr_decay_samples already sets the length of the schedule"),
    Unused("lr_warmup_iters lr_warmup_samples", "lr_warmup_fraction", lambda v: v.lr_warmup_fraction is not None,
        "lr_warmup_fraction already sets the warmup"),
    Unused("lr_warmup_iters", "lr_warmup_samples", lambda v: v.lr_warmup_samples is not None,
        "lr_warmup_samples already sets the warmup"),
    Unused("lr_warmup_init", "lr_warmup_iters lr_warmup_samples lr_warmup_fraction",
        lambda v: not (v.lr_warmup_iters or v.lr_warmup_samples or v.lr_warmup_fraction), "there is no warmup"),
    Unused("optimizer_offload_fraction", "optimizer_cpu_offload", lambda v: not v.optimizer_cpu_offload,
        "it belongs to optimizer_cpu_offload", "set --optimizer-cpu-offload"),
    Unused("sgd_momentum", "optimizer", lambda v: v.optimizer != "sgd", "it belongs to optimizer sgd"),
    Unused("lion_beta1 lion_beta2", "optimizer muon_scalar_optimizer",
        lambda v: "lion" not in update_rules(v), "it belongs to optimizer lion"),
    Unused("adam_beta1 adam_beta2 adam_eps", "optimizer muon_scalar_optimizer",
        lambda v: update_rules(v) <= {"sgd", "lion", "muon"}, "it belongs to optimizer adam"),
    Unused(
        "muon_momentum muon_use_nesterov muon_num_ns_steps muon_scale_mode muon_extra_scale_factor muon_tp_mode "
        "muon_fp32_matmul_prec muon_scalar_optimizer",
        "optimizer", lambda v: v.optimizer != "muon", "it belongs to optimizer muon", "set --optimizer muon"),
    Unused("muon_tp_mode", "tensor_model_parallel_size expert_tensor_parallel_size", lambda v: v.tp == v.etp == 1,
        "without tensor parallelism there are no blocks", "set --tensor-model-parallel-size above 1"),
    Unused("qk_clip_alpha qk_clip_threshold", "qk_clip", lambda v: not v.qk_clip, "it belongs to qk_clip",
        "set --qk-clip"),
    Unused("exp_avg_sq_dtype", "optimizer muon_scalar_optimizer",
        lambda v: update_rules(v) <= {"sgd", "lion", "muon"}, "this optimizer has no second moments"),
    Unused("exp_avg_dtype", "optimizer sgd_momentum", lambda v: v.optimizer == "sgd" and not v.sgd_momentum,
        "without momentum there is no state"),
    Unused("main_params_dtype exp_avg_dtype exp_avg_sq_dtype", "use_precision_aware_optimizer",
        lambda v: not v.use_precision_aware_optimizer, "it belongs to use_precision_aware_optimizer",
        "add --use-precision-aware-optimizer"),
    Unused("main_params_dtype", "params_dtype",
        lambda v: v.use_precision_aware_optimizer and v.params_dtype is DType.fp32,
        "fp32 parameters are their own main parameters", "set --bf16 or --fp16"),
    Unused("decoupled_min_lr", "decoupled_lr", lambda v: v.decoupled_lr is None, "it belongs to decoupled_lr",
        "set --decoupled-lr"),
    Unused("start_weight_decay end_weight_decay", "weight_decay_incr_style",
        lambda v: v.weight_decay_incr_style is WeightDecayStyle.constant,
        "weight_decay_incr_style constant keeps weight_decay", "set --weight-decay-incr-style linear or cosine"),
    Unused("weight_decay", "weight_decay_incr_style",
        lambda v: v.weight_decay_incr_style is not WeightDecayStyle.constant,
        "weight_decay_incr_style linear and cosine take start_weight_decay and end_weight_decay"),
    Unused("loss_scale", "params_dtype", lambda v: v.params_dtype is not DType.fp16,
        "only params_dtype fp16 scales the loss", is_harmless=True),
    Unused("initial_loss_scale min_loss_scale loss_scale_window hysteresis", "loss_scale",
        lambda v: v.params_dtype is DType.fp16 and v.loss_scale > 0, "loss_scale is constant where it is set"),
    Unused("initial_loss_scale", "params_dtype", lambda v: v.params_dtype is not DType.fp16,
        "only params_dtype fp16 scales the loss", is_harmless=True),
    Unused("min_loss_scale loss_scale_window hysteresis", "params_dtype",
        lambda v: v.params_dtype is not DType.fp16, "only params_dtype fp16 scales the loss"),
    Unused("fp8_param_gather", "data_parallel_sharding_strategy",
        lambda v: v.data_parallel_sharding_strategy is ShardingStrategy.no_shard, "no_shard gathers no parameters",
        "set --data-parallel-sharding-strategy optim, optim_grads or optim_grads_params"),
    Unused("fp8_margin fp8_amax_history_len fp8_amax_compute_algo", "fp8_recipe", lambda v: v.fp8_recipe != "delayed",
        "only fp8_recipe delayed keeps an amax history"),
    Unused("fp8_amax_compute_algo", "fp8_amax_history_len", lambda v: v.fp8_amax_history_len == 1,
        "the history has one step"),
    Unused("num_layers_at_start_in_bf16 num_layers_at_end_in_bf16", "first_last_layers_bf16",
        lambda v: not v.first_last_layers_bf16, "it belongs to first_last_layers_bf16"),
    Unused(
        "data_path train_data_path data_stages quickstart quickstart_vocab_size generate_tokens generate_prompt",
        "mock_data", lambda v: v.mock_data, "mock_data has no text and no documents"),
    Unused("reset_position_ids reset_attention_mask eod_mask_loss", "mock_data", lambda v: v.mock_data,
        "mock_data has no documents", is_harmless=True),
    Unused("valid_data_path test_data_path", "train_data_path data_stages",
        lambda v: not v.train_data_path and not v.data_stages,
        "data_path is divided by split", "set --train-data-path"),
    Unused("test_data_path", "data_stages valid_data_path",
        lambda v: v.data_stages and not v.valid_data_path,
        "without valid_data_path split divides the corpora of the stages", "set --valid-data-path too"),
    Unused("split", "train_data_path data_stages valid_data_path",
        lambda v: v.train_data_path or v.data_stages and v.valid_data_path,
        "each split has its own corpora", is_harmless=True),
    Unused("tokenizer_model vocab_file merge_file", "mock_data vocab_size", lambda v: v.mock_data and v.vocab_size,
        "mock_data has no text, and vocab_size is set", is_harmless=True),
    Unused("save_interval save_retain_interval keep_last async_save exit_on_save_failure save_fallback_dir", "save",
        lambda v: not v.save, "nothing is saved"),
    Unused("eval_iters", "eval_interval", lambda v: v.eval_interval == 0, "eval_interval 0 never validates",
        is_harmless=True),
    Unused("report_interval", "report", lambda v: not v.report, "report is off"),
    Unused("generate_prompt", "generate_tokens", lambda v: v.generate_tokens == 0, "no sample is generated"),
    Unused("profile_step_start profile_step_end", "profile", lambda v: not v.profile, "profile is off"),
    Unused("prometheus_address", "prometheus_port", lambda v: v.prometheus_port is None, "prometheus_port is unset"),
    Unused("tensorboard_dir", "tensorboard", lambda v: not v.tensorboard, "tensorboard is off"),
    Unused("wandb_project wandb_exp_name wandb_entity", "wandb", lambda v: not v.wandb, "wandb is off"),
)
# fmt: on


def reset_unused(
    config: Config,
    *,
    explicit: frozenset[str],
    errors: ErrorCollector,
    defaults: frozenset[str] = frozenset(),
    unreadable: frozenset[str] = frozenset(),
) -> tuple[Config, dict[str, str]]:
    """Reset settings of YAML files to their defaults where the command line switched them off.

    Args:
        config: the composed configuration.
        explicit: keys set on the command line.
        errors: collects a ConfigError per setting without effect that the command line did not switch off.
        defaults: keys whose value is a default of Megatron-LM, which no one set; they are reset too.
        unreadable: unique names of fields whose value could not be read; rules with such a cause are left out.

    Returns:
        The configuration, and the origin of each value that was reset.
    """
    origins: dict[str, str] = {}
    for rule in (*of_absent_sections(), *UNUSED):
        causes = [ENTRIES[name] for name in rule.causes.split()]
        if not unreadable.isdisjoint(cause.name for cause in causes):
            continue
        # The model section may be read later, from a checkpoint or from config.json of pretrained weights.
        if not config.is_model_known and any(cause.key.startswith("model.") for cause in causes):
            continue
        with errors:
            if not rule.holds(Values(config)):
                continue
        is_overruled = any(cause.key in explicit for cause in causes)
        for entry in (ENTRIES[name] for name in rule.fields.split()):
            value = value_of(config, entry.key)
            if value == entry.default:
                continue
            is_reset = rule.is_harmless or entry.key in defaults or (is_overruled and entry.key not in explicit)
            if not is_reset:
                errors.errors.append(without_effect(config, entry, rule=rule))
                continue
            config = with_values(config, {entry.key: entry.default})
            source = "the command line" if entry.key in explicit else "the YAML"
            source = "Megatron-LM" if entry.key in defaults else source
            origins[entry.key] = f"default, not {source}'s {typed(value)}: {rule.why}"
    return without_absent(config) if config.is_model_known else config, origins


def without_effect(config: Config, entry: Entry, *, rule: Unused) -> ConfigError:
    """The error for a setting without effect."""
    value = value_of(config, entry.key)
    causes = [ENTRIES[cause] for cause in rule.causes.split()]
    change = f"change {' or '.join(cause.flag for cause in causes)}"
    if len(causes) == 1 and causes[0].kind is bool:
        change = f"set {argument_of(causes[0].name, not value_of(config, causes[0].key))}"
    fix = f"leave {entry.flag} out or {rule.fix or change}"
    return ConfigError(f"{entry.key} = {typed(value)} has no effect", why=rule.why, fix=fix)
